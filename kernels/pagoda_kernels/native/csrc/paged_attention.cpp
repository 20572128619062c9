#include <omp.h>

#include <atomic>
#include <thread>

#include "paged_attention_steps.h"

namespace pagoda {
namespace {

using namespace attention;

template <typename T, typename S>
class Attention {
 public:
  using P = Packed<T>;

  Attention(const AttentionBatch& batch, const AttentionCache<S>& cache, const T* query, T* out, int num_threads)
      : batch_(batch),
        query_(query),
        out_(out),
        num_threads_(num_threads),
        group_(batch.num_heads / batch.num_kv_heads),
        query_width_(round_up(batch.head_dim, kStep<P> * kStepsAtOnce<P>)),
        width_(round_up(batch.head_dim, kLanes)),
        plan_(batch, num_threads),
        steps_(batch, cache, plan_) {}

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
      if (task != nullptr) steps_.fetch_first_tile(*task, scratch);
      while (task != nullptr) {
        // Tasks are begun in order: whatever this one has to wait for is under way.
        while (task->order == Task::Order::kAfterShared && shared_left.load() > 0) std::this_thread::yield();
        const Task* following = steps_.takes_partitions(*task)
                                    ? compute_many_rows(*task, claim, partials, registers, scratch)
                                    : compute(*task, claim, partials, registers, scratch);
        if (task->order == Task::Order::kShared) --shared_left;
        task = following;
      }
#pragma omp barrier
#pragma omp for schedule(static)
      for (size_t i = 0; i < plan_.merges.size(); ++i) merge(plan_.merges[i], partials);
    }
  }

 private:
  // Returns the task that the thread goes on with: it claims that when its last keys are added, to fetch the next one's first
  // ones meanwhile.
  template <typename Claim>
  const Task* compute(const Task& task, const Claim& claim, const Sums& partials, Registers& registers,
                      Scratch<P>& scratch) const {
    const int64_t all_rows = task.num_queries * group_ * task.num_heads;
    P* query = scratch.query.get(all_rows * query_width_);
    steps_.takes_columns(task) ? pack_query_columns(task, query) : pack_query(task, query);
    find_positions(task, scratch.positions.get(all_rows));
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
        steps_.add_tile(task, start, is_last ? following : &task, query, sums, registers, scratch);
      }
      if (task.is_apart) {
        put_aside(task, partition, 0, all_rows, sums, partials);
      } else if (partition > first) {
        add_sums(total, sums, all_rows, width_);
      }
    }
    if (!task.is_apart) finish(task, 0, all_rows, total);
    return following;
  }

  // The same for a task that takes partitions: of each, some rows after the others with what becomes of their sums. It is
  // never resumed: that are few rows.
  template <typename Claim>
  const Task* compute_many_rows(const Task& task, const Claim& claim, const Sums& partials, Registers& registers,
                                Scratch<P>& scratch) const {
    const int64_t rows = task.num_queries * group_;
    P* query = scratch.query.get(rows * query_width_);
    pack_query(task, query);
    find_positions(task, scratch.positions.get(rows));
    scratch.keys.get(kPartitionKeys * query_width_);
    scratch.values.get(kPartitionKeys * width_);
    const int64_t first = task.begin / kPartitionKeys, last = (task.end - 1) / kPartitionKeys;
    const bool is_added_up = !task.is_apart && first < last;
    const Sums some{scratch.more_sums.get(kRowsOf<P> * width_), scratch.more_states.get(kRowsOf<P>)};
    Sums total{};  // of all rows; the first partition's are made there
    if (is_added_up) total = {scratch.sums.get(rows * width_), scratch.states.get(rows)};
    const auto total_of = [&](int64_t row) { return Sums{total.values + row * width_, total.states + row}; };
    const Task* following = nullptr;
    for (int64_t partition = first; partition <= last; ++partition) {
      const int64_t begin = std::max(partition * kPartitionKeys, task.begin);
      const int64_t end = std::min((partition + 1) * kPartitionKeys, task.end);
      if (partition == last) following = claim();
      const auto sums_of = [&](int64_t row) { return is_added_up && partition == first ? total_of(row) : some; };
      const auto take = [&](int64_t row, int64_t count, const Sums& sums) {
        if (task.is_apart) return put_aside(task, partition, row, count, sums, partials);
        if (!is_added_up) return finish(task, row, count, sums);
        if (partition > first) add_sums(total_of(row), sums, count, width_);
        if (partition == last) finish(task, row, count, total_of(row));
      };
      steps_.add_partition(task, begin, end, partition == last ? following : &task, query, registers, scratch, sums_of, take);
    }
    return following;
  }

  // Of each row.
  void find_positions(const Task& task, int64_t* positions) const {
    for (int64_t i = 0; i < task.num_heads * task.num_queries; ++i) {
      std::fill_n(positions + i * group_, group_, plan_.queries[task.query + i % task.num_queries].position);
    }
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

  // Index of a task's row in the partials of a partition; rows are [head][query][head of the group].
  int64_t partial_row(const Task& task, int64_t partition, int64_t row) const {
    const int64_t rows = task.num_queries * group_;
    const Query& query = plan_.queries[task.query + row % rows / group_];
    const int64_t head = (task.head + row / rows) * group_ + row % group_;
    return (query.partial + partition * query.partial_stride) * batch_.num_heads + head;
  }

  // The sums of `count` rows from `first` on.
  void put_aside(const Task& task, int64_t partition, int64_t first, int64_t count, const Sums& sums,
                 const Sums& partials) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = partial_row(task, partition, first + i);
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

  void finish(const Task& task, int64_t first, int64_t count, const Sums& sums) const {
    const int64_t rows = task.num_queries * group_;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = first + i, token = plan_.queries[task.query + row % rows / group_].token;
      const int64_t head = (task.head + row / rows) * group_ + row % group_;
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
  const T* query_;
  T* out_;
  int num_threads_;
  int64_t group_, query_width_, width_;
  Plan plan_;
  Steps<T, S> steps_;
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
