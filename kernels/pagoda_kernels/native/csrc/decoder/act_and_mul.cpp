#include "simd/activations.h"
#include "ops.h"
#include "threads/parallel.h"
#include "simd/vec.h"

namespace pagoda {
namespace {

template <typename T, typename Act>
void rows(const T* x, int64_t x_stride, T* out, int64_t num_rows, int64_t size, int num_threads, const Act& act) {
  const int64_t whole = size / kLanes * kLanes;
  const int rest = static_cast<int>(size - whole);
  const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(size, 1));
  parallel_for(num_rows, grain, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = x + row * x_stride;
      const T* up = gate + size;
      T* to = out + row * size;
      for (int64_t i = 0; i < whole; i += kLanes) store(to + i, act(load(gate + i)) * act.up(load(up + i)));
      if (rest) store(to + whole, act(load(gate + whole, rest)) * act.up(load(up + whole, rest)), rest);
    }
  });
}

}  // namespace

template <typename T>
void act_and_mul(const T* x, int64_t x_stride, T* out, int64_t num_rows, int64_t size, Activation activation,
                 int num_threads) {
  with_activation(activation, [&](const auto& act) { rows(x, x_stride, out, num_rows, size, num_threads, act); });
}

template void act_and_mul(const float*, int64_t, float*, int64_t, int64_t, Activation, int);
template void act_and_mul(const bf16*, int64_t, bf16*, int64_t, int64_t, Activation, int);

}  // namespace pagoda
