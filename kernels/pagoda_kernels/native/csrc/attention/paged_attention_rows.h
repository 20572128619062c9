// The query rows of a task of paged attention: how they come in and go out. Rows are [KV head][query][head of the
// group].
#pragma once

#include "attention/paged_attention_plan.h"
#include "attention/paged_attention_steps.h"
#include "attention/paged_attention_sums.h"

namespace pagoda::attention {

template <typename T>
class TaskRows {
 public:
  using P = Packed<T>;

  // query: [num_tokens, num_heads, head_dim], tokens batch.query_stride apart.
  TaskRows(const AttentionBatch& batch, const Plan& plan, const T* query)
      : batch_(batch),
        plan_(plan),
        query_(query),
        group_(batch.num_heads / batch.num_kv_heads),
        query_width_(round_up(batch.head_dim, kStep<P> * kStepsAtOnce<P>)),
        width_(round_up(batch.head_dim, kLanes)) {}

  int64_t count(const Task& task) const { return task.num_heads * task.num_queries * group_; }

  const Query& query_of(const Task& task, int64_t row) const {
    return plan_.queries[task.query + row % (task.num_queries * group_) / group_];
  }
  int64_t head_of(const Task& task, int64_t row) const {
    return (task.head + row / (task.num_queries * group_)) * group_ + row % group_;
  }

  // All of them, packed into scratch.query, as columns or as rows, and their positions. Makes room for so many packed
  // keys and values.
  const P* pack(const Task& task, bool as_columns, int64_t num_keys, Scratch<P>& scratch) const {
    const int64_t rows = count(task);
    P* query = scratch.query.get(rows * query_width_);
    as_columns ? pack_columns(task, query) : pack_rows(task, query);
    int64_t* positions = scratch.positions.get(rows);
    for (int64_t row = 0; row < rows; ++row) positions[row] = query_of(task, row).position;
    scratch.keys.get(num_keys * query_width_);
    scratch.values.get(num_keys * width_);
    return query;
  }

  // The outputs of rows [first, first + count), of which `sums` are.
  void finish(const Task& task, int64_t first, int64_t count, const Sums& sums, T* out) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = first + i, head = head_of(task, row),
                    place = query_of(task, row).token * batch_.num_heads + head;
      const float sum = denominator(sums.states[i], batch_.sinks, head);
      store_row(sums.values + i * width_, sum, batch_.head_dim, out + place * batch_.head_dim);
    }
  }

 private:
  const T* at(const Task& task, int64_t row) const {
    return query_ + query_of(task, row).token * batch_.query_stride + head_of(task, row) * batch_.head_dim;
  }

  // [row][query_width_].
  void pack_rows(const Task& task, P* packed) const {
    for (int64_t row = 0; row < count(task); ++row, packed += query_width_) {
      const T* from = at(task, row);
      if constexpr (std::is_same_v<P, T>) {
        std::copy_n(from, batch_.head_dim, packed);
      } else {
        for (int64_t column = 0; column < batch_.head_dim; ++column) packed[column] = to_float(from[column]);
      }
      std::fill(packed + batch_.head_dim, packed + query_width_, P{});
    }
  }

  // [KV head][pair][row of it] pairs.
  void pack_columns(const Task& task, P* packed) const {
    const int64_t rows = task.num_queries * group_, pairs = batch_.head_dim / 2;
    for (int64_t head = 0; head < task.num_heads; ++head, packed += 2 * pairs * rows) {
      for (int64_t row = 0; row < rows; ++row) {
        const T* from = at(task, head * rows + row);
        for (int64_t i = 0; i < pairs; ++i) std::memcpy(packed + 2 * (i * rows + row), from + 2 * i, 2 * sizeof(T));
      }
    }
  }

  const AttentionBatch& batch_;
  const Plan& plan_;
  const T* query_;
  int64_t group_, query_width_, width_;
};

}  // namespace pagoda::attention
