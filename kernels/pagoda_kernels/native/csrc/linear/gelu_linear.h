// A linear layer whose outputs are activated while they are sums.
#pragma once

#include <cstdint>

#include "simd/vec.h"

namespace pagoda {

#if defined(__AVX512BF16__)

// out [num_rows, num_outputs] = gelu(x W^T + bias), rounded once. weight: as pack_weight writes it; bias may be null.
void packed_gelu_linear(const bf16* x, int64_t x_stride, const bf16* weight, const bf16* bias, bf16* out,
                        int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int num_threads);

#endif

}  // namespace pagoda
