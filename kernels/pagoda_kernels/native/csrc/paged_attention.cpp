#include <omp.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "ops.h"
#include "paged_attention_tile.h"

namespace pagoda {
namespace {

using namespace attention;

constexpr int64_t kPartitionKeys = 1024;  // keys whose sums may be made apart, counted from position 0
constexpr int64_t kStreamRows = 16;       // up to so many rows of a KV head, reading the cache is what takes the time
constexpr int64_t kPrefillRows = 192;     // rows of one task otherwise: packing a tile of keys costs like some 5 rows
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kPackingRows = 8;        // what packing a key costs, in rows
constexpr int64_t kSingleThreadWork = 4096;  // keys times rows (packing included) that are not worth waking a thread

// Some query tokens of a sequence, some KV heads, some partitions of its keys.
struct Task {
  int64_t seq, token, num_tokens;  // token: the first one in the batch
  int64_t position;                // of the first token in its sequence
  int64_t head, num_heads;         // KV heads
  int64_t partition, num_partitions;
  int64_t partial;  // index of where its sums go, if others compute the rest of the keys; else -1
  int64_t cost;
};

// A decode whose partitions were computed by several tasks.
struct Merge {
  int64_t token, num_tokens;
  int64_t partial, num_partitions;
};

// Memory that grows and is kept by its thread.
template <typename T>
class Buffer {
 public:
  T* get(int64_t count) {
    if (count > size_) {
      size_ = round_up(count + count / 4, 64);
      memory_.reset(static_cast<T*>(std::aligned_alloc(64, static_cast<size_t>(size_) * sizeof(T))));
      if (memory_ == nullptr) throw std::bad_alloc();
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  std::unique_ptr<T, Free> memory_;
  int64_t size_ = 0;
};

// Sums of rows: [row][padded_dim] values and a state each.
struct Sums {
  float* values;
  RowState* states;

  void clear(int64_t rows, int64_t width) const {
    std::fill(values, values + rows * width, 0.0f);
    std::fill(states, states + rows, RowState{});
  }
};

template <typename P>
struct Scratch {
  Buffer<P> query, keys, values;
  Buffer<float> sums, total_sums;
  Buffer<RowState> states, total_states;
  int64_t slots[2][kTileKeys];
  alignas(64) float k_scales[kTileKeys], v_scales[kTileKeys];
  alignas(64) float products[kRows * kTileKeys];
  alignas(64) P weights[kRows * kTileKeys];
};

// total += part, for sums over later keys; the order of partitions is always that of their keys.
void add_sums(const Sums& total, const Sums& part, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row) {
    RowState &to = total.states[row], &from = part.states[row];
    if (from.sum == 0.0f) continue;
    float* values = total.values + row * width;
    const float* more = part.values + row * width;
    if (to.sum == 0.0f) {
      to = from;
      std::copy(more, more + width, values);
      continue;
    }
    const float top = std::max(to.maximum, from.maximum);
    const Vec old_factor(exp2_of_negative(to.maximum - top)), new_factor(exp2_of_negative(from.maximum - top));
    for (int64_t i = 0; i < width; i += kLanes) {
      store(values + i, fma(load(more + i), new_factor, load(values + i) * old_factor));
    }
    alignas(64) float sums[kLanes];
    store(sums, fma(Vec(from.sum), new_factor, Vec(to.sum) * old_factor));
    to = {top, sums[0]};
  }
}

template <typename T>
void store_row(const float* values, float sum, int64_t size, T* out) {
  const Vec factor(1.0f / sum);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, load(values + i) * factor);
  if (i < size) store(out + i, load(values + i) * factor, static_cast<int>(size - i));
}

template <typename T, typename S>
class Attention {
 public:
  using P = Packed<T>;

  Attention(const AttentionBatch& batch, const AttentionCache<S>& cache, const T* query, T* out)
      : batch_(batch),
        cache_(cache),
        query_(query),
        out_(out),
        group_(batch.num_heads / batch.num_kv_heads),
        query_width_(round_up(batch.head_dim, kStep<P>)),
        width_(round_up(batch.head_dim, kLanes)) {}

  void run(int num_threads) {
    const int64_t cost = plan(num_threads);
    if (cost <= kSingleThreadWork) num_threads = 1;
    static thread_local Buffer<float> partial_values;
    static thread_local Buffer<RowState> partial_states;
    const int64_t rows = num_partials_ * batch_.num_heads;
    const Sums partials{partial_values.get(rows * width_), partial_states.get(rows)};
    std::atomic<size_t> next{0};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
      static thread_local Scratch<P> scratch;
      for (size_t i = next++; i < tasks_.size(); i = next++) compute(tasks_[i], partials, scratch);
#pragma omp barrier
#pragma omp for schedule(static)
      for (size_t i = 0; i < merges_.size(); ++i) merge(merges_[i], partials);
    }
  }

 private:
  // Tasks of like cost, the most expensive first; returns their whole cost.
  int64_t plan(int num_threads) {
    const int64_t heads = batch_.num_kv_heads;
    int64_t whole = 0;
    for (int64_t seq = 0; seq < batch_.num_seqs; ++seq) {
      whole += cost_of(batch_.seq_lens[seq] - batch_.query_lens[seq], batch_.query_lens[seq]) * heads;
    }
    const int64_t target = num_threads == 1 ? whole : whole / (num_threads * kTasksPerThread);
    int64_t token = 0;
    for (int64_t seq = 0; seq < batch_.num_seqs; ++seq) {
      const int64_t tokens = batch_.query_lens[seq], position = batch_.seq_lens[seq] - tokens;
      if (tokens * group_ <= kStreamRows) {
        plan_stream(seq, token, tokens, position, target);
      } else {
        int64_t size = std::max<int64_t>(1, kPrefillRows / group_);
        while (size * group_ > 2 * kRows && divide_up(tokens, size) * heads < num_threads * kTasksPerThread) size = (size + 1) / 2;
        for (int64_t first = 0; first < tokens; first += size) {
          const int64_t count = std::min(size, tokens - first), at = position + first;
          const int64_t from = first_key(at) / kPartitionKeys, to = (at + count - 1) / kPartitionKeys;
          for (int64_t head = 0; head < heads; ++head) {
            tasks_.push_back({seq, token + first, count, at, head, 1, from, to - from + 1, -1, cost_of(at, count)});
          }
        }
      }
      token += tokens;
    }
    std::stable_sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
    return whole;
  }

  // Few rows: all heads of a key at once read the cache as it lies, so heads are parted only if partitions do not suffice.
  void plan_stream(int64_t seq, int64_t token, int64_t tokens, int64_t position, int64_t target) {
    const int64_t cost = cost_of(position, tokens) * batch_.num_kv_heads;
    const int64_t from = first_key(position) / kPartitionKeys, to = (position + tokens - 1) / kPartitionKeys;
    const int64_t partitions = to - from + 1, pieces = std::max<int64_t>(1, divide_up(cost, std::max<int64_t>(target, 1)));
    const bool is_split = pieces > 1 && partitions > 1;
    const int64_t parts = is_split ? partitions : 1;
    const int64_t ranges = std::min(batch_.num_kv_heads, divide_up(pieces, parts));
    if (is_split) {
      merges_.push_back({token, tokens, num_partials_, partitions});
    }
    for (int64_t part = 0; part < parts; ++part) {
      for (int64_t range = 0; range < ranges; ++range) {
        const int64_t head = batch_.num_kv_heads * range / ranges, end = batch_.num_kv_heads * (range + 1) / ranges;
        tasks_.push_back({seq, token, tokens, position, head, end - head, from + part, is_split ? 1 : partitions,
                          is_split ? num_partials_ + part * tokens : -1, cost / (parts * ranges)});
      }
    }
    if (is_split) num_partials_ += partitions * tokens;
  }

  int64_t first_key(int64_t position) const {
    return batch_.window ? std::max<int64_t>(0, position - batch_.window + 1) : 0;
  }

  // Of one KV head: keys times rows, about.
  int64_t cost_of(int64_t position, int64_t tokens) const {
    return (position + tokens / 2 + 1 - first_key(position)) * (tokens * group_ + kPackingRows);
  }

  void compute(const Task& task, const Sums& partials, Scratch<P>& scratch) const {
    const int64_t rows = task.num_tokens * group_, all_rows = rows * task.num_heads;
    P* query = scratch.query.get(all_rows * query_width_);
    pack_query(task, query);
    scratch.keys.get(kTileKeys * query_width_);
    scratch.values.get(kTileKeys * width_);
    const Sums sums{scratch.sums.get(all_rows * width_), scratch.states.get(all_rows)};
    sums.clear(all_rows, width_);
    if (task.num_partitions == 1) {
      add_partition(task, task.partition, query, sums, scratch);
      finish(task, sums, partials);
      return;
    }
    const Sums total{scratch.total_sums.get(all_rows * width_), scratch.total_states.get(all_rows)};
    total.clear(all_rows, width_);
    for (int64_t partition = task.partition; partition < task.partition + task.num_partitions; ++partition) {
      if (partition > task.partition) sums.clear(all_rows, width_);
      add_partition(task, partition, query, sums, scratch);
      add_sums(total, sums, all_rows, width_);
    }
    finish(task, total, partials);
  }

  // [head][token][head of the group][query_width_].
  void pack_query(const Task& task, P* packed) const {
    for (int64_t head = task.head; head < task.head + task.num_heads; ++head) {
      for (int64_t token = task.token; token < task.token + task.num_tokens; ++token) {
        for (int64_t i = 0; i < group_; ++i, packed += query_width_) {
          const T* row = query_ + token * batch_.query_stride + (head * group_ + i) * batch_.head_dim;
          for (int64_t column = 0; column < query_width_; ++column) {
            if (column >= batch_.head_dim) {
              packed[column] = P{};
            } else if constexpr (std::is_same_v<P, T>) {
              packed[column] = row[column];
            } else {
              packed[column] = to_float(row[column]);
            }
          }
        }
      }
    }
  }

  void add_partition(const Task& task, int64_t partition, const P* query, const Sums& sums, Scratch<P>& scratch) const {
    const int64_t rows = task.num_tokens * group_;
    const int64_t end = std::min((partition + 1) * kPartitionKeys, task.position + task.num_tokens);
    int64_t start = std::max(partition * kPartitionKeys, first_key(task.position) / kTileKeys * kTileKeys);
    int64_t *slots = scratch.slots[0], *next_slots = scratch.slots[1];
    const int num_first = find_slots(task.seq, start, end, slots);
    prefetch(task, slots, 0, num_first).step(num_first * task.num_heads * cache_.width);
    for (; start < end; start += kTileKeys) {
      const int num_keys = static_cast<int>(std::min<int64_t>(kTileKeys, end - start));
      const int num_next = find_slots(task.seq, start + kTileKeys, end, next_slots);
      for (int64_t i = 0; i < task.num_heads; ++i) {
        const int64_t first = num_next * i / task.num_heads, last = num_next * (i + 1) / task.num_heads;
        pack_tile(task.head + i, slots, num_keys, prefetch(task, next_slots, first, last), scratch);
        const Sums of_head{sums.values + i * rows * width_, sums.states + i * rows};
        add_tile(task, task.head + i, start, num_keys, query + i * rows * query_width_, of_head, scratch);
      }
      std::swap(slots, next_slots);
    }
  }

  // Slots of keys [start, start + kTileKeys), as far as they are below end; returns how many.
  int find_slots(int64_t seq, int64_t start, int64_t end, int64_t* slots) const {
    const int32_t* table = batch_.block_table + seq * batch_.table_stride;
    const int64_t size = batch_.block_size;
    int count = 0;
    while (count < kTileKeys && start + count < end) {
      const int64_t block = (start + count) / size, offset = start + count - block * size;
      const int64_t stop = std::min({size - offset, int64_t{kTileKeys - count}, end - start - count});
      for (int64_t i = 0; i < stop; ++i) slots[count++] = table[block] * size + offset + i;
    }
    return count;
  }

  // Of the task's heads in slots [first, last).
  Prefetch prefetch(const Task& task, const int64_t* slots, int64_t first, int64_t last) const {
    const int64_t column = task.head * cache_.width, row = batch_.num_kv_heads * cache_.width;
    const int64_t bytes = task.num_heads * cache_.width * sizeof(S);
    const int64_t calls = kKeyVectors * divide_up(query_width_ / kStep<P>, kLanes) + kTileKeys / 8;
    return {reinterpret_cast<const char*>(cache_.keys + column),
            reinterpret_cast<const char*>(cache_.values + column),
            static_cast<int64_t>(row * sizeof(S)),
            bytes,
            slots,
            first,
            last,
            divide_up((last - first) * divide_up(bytes, 64), calls)};
  }

  void pack_tile(int64_t head, const int64_t* slots, int num_keys, Prefetch ahead, Scratch<P>& scratch) const {
    const int64_t stride = batch_.num_kv_heads * cache_.width, column = head * cache_.width;
    pack_keys(cache_.keys + column, stride, slots, num_keys, batch_.head_dim, scratch.keys.get(0), ahead);
    pack_values(cache_.values + column, stride, slots, num_keys, batch_.head_dim, width_, scratch.values.get(0), ahead);
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

  // The rows of one KV head over the packed tile of keys [start, start + num_keys).
  void add_tile(const Task& task, int64_t head, int64_t start, int num_keys, const P* query, const Sums& sums,
                Scratch<P>& scratch) const {
    const int64_t rows = task.num_tokens * group_;
    const int query_steps = static_cast<int>(query_width_ / kStep<P>);
    const Scoring scoring{batch_.scale, batch_.softcap};
    const bool is_quantized = std::is_same_v<S, int8_t>;
    const float *k_scales = is_quantized ? scratch.k_scales : nullptr, *v_scales = is_quantized ? scratch.v_scales : nullptr;
    for (int64_t row = 0; row < rows; row += kRows) {
      const int count = static_cast<int>(std::min<int64_t>(kRows, rows - row));
      const int64_t last = task.position + (row + count - 1) / group_;
      const int end = static_cast<int>(std::min<int64_t>(num_keys, last + 1 - start));
      if (end <= 0 || first_key(task.position + row / group_) >= start + end) continue;
      const P* rows_query = query + row * query_width_;
      multiply_all(count, (end + kLanes - 1) / kLanes, rows_query, query_width_, scratch.keys.get(0),
                   int64_t{kTileKeys} * kStep<P>, query_steps, scratch.products, kTileKeys, nullptr);
      float factors[kRows];
      for (int i = 0; i < count; ++i) {
        const int64_t position = task.position + (row + i) / group_;
        const int row_begin = static_cast<int>(std::clamp<int64_t>(first_key(position) - start, 0, kTileKeys));
        const int row_end = static_cast<int>(std::clamp<int64_t>(position + 1 - start, 0, num_keys));
        const float slope = batch_.slopes == nullptr ? 0.0f : batch_.slopes[head * group_ + (row + i) % group_];
        factors[i] = softmax_row(scratch.products + i * kTileKeys, scratch.weights + i * kTileKeys, row_begin, row_end, scoring,
                                 slope, static_cast<float>(start - position), k_scales, v_scales, sums.states + row + i);
      }
      multiply_all(count, static_cast<int>(width_ / kLanes), scratch.weights, kTileKeys, scratch.values.get(0),
                   width_ * kStep<P>, (end + kStep<P> - 1) / kStep<P>, sums.values + row * width_, width_, factors);
    }
  }

  void finish(const Task& task, const Sums& sums, const Sums& partials) const {
    const int64_t rows = task.num_tokens * group_;
    for (int64_t i = 0; i < task.num_heads * rows; ++i) {
      const int64_t token = i % rows / group_, head = (task.head + i / rows) * group_ + i % group_;
      const float* values = sums.values + i * width_;
      if (task.partial >= 0) {
        const int64_t row = (task.partial + token) * batch_.num_heads + head;
        std::copy(values, values + width_, partials.values + row * width_);
        partials.states[row] = sums.states[i];
      } else {
        T* out = out_ + ((task.token + token) * batch_.num_heads + head) * batch_.head_dim;
        store_row(values, sums.states[i].sum, batch_.head_dim, out);
      }
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
  int64_t group_, query_width_, width_;
  int64_t num_partials_ = 0;
  std::vector<Task> tasks_;
  std::vector<Merge> merges_;
};

}  // namespace

template <typename T, typename S>
void paged_attention(const AttentionBatch& batch, const AttentionCache<S>& cache, const T* query, T* out, int num_threads) {
  Attention<T, S>(batch, cache, query, out).run(num_threads);
}

template void paged_attention(const AttentionBatch&, const AttentionCache<float>&, const float*, float*, int);
template void paged_attention(const AttentionBatch&, const AttentionCache<bf16>&, const bf16*, bf16*, int);
template void paged_attention(const AttentionBatch&, const AttentionCache<int8_t>&, const float*, float*, int);
template void paged_attention(const AttentionBatch&, const AttentionCache<int8_t>&, const bf16*, bf16*, int);

}  // namespace pagoda
