#include <omp.h>

#include <atomic>
#include <thread>

#include "attention/paged_attention_rows.h"
#include "attention/paged_attention_steps.h"

namespace pagoda {
namespace {

using namespace attention;

template <typename T, typename S>
class Attention {
 public:
  using P = Packed<T>;

  Attention(const AttentionBatch& batch, const AttentionCache<S>& cache, const T* query, T* out, int num_threads)
      : batch_(batch),
        out_(out),
        num_threads_(num_threads),
        group_(batch.num_heads / batch.num_kv_heads),
        width_(round_up(batch.head_dim, kLanes)),
        plan_(batch, num_threads),
        steps_(batch, cache, plan_),
        rows_(batch, plan_, query) {}

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
  // Returns the task that the thread continues with: it claims that one when its last keys are added, to fetch the next
  // one's first ones meanwhile.
  template <typename Claim>
  const Task* compute(const Task& task, const Claim& claim, const Sums& partials, Registers& registers,
                      Scratch<P>& scratch) const {
    const int64_t all_rows = rows_.count(task);
    const P* query = rows_.pack(task, steps_.takes_columns(task), kTileKeys, scratch);
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
    if (!task.is_apart) rows_.finish(task, 0, all_rows, total, out_);
    return following;
  }

  // The same for a task that takes partitions: of each, some rows after the others with what becomes of their sums. It
  // is never resumed: that are few rows.
  template <typename Claim>
  const Task* compute_many_rows(const Task& task, const Claim& claim, const Sums& partials, Registers& registers,
                                Scratch<P>& scratch) const {
    const int64_t rows = rows_.count(task);
    const P* query = rows_.pack(task, false, kPartitionKeys, scratch);
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
        if (!is_added_up) return rows_.finish(task, row, count, sums, out_);
        if (partition > first) add_sums(total_of(row), sums, count, width_);
        if (partition == last) rows_.finish(task, row, count, total_of(row), out_);
      };
      steps_.add_partition(task, begin, end, partition == last ? following : &task, query, registers, scratch, sums_of,
                           take);
    }
    return following;
  }

  // Index of a task's row in the partials of a partition; rows are [head][query][head of the group].
  int64_t partial_row(const Task& task, int64_t partition, int64_t row) const {
    const Query& query = rows_.query_of(task, row);
    return (query.partial + partition * query.partial_stride) * batch_.num_heads + rows_.head_of(task, row);
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
    for (int64_t i = 0; i < rows_.count(task); ++i) {
      const int64_t row = partial_row(task, partition, i);
      std::copy_n(partials.values + row * width_, width_, sums.values + i * width_);
      sums.states[i] = partials.states[row];
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
      const float sum = denominator(total.states[row], batch_.sinks, row % batch_.num_heads);
      store_row(total.values + row * width_, sum, batch_.head_dim, out);
    }
  }

  const AttentionBatch& batch_;
  T* out_;
  int num_threads_;
  int64_t group_, width_;
  Plan plan_;
  Steps<T, S> steps_;
  TaskRows<T> rows_;
};

}  // namespace

template <typename T, typename S>
void paged_attention(const AttentionBatch& batch, const AttentionCache<S>& cache, const T* query, T* out,
                     int num_threads) {
  Attention<T, S>(batch, cache, query, out, num_threads).run();
}

template void paged_attention(const AttentionBatch&, const AttentionCache<float>&, const float*, float*, int);
template void paged_attention(const AttentionBatch&, const AttentionCache<bf16>&, const bf16*, bf16*, int);
template void paged_attention(const AttentionBatch&, const AttentionCache<int8_t>&, const float*, float*, int);
template void paged_attention(const AttentionBatch&, const AttentionCache<int8_t>&, const bf16*, bf16*, int);

}  // namespace pagoda
