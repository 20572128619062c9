// A gate, and a norm over groups of columns, on what a state space gives; see
// pagoda_kernels/recurrent/gate_and_norm.py.
#pragma once

#include <cstdint>

namespace pagoda {

template <typename T>
struct GateAndNorm {
  int64_t num_rows, num_groups, group_size;
  const float* x;       // [num_rows, num_groups * group_size]
  const T* gate;        // the same shape
  int64_t gate_stride;  // of a row
  const T* weight;      // [num_groups * group_size]; null: there is no norm
  float eps;
  bool is_gate_first;
  T* out;
};

template <typename T>
void gate_and_norm(const GateAndNorm<T>& one, int num_threads);

}  // namespace pagoda
