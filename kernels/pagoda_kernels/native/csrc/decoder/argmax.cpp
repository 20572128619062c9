#include <vector>

#include "ops.h"
#include "threads/parallel.h"

namespace pagoda {
namespace {

constexpr int64_t kPart = 4096;

// The greatest of x, or NaN if one is.
inline float highest_of(const float* x, int64_t count) {
  float highest = -INFINITY;
  int32_t size = 0;
#pragma omp simd reduction(max : highest, size)
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    bits &= 0x7fffffff;
    size = size > bits ? size : bits;
    highest = highest > x[i] ? highest : x[i];
  }
  return size > 0x7f800000 ? NAN : highest;
}

inline bool is_above(float x, float other) { return x > other || (std::isnan(x) && !std::isnan(other)); }

}  // namespace

void argmax(const float* x, int64_t x_stride, float* values, int64_t* indices, int64_t num_rows, int64_t size,
            int num_threads) {
  const int64_t parts = (size + kPart - 1) / kPart;
  std::vector<float> best(num_rows * parts);
  parallel_for(num_rows * parts, 8, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      best[i] = highest_of(x + i / parts * x_stride + i % parts * kPart, std::min(kPart, size - i % parts * kPart));
    }
  });
  for (int64_t row = 0; row < num_rows; ++row) {
    const float* in_part = best.data() + row * parts;
    int64_t part = 0;
    for (int64_t i = 1; i < parts; ++i) {
      if (is_above(in_part[i], in_part[part])) part = i;
    }
    const float* from = x + row * x_stride;
    int64_t index = part * kPart;
    if (std::isnan(in_part[part])) {
      while (!std::isnan(from[index])) ++index;
    } else {
      while (from[index] != in_part[part]) ++index;
    }
    values[row] = from[index];
    indices[row] = index;
  }
}

}  // namespace pagoda
