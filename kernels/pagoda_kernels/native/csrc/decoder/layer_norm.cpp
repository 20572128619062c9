#include "decoder/layer_norm.h"

#include <algorithm>
#include <cmath>

#include "simd/vec.h"
#include "threads/parallel.h"

namespace pagoda {

template <typename T>
void layer_norm(const T* x, int64_t x_stride, const T* weight, const T* bias, T* out, int64_t num_rows, int64_t size,
                float eps, int num_threads) {
  const int64_t whole = size / kLanes * kLanes;
  const int rest = static_cast<int>(size - whole);
  const float count = static_cast<float>(size);
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(size, 1));
  parallel_for(num_rows, grain, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = x + row * x_stride;
      T* to = out + row * size;
      Vec total;
      for (int64_t i = 0; i < whole; i += kLanes) total = total + load(from + i);
      if (rest) total = total + load(from + whole, rest);
      const float average = sum(total) / count;
      const Vec mean(average);
      Vec squares;
      for (int64_t i = 0; i < whole; i += kLanes) {
        const Vec v = load(from + i) - mean;
        squares = fma(v, v, squares);
      }
      float variance = sum(squares);
      for (int64_t i = whole; i < size; ++i) {
        const float v = to_float(from[i]) - average;
        variance += v * v;
      }
      const Vec scale(1.0f / std::sqrt(variance / count + eps));
      const auto normed = [&](Vec v, Vec by, Vec added) { return fma((v - mean) * scale, by, added); };
      for (int64_t i = 0; i < whole; i += kLanes) {
        store(to + i, normed(load(from + i), load(weight + i), bias == nullptr ? Vec() : load(bias + i)));
      }
      if (rest) {
        const Vec added = bias == nullptr ? Vec() : load(bias + whole, rest);
        store(to + whole, normed(load(from + whole, rest), load(weight + whole, rest), added), rest);
      }
    }
  });
}

template void layer_norm(const float*, int64_t, const float*, const float*, float*, int64_t, int64_t, float, int);
template void layer_norm(const bf16*, int64_t, const bf16*, const bf16*, bf16*, int64_t, int64_t, float, int);

}  // namespace pagoda
