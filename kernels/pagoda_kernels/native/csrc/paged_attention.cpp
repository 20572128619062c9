#include <omp.h>

#include <array>
#include <atomic>
#include <thread>

#include "ops.h"
#include "paged_attention_in_place.h"
#include "paged_attention_plan.h"
#include "paged_attention_softmax.h"
#include "paged_attention_sums.h"
#include "paged_attention_tile.h"
#include "paged_attention_unpacked.h"

namespace pagoda {
namespace {

using namespace attention;

constexpr int64_t kManyRows = 64;  // of a task

// Where a tile's keys and values are.
struct Tile {
  int64_t slots[kTileKeys];
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
  alignas(64) float k_scales[kTileKeys], v_scales[kTileKeys];
  alignas(64) float products[kRowsOf<P> * kTileKeys];
  alignas(64) P weights[kRowsOf<P> * kTileKeys];
};

template <typename T, typename S>
class Attention {
 public:
  using P = Packed<T>;

  Attention(const AttentionBatch& batch, const AttentionCache<S>& cache, const T* query, T* out, int num_threads)
      : batch_(batch),
        cache_(cache),
        query_(query),
        out_(out),
        num_threads_(num_threads),
        group_(batch.num_heads / batch.num_kv_heads),
        query_width_(round_up(batch.head_dim, kStep<P> * kStepsAtOnce<P>)),
        width_(round_up(batch.head_dim, kLanes)),
        plan_(batch, num_threads) {}

  void run() const {
    static thread_local Buffer<float> partial_values;
    static thread_local Buffer<RowState> partial_states;
    const int64_t rows = plan_.num_partials * batch_.num_heads;
    const Sums partials{partial_values.get(rows * width_), partial_states.get(rows)};
    const int num_threads = plan_.cost <= kSingleThreadWork ? 1 : num_threads_;
    std::atomic<size_t> next{0};
    std::atomic<int64_t> shared_left{plan_.num_shared};
    const auto claim = [&] {
      const size_t i = next++;
      return i < plan_.tasks.size() ? &plan_.tasks[i] : nullptr;
    };
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
      static thread_local Scratch<P> scratch;
      Registers registers;
      [[maybe_unused]] const Rounding<P> rounding;
      const Task* task = claim();
      if (task != nullptr) fetch_first_tile(*task, scratch);
      while (task != nullptr) {
        // Tasks are begun in order: whatever this one has to wait for is under way.
        while (task->order == Task::Order::kAfterShared && shared_left.load() > 0) std::this_thread::yield();
        const Task* following = compute(*task, claim, partials, registers, scratch);
        if (task->order == Task::Order::kShared) --shared_left;
        task = following;
      }
#pragma omp barrier
#pragma omp for schedule(static)
      for (size_t i = 0; i < plan_.merges.size(); ++i) merge(plan_.merges[i], partials);
    }
  }

 private:
  // Returns the task that the thread goes on with: it claims that when its last tile begins, to fetch the next one's first
  // keys meanwhile.
  template <typename Claim>
  const Task* compute(const Task& task, const Claim& claim, const Sums& partials, Registers& registers,
                      Scratch<P>& scratch) const {
    const int64_t all_rows = task.num_queries * group_ * task.num_heads;
    P* query = scratch.query.get(all_rows * query_width_);
    const bool is_in_place = can_stay_in_place<P, S>(task.num_queries * group_, batch_.head_dim, batch_.block_size);
    is_in_place ? pack_query_columns(task, query) : pack_query(task, query);
    int64_t* positions = scratch.positions.get(all_rows);
    for (int64_t i = 0; i < task.num_heads * task.num_queries; ++i) {
      std::fill_n(positions + i * group_, group_, plan_.queries[task.query + i % task.num_queries].position);
    }
    scratch.keys.get(kTileKeys * query_width_);
    scratch.values.get(kTileKeys * width_);
    const Sums total{scratch.sums.get(all_rows * width_), scratch.states.get(all_rows)};
    const int64_t first = task.begin / kPartitionKeys, last = (task.end - 1) / kPartitionKeys;
    const bool is_added_up = !task.is_apart && first < last;
    const Task* following = nullptr;
    Sums more{};
    if (is_added_up) more = {scratch.more_sums.get(all_rows * width_), scratch.more_states.get(all_rows)};
    for (int64_t partition = first; partition <= last; ++partition) {
      // Of the first partition nothing has to be added to anything.
      const Sums sums = is_added_up && partition > first ? more : total;
      if (partition == first && task.is_resumed()) {
        resume(task, partition, partials, sums);
      } else {
        sums.clear(all_rows, width_);
      }
      const int64_t end = std::min((partition + 1) * kPartitionKeys, task.end);
      for (int64_t start = std::max(partition * kPartitionKeys, task.begin); start < end; start += kTileKeys) {
        const bool is_last = start + kTileKeys >= task.end;
        if (is_last) following = claim();
        const Task* next = is_last ? following : &task;
        if (is_in_place) {
          add_tile_in_place(task, start, next, query, sums, registers, scratch);
        } else {
          add_tile_of_heads(task, start, next, query, sums, registers, scratch);
        }
      }
      if (task.is_apart) {
        put_aside(task, partition, sums, partials);
      } else if (partition > first) {
        add_sums(total, sums, all_rows, width_);
      }
    }
    if (!task.is_apart) finish(task, total);
    return following;
  }

  // [head][token][head of the group][query_width_].
  void pack_query(const Task& task, P* packed) const {
    for (int64_t head = task.head; head < task.head + task.num_heads; ++head) {
      for (int64_t query = task.query; query < task.query + task.num_queries; ++query) {
        for (int64_t i = 0; i < group_; ++i, packed += query_width_) {
          const T* row = query_ + plan_.queries[query].token * batch_.query_stride + (head * group_ + i) * batch_.head_dim;
          if constexpr (std::is_same_v<P, T>) {
            std::copy_n(row, batch_.head_dim, packed);
          } else {
            for (int64_t column = 0; column < batch_.head_dim; ++column) packed[column] = to_float(row[column]);
          }
          std::fill(packed + batch_.head_dim, packed + query_width_, P{});
        }
      }
    }
  }

  // [head][pair][token and head of the group] pairs.
  void pack_query_columns(const Task& task, P* packed) const {
    const int64_t rows = task.num_queries * group_, pairs = batch_.head_dim / 2;
    for (int64_t head = task.head; head < task.head + task.num_heads; ++head, packed += 2 * pairs * rows) {
      for (int64_t row = 0; row < rows; ++row) {
        const T* from = query_ + plan_.queries[task.query + row / group_].token * batch_.query_stride +
                        (head * group_ + row % group_) * batch_.head_dim;
        for (int64_t i = 0; i < pairs; ++i) std::memcpy(packed + 2 * (i * rows + row), from + 2 * i, 2 * sizeof(T));
      }
    }
  }

  void fetch_first_tile(const Task& task, Scratch<P>& scratch) const {
    find_keys(task, task.begin, scratch.tile);
    const int num_keys = scratch.tile.num_keys;
    prefetch(task, scratch.tile, 0, num_keys, 1).step();
  }

  // All heads of the task over the keys of scratch.tile, while the next tile is fetched: that of task `next`, if any.
  void add_tile_of_heads(const Task& task, int64_t start, const Task* next, const P* query, const Sums& sums,
                         Registers& registers, Scratch<P>& scratch) const {
    const int64_t rows = task.num_queries * group_;
    Tile& coming = scratch.next_tile;
    coming.num_keys = 0;
    if (next != nullptr) find_keys(*next, next == &task ? start + kTileKeys : next->begin, coming);
    for (int64_t i = 0; i < task.num_heads; ++i) {
      const int64_t first = coming.num_keys * i / task.num_heads, last = coming.num_keys * (i + 1) / task.num_heads;
      // Between the products of many rows there is more time for it than while keys are packed.
      const bool is_spread = kUsesAmx<P> && rows >= kManyRows;
      const int64_t calls = is_spread ? divide_up(rows, kRowsOf<P>) : packing_calls(scratch.tile.num_keys);
      Prefetch ahead = prefetch(next == nullptr ? task : *next, coming, first, last, calls), nothing{};
      pack_tile(task.head + i, !can_stay_unpacked<P>(rows, batch_.head_dim), is_spread ? nothing : ahead, scratch);
      add_tile(task, i, start, query + i * rows * query_width_, sums, ahead, registers, scratch);
    }
    std::swap(scratch.tile, coming);
  }

  // The same for few rows, mostly from where keys and values lie: first the products of all heads, then their weights, then
  // the sums of values.
  void add_tile_in_place(const Task& task, int64_t start, const Task* next, const P* columns, const Sums& sums,
                         Registers& registers, Scratch<P>& scratch) const {
    if constexpr (kHasInPlace<P, S>) {
      Tile& coming = scratch.next_tile;
      coming.num_keys = 0;
      if (next != nullptr) find_keys(*next, next == &task ? start + kTileKeys : next->begin, coming);
      const int64_t rows = task.num_queries * group_, all_rows = rows * task.num_heads;
      const int num_keys = scratch.tile.num_keys, num_rows = static_cast<int>(rows);
      const bool has_packed_values = rows > kValueRowsInPlace;
      const int64_t key_calls = divide_up(num_keys, kKeysInPlace) * divide_up(batch_.head_dim, kStep<P> * kAmxSteps);
      const int64_t value_calls = has_packed_values ? divide_up(num_keys, 8)
                                                    : divide_up(num_keys, kValuesAStep) * divide_up(batch_.head_dim, 64);
      const int64_t calls = task.num_heads * (key_calls + value_calls);
      Prefetch ahead = prefetch(next == nullptr ? task : *next, coming, 0, coming.num_keys, calls);
      const auto of_head = [&](const S* all, int64_t i) {
        const int64_t stride = batch_.num_kv_heads * cache_.width;
        return InPlace<S>{all + (task.head + i) * cache_.width, stride, scratch.tile.slots, num_keys};
      };
      float* products = scratch.all_products.get(all_rows * kTileKeys);
      registers.set_columns(num_rows);
      for (int64_t i = 0; i < task.num_heads; ++i) {
        multiply_keys(of_head(cache_.keys, i), columns + i * rows * batch_.head_dim, num_rows, batch_.head_dim,
                      products + i * rows * kTileKeys, ahead);
      }
      P* weights = scratch.all_weights.get(all_rows * kTileKeys);
      float* factors = scratch.factors.get(all_rows);
      const int64_t part = task.num_queries == 1 ? all_rows : rows;  // what sees no less the later it comes
      for (int64_t row = 0; row < all_rows;) {
        const auto count = static_cast<int>(std::min<int64_t>(kRowsAtOnce, part - row % part));
        weigh(task, start, row, count, products + row * kTileKeys, weights + row * kTileKeys, sums, factors + row, scratch);
        row += count;
      }
      const int64_t seen = scratch.positions.get(0)[rows - 1] + 1 - start;
      const int end = static_cast<int>(std::min<int64_t>(num_keys, seen));
      if (has_packed_values) registers.set(rows);
      for (int64_t i = 0; i < task.num_heads; ++i) {
        const InPlace<S> values = of_head(cache_.values, i);
        const P* of_rows = weights + i * rows * kTileKeys;
        float* out = sums.values + i * rows * width_;
        if (has_packed_values) {
          P* packed = scratch.values.get(0);
          pack_values(values.base, values.stride, values.slots, num_keys, batch_.head_dim, width_, packed, ahead);
          multiply_all(num_rows, static_cast<int>(width_ / kLanes), of_rows, kTileKeys, packed, width_ * kStep<P>,
                       divide_up(end, kStep<P>), out, width_, factors + i * rows);
        } else {
          multiply_values(num_rows, of_rows, values, end, batch_.head_dim, out, factors + i * rows, ahead);
        }
      }
      std::swap(scratch.tile, coming);
    }
  }

  // Slots of the task's keys [start, start + kTileKeys).
  void find_keys(const Task& task, int64_t start, Tile& tile) const {
    const int32_t* table = batch_.block_table + task.seq * batch_.table_stride;
    const int64_t size = batch_.block_size, end = std::min(task.end, start + kTileKeys);
    tile.num_keys = 0;
    for (int64_t key = start; key < end;) {
      const int64_t block = key / size, stop = std::min((block + 1) * size, end);
      for (; key < stop; ++key) tile.slots[tile.num_keys++] = table[block] * size + key - block * size;
    }
  }

  // How often packing of one head's keys and values, so many, steps ahead.
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

  void pack_tile(int64_t head, bool has_packed_values, Prefetch& ahead, Scratch<P>& scratch) const {
    const int64_t stride = batch_.num_kv_heads * cache_.width, column = head * cache_.width, *slots = scratch.tile.slots;
    const int num_keys = scratch.tile.num_keys;
    pack_keys(cache_.keys + column, stride, slots, num_keys, batch_.head_dim, scratch.keys.get(0), ahead);
    if (has_packed_values) {
      pack_values(cache_.values + column, stride, slots, num_keys, batch_.head_dim, width_, scratch.values.get(0), ahead);
    }
    if constexpr (std::is_same_v<S, int8_t>) {
      const int64_t scale = column + cache_.width - static_cast<int64_t>(sizeof(float));
      for (int key = 0; key < num_keys; ++key) {
        std::memcpy(&scratch.k_scales[key], cache_.keys + slots[key] * stride + scale, sizeof(float));
        std::memcpy(&scratch.v_scales[key], cache_.values + slots[key] * stride + scale, sizeof(float));
      }
      // A weight of 0 times what an earlier tile has left there could be NaN.
      std::fill(scratch.v_scales + num_keys, scratch.v_scales + kTileKeys, 0.0f);
    }
  }

  // The rows of the task's KV head `i` over the packed tile, the keys from `start` on.
  void add_tile(const Task& task, int64_t i, int64_t start, const P* query, const Sums& sums, Prefetch& ahead,
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
      if (kUsesAmx<P> && rows >= kManyRows) ahead.step();
      const P* rows_query = query + row * query_width_;
      multiply_all(count, (end + kLanes - 1) / kLanes, rows_query, query_width_, scratch.keys.get(0),
                   int64_t{kTileKeys} * kStep<P>, query_steps, scratch.products, kTileKeys, nullptr);
      float factors[kRowsOf<P>];
      for (int first = 0; first < count; first += kRowsAtOnce) {
        weigh(task, start, i * rows + row + first, std::min(kRowsAtOnce, count - first), scratch.products + first * kTileKeys,
              scratch.weights + first * kTileKeys, sums, factors + first, scratch);
      }
      if (can_stay_unpacked<P>(rows, batch_.head_dim)) {
        const int64_t stride = batch_.num_kv_heads * cache_.width;
        const Values<S> values{cache_.values + head * cache_.width, stride, scratch.tile.slots, num_keys};
        multiply_values(count, scratch.weights, values, end, batch_.head_dim, values_of_head, factors, ahead);
      } else {
        multiply_all(count, static_cast<int>(width_ / kLanes), scratch.weights, kTileKeys, scratch.values.get(0),
                     width_ * kStep<P>, (end + kStep<P> - 1) / kStep<P>, values_of_head + row * width_, width_, factors);
      }
    }
  }

  // Products to weights for some rows of the task from `row` on, which see no less the later they come.
  void weigh(const Task& task, int64_t start, int64_t row, int count, const float* products, P* weights, const Sums& sums,
             float* factors, Scratch<P>& scratch) const {
    const int num_keys = scratch.tile.num_keys;
    const Scoring scoring{batch_.scale, batch_.softcap};
    const bool is_quantized = std::is_same_v<S, int8_t>;
    const bool is_plain = kCanBatchSoftmax && !is_quantized && batch_.softcap == 0.0f && batch_.slopes == nullptr;
    const float *k_scales = is_quantized ? scratch.k_scales : nullptr, *v_scales = is_quantized ? scratch.v_scales : nullptr;
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
      softmax_rows(count, products, weights, begins.data(), ends.data(), batch_.scale, sums.states + row, factors);
      return;
    }
    for (int i = 0; i < count; ++i) {
      const int64_t head = (task.head + (row + i) / (task.num_queries * group_)) * group_ + (row + i) % group_;
      const float slope = batch_.slopes == nullptr ? 0.0f : batch_.slopes[head];
      const auto distance = static_cast<float>(start - positions[row + i]);
      factors[i] = softmax_row(products + i * kTileKeys, weights + i * kTileKeys, begins[i], ends[i], scoring, slope,
                               distance, k_scales, v_scales, sums.states + row + i);
    }
  }

  // Index of a task's row in the partials of a partition; rows are [head][query][head of the group].
  int64_t partial_row(const Task& task, int64_t partition, int64_t row) const {
    const int64_t rows = task.num_queries * group_;
    const Query& query = plan_.queries[task.query + row % rows / group_];
    const int64_t head = (task.head + row / rows) * group_ + row % group_;
    return (query.partial + partition * query.partial_stride) * batch_.num_heads + head;
  }

  void put_aside(const Task& task, int64_t partition, const Sums& sums, const Sums& partials) const {
    for (int64_t i = 0; i < task.num_heads * task.num_queries * group_; ++i) {
      const int64_t row = partial_row(task, partition, i);
      std::copy_n(sums.values + i * width_, width_, partials.values + row * width_);
      partials.states[row] = sums.states[i];
    }
  }

  void resume(const Task& task, int64_t partition, const Sums& partials, const Sums& sums) const {
    for (int64_t i = 0; i < task.num_heads * task.num_queries * group_; ++i) {
      const int64_t row = partial_row(task, partition, i);
      std::copy_n(partials.values + row * width_, width_, sums.values + i * width_);
      sums.states[i] = partials.states[row];
    }
  }

  void finish(const Task& task, const Sums& sums) const {
    const int64_t rows = task.num_queries * group_;
    for (int64_t i = 0; i < task.num_heads * rows; ++i) {
      const int64_t token = plan_.queries[task.query + i % rows / group_].token;
      const int64_t head = (task.head + i / rows) * group_ + i % group_;
      T* out = out_ + (token * batch_.num_heads + head) * batch_.head_dim;
      store_row(sums.values + i * width_, sums.states[i].sum, batch_.head_dim, out);
    }
  }

  void merge(const Merge& merge, const Sums& partials) const {
    const int64_t rows = merge.num_tokens * batch_.num_heads, first = merge.partial * batch_.num_heads;
    const Sums total{partials.values + first * width_, partials.states + first};
    for (int64_t part = 1; part < merge.num_partitions; ++part) {
      add_sums(total, {total.values + part * rows * width_, total.states + part * rows}, rows, width_);
    }
    for (int64_t row = 0; row < rows; ++row) {
      T* out = out_ + (merge.token * batch_.num_heads + row) * batch_.head_dim;
      store_row(total.values + row * width_, total.states[row].sum, batch_.head_dim, out);
    }
  }

  const AttentionBatch& batch_;
  const AttentionCache<S>& cache_;
  const T* query_;
  T* out_;
  int num_threads_;
  int64_t group_, query_width_, width_;
  Plan plan_;
};

}  // namespace

template <typename T, typename S>
void paged_attention(const AttentionBatch& batch, const AttentionCache<S>& cache, const T* query, T* out, int num_threads) {
  Attention<T, S>(batch, cache, query, out, num_threads).run();
}

template void paged_attention(const AttentionBatch&, const AttentionCache<float>&, const float*, float*, int);
template void paged_attention(const AttentionBatch&, const AttentionCache<bf16>&, const bf16*, bf16*, int);
template void paged_attention(const AttentionBatch&, const AttentionCache<int8_t>&, const float*, float*, int);
template void paged_attention(const AttentionBatch&, const AttentionCache<int8_t>&, const bf16*, bf16*, int);

}  // namespace pagoda
