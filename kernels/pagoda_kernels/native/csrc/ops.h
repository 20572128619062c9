// The kernels: plain pointers in, nothing of torch. T is float or bf16; strides and sizes count elements.
#pragma once

#include <cstdint>

#include "vec.h"

namespace pagoda {

// out[row] = x[row] / sqrt(mean(x[row]^2) + eps) * (weight + weight_offset); rows of `size`, out contiguous.
template <typename T>
void rms_norm(const T* x, int64_t x_stride, const T* weight, T* out, int64_t num_rows, int64_t size, float eps,
              float weight_offset, int num_threads);

}  // namespace pagoda
