#include <type_traits>

#include "ops.h"
#include "simd/activations.h"
#include "simd/rough.h"
#include "simd/vec.h"
#include "threads/parallel.h"

namespace pagoda {

namespace {

// What numbers of type T are activated with: results in bfloat16 need no exact tail.
template <typename T, typename Act>
const Act& exact_enough(const Act& act) {
  return act;
}
#if defined(__AVX512F__)
template <typename T, typename Act>
  requires(std::is_same_v<T, bf16> && std::is_same_v<Act, Gelu>)
RoughGelu exact_enough(const Act&) {
  return {};
}
#endif

}  // namespace

template <typename T>
void activate(const T* x, T* out, int64_t size, Activation activation, int num_threads) {
  constexpr int64_t kGrain = 8192;
  with_activation(activation, [&](const auto& exact) {
    const auto act = exact_enough<T>(exact);
    parallel_for(size, kGrain, num_threads, [&](int64_t begin, int64_t end) {
      const int64_t whole = begin + (end - begin) / kLanes * kLanes;
      for (int64_t i = begin; i < whole; i += kLanes) store(out + i, act(load(x + i)));
      const int rest = static_cast<int>(end - whole);
      if (rest) store(out + whole, act(load(x + whole, rest)), rest);
    });
  });
}

template void activate(const float*, float*, int64_t, Activation, int);
template void activate(const bf16*, bf16*, int64_t, Activation, int);

}  // namespace pagoda
