// A matrix as a layer holds it, and who multiplies with it.
#pragma once

#include "ops.h"
#include "threads/helpers.h"

namespace pagoda {

// y = x W^T + bias, of a packed bfloat16 matrix, of a compressed one where `packed` is null, or of integers where both
// are.
struct LinearWeights {
  const bf16* packed;
  QuantizedMatrix quantized;
  const bf16* bias;  // or null
  int64_t num_outputs, num_inputs;
  CompressedMatrix compressed{};
};

// Who computes: threads of OpenMP, or, if there are any, helpers of one thread.
struct Team {
  int num_threads;
  Helpers* helpers;

  int threads() const { return helpers == nullptr ? num_threads : 1; }
};

#if defined(__AVX512BF16__)
// out [num_rows, num_outputs] = residual + x W^T + bias; residual may be null. Out is float or bf16.
template <typename Out>
void linear(const LinearWeights& weights, const bf16* x, const bf16* residual, Out* out, int64_t num_rows,
            const Team& team);
#endif

}  // namespace pagoda
