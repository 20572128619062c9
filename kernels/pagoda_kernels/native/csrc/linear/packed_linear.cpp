#include "linear/any_product.h"
#include "linear/packed_pairs.h"
#include "threads/parallel.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace {

using namespace packed;

constexpr int64_t kGatedRows = 128;  // fewer wait for weights, which come fastest one panel after the other

}  // namespace

void pack_weight(const bf16* weight, bf16* out, int64_t num_outputs, int64_t num_inputs, int num_threads) {
  const int64_t pairs = num_inputs / 2, panels = (num_outputs + kPanel - 1) / kPanel;
  parallel_for(panels, 4, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t half = 2 * begin; half < 2 * end; ++half) {
      const int64_t row = half * kLanes;
      const int rows = static_cast<int>(std::clamp<int64_t>(num_outputs - row, 0, kLanes));
      uint32_t* to = reinterpret_cast<uint32_t*>(out + half / 2 * pairs * 2 * kPanel) + half % 2 * kLanes;
      pack_rows(weight + row * num_inputs, num_inputs * 2, rows, pairs, to, kPanel, kLanes);
    }
  });
}

void packed_embedding(const int64_t* ids, const bf16* weight, bf16* out, int64_t num_ids, int64_t num_inputs,
                      int num_threads) {
  const int64_t pairs = num_inputs / 2;
  parallel_for(num_ids, 8, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const bf16* from = weight + ids[i] / kPanel * pairs * 2 * kPanel + ids[i] % kPanel * 2;
      for (int64_t k = 0; k < pairs; ++k) std::memcpy(out + i * num_inputs + 2 * k, from + k * 2 * kPanel, 4);
    }
  });
}

template <typename Out>
void packed_linear(const bf16* x, int64_t x_stride, const bf16* weight, const bf16* bias, const bf16* residual,
                   int64_t residual_stride, Out* out, int64_t num_rows, int64_t num_outputs, int64_t num_inputs,
                   int num_threads, Helpers* helpers) {
  if (num_rows == 0) return;
  const Linear<Out> linear{bias, residual, residual_stride, out, num_outputs};
  const Pairs pairs{{{x, x_stride, num_inputs / 2}, num_rows}, weight};
  PanelProduct<Pairs, Linear<Out>>{pairs, linear, Tiles(num_rows)}.run(num_threads, helpers);
}

bool should_gate(int64_t num_rows, int64_t size) { return num_rows >= kGatedRows && size % kPanel == 0; }

void packed_gated_linear(const bf16* x, int64_t x_stride, const bf16* weight, const bf16* bias, Activation activation,
                         bf16* out, int64_t num_rows, int64_t size, int64_t num_inputs, int num_threads) {
  if (num_rows == 0) return;
  with_activation(activation, [&](const auto& act) {
    const Gated<std::decay_t<decltype(act)>> gated{bias, out, size, act};
    const Pairs pairs{{{x, x_stride, num_inputs / 2}, num_rows}, weight};
    PanelProduct<Pairs, std::decay_t<decltype(gated)>>{pairs, gated, Tiles(num_rows)}.run(num_threads);
  });
}

std::unique_ptr<AnyProduct> packed_product(const LinearWeights& weights, const bf16* x, bf16* out, int64_t num_rows) {
  const Linear<bf16> linear{weights.bias, nullptr, 0, out, weights.num_outputs};
  const Pairs pairs{{{x, weights.num_inputs, weights.num_inputs / 2}, num_rows}, weights.packed};
  return any_product(pairs, linear, Tiles(num_rows));
}

std::unique_ptr<AnyProduct> any_product(const LinearWeights& weights, const bf16* x, bf16* out, int64_t num_rows) {
  if (weights.packed) return packed_product(weights, x, out, num_rows);
  if (weights.compressed.codes) return compressed_product(weights, x, out, num_rows);
  return quantized_product(weights, x, out, num_rows);
}

template void packed_linear(const bf16*, int64_t, const bf16*, const bf16*, const bf16*, int64_t, float*, int64_t,
                            int64_t, int64_t, int, Helpers*);
template void packed_linear(const bf16*, int64_t, const bf16*, const bf16*, const bf16*, int64_t, bf16*, int64_t,
                            int64_t, int64_t, int, Helpers*);

#endif

}  // namespace pagoda
