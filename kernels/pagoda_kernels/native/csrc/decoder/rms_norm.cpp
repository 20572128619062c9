#include "ops.h"
#include "threads/parallel.h"
#include "simd/vec.h"

namespace pagoda {

template <typename T>
void rms_norm(const T* x, int64_t x_stride, const T* weight, T* out, int64_t num_rows, int64_t size, float eps,
              float weight_offset, int num_threads) {
  const int64_t whole = size / kLanes * kLanes;
  const int rest = static_cast<int>(size - whole);
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(size, 1));
  parallel_for(num_rows, grain, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = x + row * x_stride;
      T* to = out + row * size;
      Vec squares;
      for (int64_t i = 0; i < whole; i += kLanes) {
        const Vec v = load(from + i);
        squares = fma(v, v, squares);
      }
      if (rest) {
        const Vec v = load(from + whole, rest);
        squares = fma(v, v, squares);
      }
      const Vec scale(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
      const Vec offset(weight_offset);
      for (int64_t i = 0; i < whole; i += kLanes) store(to + i, load(from + i) * scale * (load(weight + i) + offset));
      if (rest) store(to + whole, load(from + whole, rest) * scale * (load(weight + whole, rest) + offset), rest);
    }
  });
}

template void rms_norm(const float*, int64_t, const float*, float*, int64_t, int64_t, float, float, int);
template void rms_norm(const bf16*, int64_t, const bf16*, bf16*, int64_t, int64_t, float, float, int);

}  // namespace pagoda
