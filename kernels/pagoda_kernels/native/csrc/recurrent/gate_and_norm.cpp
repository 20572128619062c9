#include "recurrent/gate_and_norm.h"

#include <algorithm>
#include <cmath>

#include "simd/activations.h"
#include "simd/vec.h"
#include "threads/parallel.h"

namespace pagoda {
namespace {

constexpr int64_t kGrainValues = 1 << 13;  // that are worth a thread

// One group of a row.
template <typename T>
void run(const GateAndNorm<T>& one, int64_t row, int64_t group) {
  const int64_t size = one.group_size, at = group * size;
  const float* x = one.x + row * one.num_groups * size + at;
  const T* gate = one.gate + row * one.gate_stride + at;
  T* out = one.out + row * one.num_groups * size + at;
  const auto each = [&](const auto& body) {
    for (int64_t i = 0; i < size; i += kLanes) body(i, static_cast<int>(std::min<int64_t>(kLanes, size - i)));
  };
  const auto get = [](const auto* from, int lanes) { return lanes == kLanes ? load(from) : load(from, lanes); };
  const auto gated = [&](int64_t i, int lanes) { return get(x + i, lanes) * Silu{}(get(gate + i, lanes)); };
  Vec squares;
  if (one.weight != nullptr) {
    each([&](int64_t i, int lanes) {
      const Vec value = one.is_gate_first ? gated(i, lanes) : get(x + i, lanes);
      squares = fma(value, value, squares);
    });
  }
  const Vec scale(one.weight == nullptr ? 1.0f : 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + one.eps));
  each([&](int64_t i, int lanes) {
    Vec value = gated(i, lanes) * scale;
    if (one.weight != nullptr) value = value * get(one.weight + at + i, lanes);
    lanes == kLanes ? store(out + i, value) : store(out + i, value, lanes);
  });
}

}  // namespace

template <typename T>
void gate_and_norm(const GateAndNorm<T>& one, int num_threads) {
  const int64_t grain = std::max<int64_t>(1, kGrainValues / one.group_size);
  parallel_for(one.num_rows * one.num_groups, grain, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(one, i / one.num_groups, i % one.num_groups);
  });
}

template void gate_and_norm(const GateAndNorm<float>&, int);
template void gate_and_norm(const GateAndNorm<bf16>&, int);

}  // namespace pagoda
