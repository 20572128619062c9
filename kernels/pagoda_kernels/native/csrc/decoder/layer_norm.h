// Layer norms of rows.
#pragma once

#include <cstdint>

namespace pagoda {

// out [num_rows, size] = (x - mean) / sqrt(variance + eps) * weight + bias, in float32, rounded once. x_stride is that
// of rows, in elements; bias may be null.
template <typename T>
void layer_norm(const T* x, int64_t x_stride, const T* weight, const T* bias, T* out, int64_t num_rows, int64_t size,
                float eps, int num_threads);

}  // namespace pagoda
