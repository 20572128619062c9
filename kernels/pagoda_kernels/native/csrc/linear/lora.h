// What adapters of low rank add to the outputs of a layer, for groups of rows that have an adapter each.
#pragma once

#include <cstdint>

#include "simd/vec.h"

namespace pagoda {

constexpr int64_t kLoraPanel = 64;  // outputs that lie together in b

// Adds b (a x) to some neighbouring outputs. A line of the table that Python makes.
struct LoraPart {
  const void* a;                      // [rank, num_inputs] of T
  const void* b;                      // [ceil(num_rows / kLoraPanel), rank, kLoraPanel] of T
  int64_t rank, row_start, num_rows;  // of the outputs; rank 0: nothing is added
};

// Rows of a batch by the adapter that they have.
struct LoraRows {
  const int64_t* rows;    // ascending within a group
  const int64_t* starts;  // [num_groups + 1] where each group begins in `rows`
  int64_t num_groups;
};

// Of a layer: `num_parts` for each group, which change different outputs.
struct LoraTable {
  const LoraPart* parts;
  int64_t group_stride, num_parts;

  const LoraPart& at(int64_t group, int64_t part) const { return parts[group * group_stride + part]; }
};

// out[row] += b (a x[row]) for every group and part: a x is rounded to T, the sum with `out` once to Out. A row has the
// same bits in every batch.
template <typename T, typename Out>
void add_lora(const T* x, int64_t x_stride, int64_t num_inputs, Out* out, int64_t out_stride, const LoraRows& rows,
              const LoraTable& table, int num_threads);

}  // namespace pagoda
