#include <vector>

#include "ops.h"
#include "parallel.h"

namespace pagoda {
namespace {

constexpr int64_t kPart = 4096;

// Integers in the order of the floats; the zeros are one, a NaN stands above everything.
inline int32_t key_of(float x) {
  x += 0.0f;
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const int32_t size = bits & 0x7fffffff;
  return size > 0x7f800000 ? 0x7fffffff : bits ^ ((bits >> 31) & 0x7fffffff);
}

}  // namespace

void argmax(const float* x, int64_t x_stride, float* values, int64_t* indices, int64_t num_rows, int64_t size,
            int num_threads) {
  const int64_t parts = (size + kPart - 1) / kPart;
  std::vector<int32_t> best(num_rows * parts);
  parallel_for(num_rows * parts, 8, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* from = x + i / parts * x_stride + i % parts * kPart;
      const int64_t count = std::min(kPart, size - i % parts * kPart);
      int32_t highest = INT32_MIN;
      for (int64_t j = 0; j < count; ++j) highest = std::max(highest, key_of(from[j]));
      best[i] = highest;
    }
  });
  for (int64_t row = 0; row < num_rows; ++row) {
    const int32_t* first = best.data() + row * parts;
    const int64_t part = std::max_element(first, first + parts) - first;
    const float* from = x + row * x_stride;
    int64_t index = part * kPart;
    while (key_of(from[index]) != first[part]) ++index;
    values[row] = from[index];
    indices[row] = index;
  }
}

}  // namespace pagoda
