// What a task of paged attention does with its next keys: a tile at a time, or, where it has many rows, a partition.
#pragma once

#include <algorithm>

#include "ops.h"
#include "attention/paged_attention_in_place.h"
#include "attention/paged_attention_plan.h"
#include "attention/paged_attention_softmax.h"
#include "attention/paged_attention_sums.h"
#include "attention/paged_attention_tile.h"
#include "attention/paged_attention_unpacked.h"

namespace pagoda::attention {

constexpr int64_t kManyRows = 64;  // of a task
constexpr int kTilesAtOnce = 2;    // of a partition, whose values are multiplied in one go
inline constexpr std::array<float, kRows> kOnes = [] {
  std::array<float, kRows> ones{};
  ones.fill(1.0f);
  return ones;
}();  // factors of sums that stay

// Where some keys and values are, those of a tile or of a partition.
struct Tile {
  int64_t slots[kPartitionKeys];
  int num_keys = 0;
};

template <typename P>
struct Scratch {
  Buffer<P> query, keys, values;
  Buffer<float> sums, more_sums;
  Buffer<RowState> states, more_states;
  Buffer<int64_t> positions;  // of the rows of all heads of a task
  Tile tile, next_tile;
  Buffer<float> factors, all_products;  // of these rows
  Buffer<P> all_weights;
  alignas(64) float k_scales[kPartitionKeys], v_scales[kPartitionKeys];
  alignas(64) float products[kRowsOf<P> * kTileKeys];
  alignas(64) P weights[kTilesAtOnce * kRowsOf<P> * kTileKeys];
};

#if defined(__AMX_BF16__)
// The weights of some tiles, as a left matrix: [tile][row][kTileKeys].
struct WeightTiles {
  static constexpr int64_t stride = kTileKeys * 2, kBlocks = kTileKeys / 32;
  const char* at;

  const char* block(int64_t i) const { return at + i / kBlocks * kAmxRows * stride + i % kBlocks * (stride / kBlocks); }
};
#endif

template <typename T, typename S>
class Steps {
 public:
  using P = Packed<T>;

  Steps(const AttentionBatch& batch, const AttentionCache<S>& cache, const Plan& plan)
      : batch_(batch),
        cache_(cache),
        plan_(plan),
        group_(batch.num_heads / batch.num_kv_heads),
        query_width_(round_up(batch.head_dim, kStep<P> * kStepsAtOnce<P>)),
        width_(round_up(batch.head_dim, kLanes)) {}

  // Whether few rows meet keys where they lie.
  bool is_in_place(const Task& task) const {
    return can_stay_in_place<P, S>(task.num_queries * group_, batch_.head_dim, batch_.block_size);
  }

  // Whether their queries are columns.
  bool takes_columns(const Task& task) const { return kUsesAmx<P> && is_in_place(task); }

  // Whether many rows take a partition at once.
  bool takes_partitions(const Task& task) const {
    return kUsesAmx<P> && task.num_heads == 1 && task.num_queries * group_ >= kManyRows;
  }

  // The tile of the task's keys that begins at `start`; `next` is the task whose keys come then, if any. query: of all
  // rows, packed, as columns where the task takes them.
  void add_tile(const Task& task, int64_t start, const Task* next, const P* query, const Sums& sums,
                Registers& registers, Scratch<P>& scratch) const {
    if (is_in_place(task)) {
      add_tile_in_place(task, start, next, query, sums, registers, scratch);
    } else {
      add_tile_of_heads(task, start, next, query, sums, registers, scratch);
    }
  }

  // Many rows of one KV head over the keys [begin, end) of a partition. These are packed as a whole, in L2; each 32
  // rows stay in L1 with their sums while keys and values pass by, two tiles between a load of the sums and a store.
  // sums_of(row) is where those of the rows from `row` on go; when `count` rows are done, take(row, count, sums) has
  // them.
  template <typename SumsOf, typename Take>
  void add_partition(const Task& task, int64_t begin, int64_t end, const Task* next, const P* query,
                     Registers& registers, Scratch<P>& scratch, const SumsOf& sums_of, const Take& take) const {
#if defined(__AMX_BF16__)
    if constexpr (kUsesAmx<P>) {
      find_keys(task, begin, end - begin, scratch.tile);
      Tile& coming = scratch.next_tile;
      coming.num_keys = 0;
      if (next != nullptr) find_keys(*next, next == &task ? end : next->begin, keys_at_once(*next), coming);
      const int tiles = static_cast<int>(divide_up(end - begin, kTileKeys));
      Prefetch nothing{};
      for (int t = 0; t < tiles; ++t) {
        pack_tile(task.head, t, nothing, scratch);
        load_scales(task.head, t, scratch);
      }
      const int64_t rows = task.num_queries * group_, blocks = query_width_ / (kStep<P> * kAmxSteps);
      const int64_t calls = divide_up(rows, kRowsOf<P>) * tiles * (kTileKeys / 32) * blocks * amx::kTurns;
      Prefetch ahead = prefetch(next == nullptr ? task : *next, coming, 0, coming.num_keys, calls);
      for (int64_t row = 0; row < rows; row += kRowsOf<P>) {
        const int count = static_cast<int>(std::min<int64_t>(kRowsOf<P>, rows - row));
        const Sums sums = sums_of(row);
        registers.set(count);
        sums.forget(count);
        for (int t = 0; t < tiles; t += kTilesAtOnce) {
          add_tiles(task, begin, t, std::min(tiles, t + kTilesAtOnce), row, count, query, sums, ahead, scratch);
        }
        take(row, count, sums);
      }
      std::swap(scratch.tile, coming);
    }
#endif
  }

  void fetch_first_tile(const Task& task, Scratch<P>& scratch) const {
    find_keys(task, task.begin, kTileKeys, scratch.tile);
    const int num_keys = scratch.tile.num_keys;
    prefetch(task, scratch.tile, 0, num_keys, 1).step();
  }

 private:
  // Keys that are added at a time.
  int64_t keys_at_once(const Task& task) const { return takes_partitions(task) ? kPartitionKeys : kTileKeys; }

  // All heads of the task over the keys of scratch.tile, while the next tile is fetched: that of task `next`, if any.
  void add_tile_of_heads(const Task& task, int64_t start, const Task* next, const P* query, const Sums& sums,
                         Registers& registers, Scratch<P>& scratch) const {
    const int64_t rows = task.num_queries * group_;
    Tile& coming = scratch.next_tile;
    coming.num_keys = 0;
    if (next != nullptr) find_keys(*next, next == &task ? start + kTileKeys : next->begin, kTileKeys, coming);
    for (int64_t i = 0; i < task.num_heads; ++i) {
      const int64_t first = coming.num_keys * i / task.num_heads, last = coming.num_keys * (i + 1) / task.num_heads;
      const int64_t calls = packing_calls(scratch.tile.num_keys);
      Prefetch ahead = prefetch(next == nullptr ? task : *next, coming, first, last, calls);
      if (!can_stay_unpacked<P>(rows, batch_.head_dim)) pack_tile(task.head + i, 0, ahead, scratch);
      load_scales(task.head + i, 0, scratch);
      add_tile_of_head(task, i, start, query + i * rows * query_width_, sums, ahead, registers, scratch);
    }
    std::swap(scratch.tile, coming);
  }

#if defined(__AMX_BF16__)
  // `count` rows from `row` on, with sums of their own, over tiles [first, last) of the packed ones.
  void add_tiles(const Task& task, int64_t begin, int first, int last, int64_t row, int count, const P* query,
                 const Sums& sums, Prefetch& ahead, Scratch<P>& scratch) const {
    const int64_t* positions = scratch.positions.get(0);
    const P *keys = scratch.keys.get(0), *values = scratch.values.get(0);
    float* out = sums.values;
    float factors[kTilesAtOnce][kRowsOf<P>];
    int ends[kTilesAtOnce] = {};  // of the keys that are seen
    for (int t = first; t < last; ++t) {
      const int64_t start = begin + t * kTileKeys, seen = positions[row + count - 1] + 1 - start;
      const int num_keys = std::min(kTileKeys, scratch.tile.num_keys - t * kTileKeys);
      const int end = static_cast<int>(std::min<int64_t>(num_keys, seen));
      if (end <= 0 || plan_.first_key(positions[row]) >= start + end) continue;
      ends[t - first] = end;
      const amx::Operand left{query + row * query_width_, query_width_ * 2, amx::kWords * 4};
      multiply_in_tiles<true>(count, static_cast<int>(divide_up(end, kLanes)), left,
                              keys + t * kTileKeys * query_width_, int64_t{kTileKeys} * kStep<P>,
                              divide_up(query_width_ / kStep<P>, kAmxSteps), scratch.products, kTileKeys, false,
                              [&](int) { ahead.step_to_l2(); });
      P* weights = scratch.weights + (t - first) * kRowsOf<P> * kTileKeys;
      for (int i = 0; i < count; i += kRowsAtOnce) {
        weigh(task, t, start, row + i, std::min(kRowsAtOnce, count - i), scratch.products + i * kTileKeys,
              weights + i * kTileKeys, sums.states + i, factors[t - first] + i, scratch);
      }
    }
    const auto all_are = [&](int i, float factor) {
      return std::all_of(factors[i], factors[i] + count, [&](float one) { return one == factor; });
    };
    // The values of some tiles, the last one up to `end`.
    const auto add_values = [&](int i, int tiles, int end) {
      const bool adds = !all_are(i, 0.0f);  // else nothing has been added up yet
      for (int r = 0; adds && r < count; ++r)
        scale_row(out + r * width_, static_cast<int>(width_ / kLanes), factors[i][r]);
      const WeightTiles weights{reinterpret_cast<const char*>(scratch.weights + i * kRowsOf<P> * kTileKeys)};
      const int64_t blocks = divide_up((tiles - 1) * kTileKeys + end, kStep<P> * kAmxSteps);
      multiply_in_tiles<true>(count, static_cast<int>(width_ / kLanes), weights,
                              values + (first + i) * kTileKeys * width_, width_ * kStep<P>, blocks, out, width_, adds,
                              [](int) {});
    };
    if (ends[0] == kTileKeys && ends[1] > 0 && all_are(1, 1.0f)) return add_values(0, 2, ends[1]);
    for (int i = 0; i < kTilesAtOnce; ++i) {
      if (ends[i] > 0) add_values(i, 1, ends[i]);
    }
  }
#endif

  // The same for few rows, mostly from where keys and values lie: first the products of all heads, then their weights,
  // then the sums of values.
  void add_tile_in_place(const Task& task, int64_t start, const Task* next, const P* query, const Sums& sums,
                         Registers& registers, Scratch<P>& scratch) const {
    if constexpr (kHasInPlace<P, S>) {
      Tile& coming = scratch.next_tile;
      coming.num_keys = 0;
      if (next != nullptr) find_keys(*next, next == &task ? start + kTileKeys : next->begin, kTileKeys, coming);
      const int64_t rows = task.num_queries * group_, all_rows = rows * task.num_heads;
      const int num_keys = scratch.tile.num_keys, num_rows = static_cast<int>(rows);
      const bool has_packed_values = kUsesAmx<P> && rows > kValueRowsInPlace;
      const int64_t calls = task.num_heads * calls_in_place(num_keys, has_packed_values);
      Prefetch ahead = prefetch(next == nullptr ? task : *next, coming, 0, coming.num_keys, calls);
      float* products = scratch.all_products.get(all_rows * kTileKeys);
      registers.set_columns(num_rows);
      constexpr int kPart = kPartInPlace<P>;
      for (int first = 0; first < num_keys; first += kPart) {
        for (int64_t i = 0; i < task.num_heads; ++i) {
          Cached<S> keys = cached(cache_.keys, task.head + i, first, scratch);
          keys.num_keys = std::min(keys.num_keys, kPart);
          multiply_keys(keys, query + i * rows * batch_.head_dim, num_rows, batch_.head_dim,
                        products + i * rows * kTileKeys + first, ahead);
        }
      }
      P* weights = scratch.all_weights.get(all_rows * kTileKeys);
      float* factors = scratch.factors.get(all_rows);
      const int64_t part = task.num_queries == 1 ? all_rows : rows;  // what sees no less the later it comes
      for (int64_t row = 0; row < all_rows;) {
        const auto count = static_cast<int>(std::min<int64_t>(kRowsAtOnce, part - row % part));
        weigh(task, 0, start, row, count, products + row * kTileKeys, weights + row * kTileKeys, sums.states + row,
              factors + row, scratch);
        row += count;
      }
      const int64_t seen = scratch.positions.get(0)[rows - 1] + 1 - start;
      const int end = static_cast<int>(std::min<int64_t>(num_keys, seen));
      if (has_packed_values) registers.set(rows);
      for (int first = 0; first < end; first += kPart) {
        for (int64_t i = 0; i < task.num_heads; ++i) {
          const Cached<S> values = cached(cache_.values, task.head + i, first, scratch);
          const P* of_rows = weights + i * rows * kTileKeys + first;
          const float* of_sums = first == 0 ? factors + i * rows : kOnes.data();
          float* out = sums.values + i * rows * width_;
          if (has_packed_values) {
            P* packed = scratch.values.get(0);
            pack_values(values.base, values.stride, values.slots, num_keys, batch_.head_dim, width_, packed, ahead);
            multiply_all(num_rows, static_cast<int>(width_ / kLanes), of_rows, kTileKeys, packed, width_ * kStep<P>,
                         divide_up(end, kStep<P>), out, width_, of_sums);
          } else {
            multiply_values(num_rows, of_rows, values, std::min(kPart, end - first), batch_.head_dim, out, of_sums,
                            ahead);
          }
        }
      }
      std::swap(scratch.tile, coming);
    }
  }

  // Slots of the task's keys [start, start + count). Blocks that left the window of all of its queries are not theirs
  // any more: the first that did not stands in their place, whose keys get no weight as theirs would not.
  void find_keys(const Task& task, int64_t start, int64_t count, Tile& tile) const {
    const int32_t* table = batch_.block_table + task.seq * batch_.table_stride;
    const int64_t size = batch_.block_size, end = std::min(task.end, start + count);
    const int64_t first = plan_.first_key(plan_.queries[task.query].position) / size;
    tile.num_keys = 0;
    for (int64_t key = start; key < end;) {
      const int64_t block = key / size, stop = std::min((block + 1) * size, end);
      for (; key < stop; ++key) tile.slots[tile.num_keys++] = table[std::max(block, first)] * size + key - block * size;
    }
  }

  // How often one head's keys and values in place, so many, step ahead.
  int64_t calls_in_place(int num_keys, bool has_packed_values) const {
    if (!kUsesAmx<P>) return packing_calls(num_keys);
    const int64_t of_keys = divide_up(num_keys, kKeysInPlace) * divide_up(batch_.head_dim, kStep<P> * kAmxSteps);
    if (has_packed_values) return of_keys + divide_up(num_keys, 8);
    return of_keys + divide_up(num_keys, kValuesAStep) * divide_up(batch_.head_dim, 64);
  }

  // How often packing of one head's keys and values, so many, steps ahead; that of what stays unpacked, no less often.
  int64_t packing_calls(int num_keys) const {
    return divide_up(num_keys, kLanes) * divide_up(query_width_ / kStep<P>, kLanes) + divide_up(num_keys, 8);
  }

  // Of the task's heads in slots [first, last), in so many steps.
  Prefetch prefetch(const Task& task, const Tile& tile, int64_t first, int64_t last, int64_t calls) const {
    const int64_t column = task.head * cache_.width, row = batch_.num_kv_heads * cache_.width;
    const int64_t bytes = task.num_heads * cache_.width * sizeof(S);
    return {reinterpret_cast<const char*>(cache_.keys + column),
            reinterpret_cast<const char*>(cache_.values + column),
            static_cast<int64_t>(row * sizeof(S)),
            bytes,
            tile.slots,
            first,
            last,
            divide_up((last - first) * divide_up(bytes, 64), calls)};
  }

  // Tile t of those in scratch.tile.
  void pack_tile(int64_t head, int t, Prefetch& ahead, Scratch<P>& scratch) const {
    const int64_t stride = batch_.num_kv_heads * cache_.width, column = head * cache_.width;
    const int64_t* slots = scratch.tile.slots + t * kTileKeys;
    const int num_keys = std::min(kTileKeys, scratch.tile.num_keys - t * kTileKeys);
    P *keys = scratch.keys.get(0) + t * kTileKeys * query_width_,
      *values = scratch.values.get(0) + t * kTileKeys * width_;
    pack_keys(cache_.keys + column, stride, slots, num_keys, batch_.head_dim, keys, ahead);
    pack_values(cache_.values + column, stride, slots, num_keys, batch_.head_dim, width_, values, ahead);
  }

  void load_scales(int64_t head, int t, Scratch<P>& scratch) const {
    if constexpr (std::is_same_v<S, int8_t>) {
      const int64_t stride = batch_.num_kv_heads * cache_.width;
      const int64_t scale = (head + 1) * cache_.width - static_cast<int64_t>(sizeof(float));
      const int64_t* slots = scratch.tile.slots + t * kTileKeys;
      const int num_keys = std::min(kTileKeys, scratch.tile.num_keys - t * kTileKeys);
      float *k_scales = scratch.k_scales + t * kTileKeys, *v_scales = scratch.v_scales + t * kTileKeys;
      for (int key = 0; key < num_keys; ++key) {
        std::memcpy(&k_scales[key], cache_.keys + slots[key] * stride + scale, sizeof(float));
        std::memcpy(&v_scales[key], cache_.values + slots[key] * stride + scale, sizeof(float));
      }
      // A weight of 0 times what an earlier tile has left there could be NaN.
      std::fill(v_scales + num_keys, v_scales + kTileKeys, 0.0f);
    }
  }

  // One head's of the tile, or of what follows its first keys or values.
  Cached<S> cached(const S* all, int64_t head, int first, const Scratch<P>& scratch) const {
    return {all + head * cache_.width, batch_.num_kv_heads * cache_.width, scratch.tile.slots + first,
            scratch.tile.num_keys - first};
  }

  // The rows of the task's KV head `i` over the tile, packed or not, the keys from `start` on.
  void add_tile_of_head(const Task& task, int64_t i, int64_t start, const P* query, const Sums& sums, Prefetch& ahead,
                        Registers& registers, Scratch<P>& scratch) const {
    const int64_t rows = task.num_queries * group_, head = task.head + i;
    float* values_of_head = sums.values + i * rows * width_;
    const int num_keys = scratch.tile.num_keys;
    const int query_steps = static_cast<int>(query_width_ / kStep<P>);
    const int64_t* positions = scratch.positions.get(0);
    for (int64_t row = 0; row < rows; row += kRowsOf<P>) {
      const int count = static_cast<int>(std::min<int64_t>(kRowsOf<P>, rows - row));
      const int end = static_cast<int>(std::min<int64_t>(num_keys, positions[row + count - 1] + 1 - start));
      if (end <= 0 || plan_.first_key(positions[row]) >= start + end) continue;
      registers.set(count);
      const P* rows_query = query + row * query_width_;
      if (can_stay_unpacked<P>(rows, batch_.head_dim)) {
        multiply_keys(cached(cache_.keys, head, 0, scratch), rows_query, count, batch_.head_dim, scratch.products,
                      ahead);
      } else {
        multiply_all(count, (end + kLanes - 1) / kLanes, rows_query, query_width_, scratch.keys.get(0),
                     int64_t{kTileKeys} * kStep<P>, query_steps, scratch.products, kTileKeys, nullptr);
      }
      float factors[kRowsOf<P>];
      for (int first = 0; first < count; first += kRowsAtOnce) {
        const int64_t at = i * rows + row + first;
        weigh(task, 0, start, at, std::min(kRowsAtOnce, count - first), scratch.products + first * kTileKeys,
              scratch.weights + first * kTileKeys, sums.states + at, factors + first, scratch);
      }
      if (can_stay_unpacked<P>(rows, batch_.head_dim)) {
        multiply_values(count, scratch.weights, cached(cache_.values, head, 0, scratch), end, batch_.head_dim,
                        values_of_head, factors, ahead);
      } else {
        multiply_all(count, static_cast<int>(width_ / kLanes), scratch.weights, kTileKeys, scratch.values.get(0),
                     width_ * kStep<P>, (end + kStep<P> - 1) / kStep<P>, values_of_head + row * width_, width_,
                     factors);
      }
    }
  }

  // Products to weights for some rows of the task from `row` on, which see no less the later they come: of tile t of
  // those in scratch.tile, the keys from `start` on.
  void weigh(const Task& task, int t, int64_t start, int64_t row, int count, const float* products, P* weights,
             RowState* states, float* factors, Scratch<P>& scratch) const {
    const int num_keys = std::min(kTileKeys, scratch.tile.num_keys - t * kTileKeys);
    const Scoring scoring{batch_.scale, batch_.softcap};
    const bool is_quantized = std::is_same_v<S, int8_t>;
    const bool is_plain = kCanBatchSoftmax && !is_quantized && batch_.softcap == 0.0f && batch_.slopes == nullptr;
    const float* k_scales = is_quantized ? scratch.k_scales + t * kTileKeys : nullptr;
    const float* v_scales = is_quantized ? scratch.v_scales + t * kTileKeys : nullptr;
    const int64_t* positions = scratch.positions.get(0);
    // Of what each row sees of the tile: mostly all of it.
    std::array<int, kRowsAtOnce> begins{}, ends;
    ends.fill(kTileKeys);
    const bool sees_all = num_keys == kTileKeys && positions[row] + 1 >= start + kTileKeys &&
                          plan_.first_key(positions[row + count - 1]) <= start;
    for (int i = 0; i < count && !sees_all; ++i) {
      const int64_t position = positions[row + i];
      begins[i] = static_cast<int>(std::clamp<int64_t>(plan_.first_key(position) - start, 0, kTileKeys));
      ends[i] = static_cast<int>(std::clamp<int64_t>(position + 1 - start, 0, num_keys));
    }
    if (is_plain && count > 1) {
      softmax_rows(count, products, weights, begins.data(), ends.data(), batch_.scale, states, factors);
      return;
    }
    for (int i = 0; i < count; ++i) {
      const int64_t head = (task.head + (row + i) / (task.num_queries * group_)) * group_ + (row + i) % group_;
      const float slope = batch_.slopes == nullptr ? 0.0f : batch_.slopes[head];
      const auto distance = static_cast<float>(start - positions[row + i]);
      factors[i] = softmax_row(products + i * kTileKeys, weights + i * kTileKeys, begins[i], ends[i], scoring, slope,
                               distance, k_scales, v_scales, states + i);
    }
  }

  const AttentionBatch& batch_;
  const AttentionCache<S>& cache_;
  const Plan& plan_;
  int64_t group_, query_width_, width_;
};

}  // namespace pagoda::attention
