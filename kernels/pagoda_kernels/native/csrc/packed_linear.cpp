#include "ops.h"
#include "panel_product.h"
#include "parallel.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace {

using namespace packed;

constexpr int64_t kGatedRows = 128;  // fewer wait for weights, which come fastest one panel behind the other

// Rows of bfloat16 against packed weights.
struct Pairs {
  struct Stretch {
    const bf16* w;
    int64_t begin, size;  // of the pairs
    const char* ahead;
    int64_t step;

    template <typename Meanwhile>
    void add(const uint32_t* tile, int height, float* sums, const Meanwhile& meanwhile) {
      packed::tile(tile + begin * height, height, w, size, sums, begin == 0, ahead, step, meanwhile);
      ahead += size * step;
    }
  };
  static constexpr bool kLeavesVectors = packed::kLeavesVectors;
  Input x;
  const bf16* weight;
  int64_t num_rows;

  int block_words() const { return kBlockWords; }
#if defined(__AMX_BF16__)
  int64_t row_words() const { return (x.pairs + amx::kWords - 1) / amx::kWords * amx::kWords; }
  void pack_tile(int64_t row, int rows, int height, uint32_t* to) const {
    pack_blocks(x.rows + row * x.stride, x.stride * 2, rows, height, x.pairs, to);
  }
#else
  int64_t row_words() const { return x.pairs; }
  void pack_tile(int64_t row, int rows, int height, uint32_t* to) const {
    pack_rows(x.rows + row * x.stride, x.stride * 2, rows, x.pairs, to, height, height);
  }
#endif
  const uint32_t* in_place(int64_t num_packed_rows) const {
    return num_packed_rows == 1 && row_words() == x.pairs ? reinterpret_cast<const uint32_t*>(x.rows) : nullptr;
  }
  int64_t pairs_in_l1() const { return num_rows < kManyRows ? kPairsInL1 : kPairsForMany; }
  int64_t depth(int64_t num_tiles) const { return num_tiles == 1 ? x.pairs : pairs_in_l1(); }
  int64_t num_stretches(int64_t num_tiles) const { return (x.pairs + depth(num_tiles) - 1) / depth(num_tiles); }
  // While all tiles pass over one stretch of weights, the next one comes into L2, of the next panel at the end.
  Stretch stretch(int64_t panel, int64_t i, int64_t num_tiles) const {
    const int64_t begin = i * depth(num_tiles), size = std::min(depth(num_tiles), x.pairs - begin);
    const bf16* w = weight + (panel * x.pairs + begin) * 2 * kPanel;
    return {w, begin, size, reinterpret_cast<const char*>(w + pairs_in_l1() * 2 * kPanel), 128 / num_tiles};
  }
};

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
  const Pairs pairs{{x, x_stride, num_inputs / 2}, weight, num_rows};
  PanelProduct<Pairs, Linear<Out>>{pairs, linear, Tiles(num_rows)}.run(num_threads, helpers);
}

bool should_gate(int64_t num_rows, int64_t size) { return num_rows >= kGatedRows && size % kPanel == 0; }

void packed_gated_linear(const bf16* x, int64_t x_stride, const bf16* weight, const bf16* bias, Activation activation,
                         bf16* out, int64_t num_rows, int64_t size, int64_t num_inputs, int num_threads) {
  if (num_rows == 0) return;
  with_activation(activation, [&](const auto& act) {
    const Gated<std::decay_t<decltype(act)>> gated{bias, out, size, act};
    const Pairs pairs{{x, x_stride, num_inputs / 2}, weight, num_rows};
    PanelProduct<Pairs, std::decay_t<decltype(gated)>>{pairs, gated, Tiles(num_rows)}.run(num_threads);
  });
}

template void packed_linear(const bf16*, int64_t, const bf16*, const bf16*, const bf16*, int64_t, float*, int64_t, int64_t,
                            int64_t, int, Helpers*);
template void packed_linear(const bf16*, int64_t, const bf16*, const bf16*, const bf16*, int64_t, bf16*, int64_t, int64_t,
                            int64_t, int, Helpers*);

#endif

}  // namespace pagoda
