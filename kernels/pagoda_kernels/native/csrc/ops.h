// The kernels: plain pointers in, nothing of torch. T is float or bf16; strides and sizes count elements.
#pragma once

#include <cstdint>

#include "vec.h"

namespace pagoda {

// A matrix [num_outputs, num_inputs] of int4 or int8 numbers, packed in tiles of 64 outputs (quantized_codes.h), zeros
// behind the last. An element is scale * (number - zero).
struct QuantizedMatrix {
  const uint8_t* codes;
  const float* scales;  // [tiles, num_groups, 64]
  const float* zeros;   // the same; null where all are 0
  int64_t num_outputs, num_inputs;  // num_inputs is even
  int64_t num_groups, group_size;   // inputs of a group, even; above 128 a multiple of 128, or all
  int bits;
};

// out = x W^T + bias + residual, rounded once. x: [num_rows, num_inputs]; bias and residual may be null; out contiguous.
template <typename T, typename Out>
void quantized_linear(const T* x, int64_t x_stride, const QuantizedMatrix& weight, const T* bias, const T* residual,
                      int64_t residual_stride, Out* out, int64_t num_rows, int num_threads);

// out[row] = x[row] / sqrt(mean(x[row]^2) + eps) * (weight + weight_offset); rows of `size`, out contiguous.
template <typename T>
void rms_norm(const T* x, int64_t x_stride, const T* weight, T* out, int64_t num_rows, int64_t size, float eps,
              float weight_offset, int num_threads);

}  // namespace pagoda
