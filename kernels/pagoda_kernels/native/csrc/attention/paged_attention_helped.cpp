// Attention of a few tokens by one thread and its helpers: each part is some KV heads of a sequence over a partition of
// its keys. To the bit what paged_attention makes.
#include <memory>
#include <numeric>
#include <vector>

#include "threads/helpers.h"
#include "attention/paged_attention_rows.h"
#include "attention/paged_attention_steps.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace {

using namespace attention;

constexpr int64_t kHelpedBytes = 128 << 10;  // keys and values of a layer, some 5 us, that are worth a call for help
constexpr int64_t kPartsEach = 2;  // for each thread: the fewer heads, the more scattered is what a part reads

// plan: for one thread.
bool can_help(const AttentionBatch& batch, const Plan& plan) {
  const auto is_whole = [&](const Task& task) {  // nothing of a prompt that is divided
    return task.num_heads == batch.num_kv_heads && task.num_queries == batch.query_lens[task.seq];
  };
  return plan.num_shared == 0 && std::all_of(plan.tasks.begin(), plan.tasks.end(), is_whole);
}

// All that a late helper may read, except for keys and values: nothing here refers to what the caller has.
class HelpedAttention {
 public:
  using P = Packed<bf16>;

  HelpedAttention(const AttentionBatch& batch, const AttentionCache<bf16>& cache, const bf16* query, bf16* out,
                  int num_threads)
      : query_lens_(batch.query_lens, batch.query_lens + batch.num_seqs),
        seq_lens_(batch.seq_lens, batch.seq_lens + batch.num_seqs),
        table_stride_(divide_up(*std::max_element(seq_lens_.begin(), seq_lens_.end()), batch.block_size)),
        block_table_(table_of(batch, table_stride_)),
        query_(copy_of(query, batch)),
        out_(out),
        batch_(own(batch)),
        cache_(cache),
        width_(round_up(batch.head_dim, kLanes)),
        plan_(batch_, 1),
        steps_(batch_, cache_, plan_),
        rows_(batch_, plan_, query_.data()) {
    for (const Task& task : plan_.tasks) divide(task, num_threads);
    partials_.resize(total_size_);
  }
  HelpedAttention(const HelpedAttention&) = delete;

  bool is_suitable() const { return can_help(batch_, plan_) && parts_.size() <= Helpers::kMaxParts; }
  int64_t num_parts() const { return static_cast<int64_t>(parts_.size()); }
  int64_t sums_size() const { return sums_size_; }

  void compute(int64_t part, float* values) const {
    static thread_local Scratch<P> scratch;
    Registers registers;
    [[maybe_unused]] const Rounding<P> rounding;
    const Task& task = parts_[part].task;
    const Sums sums = sums_of(task, values);
    sums.clear(rows_.count(task), width_);
    const P* query = rows_.pack(task, steps_.takes_columns(task), kTileKeys, scratch);
    steps_.fetch_first_tile(task, scratch);
    for (int64_t start = task.begin; start < task.end; start += kTileKeys) {
      steps_.add_tile(task, start, start + kTileKeys < task.end ? &task : nullptr, query, sums, registers, scratch);
    }
  }

  void finish(int64_t part, const float* values) {
    const auto& [task, place] = parts_[part];
    if (task.is_apart) {
      std::copy_n(values, size_of(task), partials_.data() + place);
    } else {
      rows_.finish(task, 0, rows_.count(task), sums_of(task, const_cast<float*>(values)), out_);
    }
  }

  // What was computed in several partitions, in the order of these.
  void merge() {
    for (size_t i = 0; i < parts_.size();) {
      const Task& task = parts_[i].task;
      const Sums total = sums_of(task, partials_.data() + parts_[i].place);
      const int64_t count = rows_.count(task);
      for (++i; i < parts_.size() && parts_[i].task.seq == task.seq && parts_[i].task.head == task.head; ++i) {
        add_sums(total, sums_of(task, partials_.data() + parts_[i].place), count, width_);
      }
      if (task.is_apart) rows_.finish(task, 0, count, total, out_);
    }
  }

 private:
  struct Part {
    Task task;      // over one partition; is_apart: there are others
    int64_t place;  // in partials_
  };

  static std::vector<bf16> copy_of(const bf16* query, const AttentionBatch& batch) {
    const int64_t tokens = std::accumulate(batch.query_lens, batch.query_lens + batch.num_seqs, int64_t{0});
    const int64_t size = batch.num_heads * batch.head_dim;
    std::vector<bf16> rows(tokens * size);
    for (int64_t i = 0; i < tokens; ++i) std::copy_n(query + i * batch.query_stride, size, rows.data() + i * size);
    return rows;
  }

  static std::vector<int32_t> table_of(const AttentionBatch& batch, int64_t stride) {
    std::vector<int32_t> table(batch.num_seqs * stride);
    for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
      const int32_t* from = batch.block_table + seq * batch.table_stride;
      std::copy_n(from, divide_up(batch.seq_lens[seq], batch.block_size), table.data() + seq * stride);
    }
    return table;
  }

  AttentionBatch own(AttentionBatch batch) const {
    batch.query_lens = query_lens_.data();
    batch.seq_lens = seq_lens_.data();
    batch.block_table = block_table_.data();
    batch.table_stride = table_stride_;
    batch.query_stride = batch.num_heads * batch.head_dim;
    return batch;
  }

  // Heads first, so that each has its partitions one after the other.
  void divide(const Task& task, int num_threads) {
    const int64_t first = task.begin / kPartitionKeys, last = (task.end - 1) / kPartitionKeys;
    const int64_t others = static_cast<int64_t>(plan_.tasks.size()) * (last - first + 1);
    const int64_t ranges = std::clamp<int64_t>(divide_up(kPartsEach * num_threads, others), 1, task.num_heads);
    for (int64_t range = 0; range < ranges; ++range) {
      Task part = task;
      part.head = task.head + task.num_heads * range / ranges;
      part.num_heads = task.head + task.num_heads * (range + 1) / ranges - part.head;
      part.is_apart = first < last;
      for (int64_t partition = first; partition <= last; ++partition) {
        part.begin = std::max(task.begin, partition * kPartitionKeys);
        part.end = std::min(task.end, (partition + 1) * kPartitionKeys);
        parts_.push_back({part, total_size_});
        if (part.is_apart) total_size_ += size_of(part);
        sums_size_ = std::max(sums_size_, size_of(part));
      }
    }
  }

  // Floats of a task's sums: values of all rows, then their states.
  int64_t size_of(const Task& task) const {
    return round_up(rows_.count(task) * (width_ + static_cast<int64_t>(sizeof(RowState) / sizeof(float))), kLanes);
  }
  Sums sums_of(const Task& task, float* values) const {
    return {values, reinterpret_cast<RowState*>(values + rows_.count(task) * width_)};
  }

  std::vector<int64_t> query_lens_, seq_lens_;
  int64_t table_stride_;
  std::vector<int32_t> block_table_;
  std::vector<bf16> query_;
  bf16* out_;  // not for late ones
  AttentionBatch batch_;
  AttentionCache<bf16> cache_;
  int64_t width_;
  Plan plan_;
  Steps<bf16, bf16> steps_;
  TaskRows<bf16> rows_;
  std::vector<Part> parts_;
  int64_t sums_size_ = 0, total_size_ = 0;
  std::vector<float> partials_;
};

struct Work {
  HelpedAttention* attention;

  int64_t sums_size() const { return attention->sums_size(); }
  void compute(int64_t part, float* sums) const { attention->compute(part, sums); }
  void finish(int64_t part, const float* sums) const { attention->finish(part, sums); }
};

}  // namespace

bool can_help_attend(const AttentionBatch& batch) { return can_help(batch, Plan(batch, 1)); }

bool paged_attention(const AttentionBatch& batch, const AttentionCache<bf16>& cache, const bf16* query, bf16* out,
                     Helpers& helpers) {
  const int64_t keys = std::accumulate(batch.seq_lens, batch.seq_lens + batch.num_seqs, int64_t{0});
  if (keys * batch.num_kv_heads * cache.width * 2 * static_cast<int64_t>(sizeof(bf16)) < kHelpedBytes) return false;
  const auto attention = std::make_shared<HelpedAttention>(batch, cache, query, out, helpers.count() + 1);
  if (!attention->is_suitable()) return false;
  helpers.run(Work{attention.get()}, attention->num_parts(), attention);
  attention->merge();
  return true;
}

#endif

}  // namespace pagoda
