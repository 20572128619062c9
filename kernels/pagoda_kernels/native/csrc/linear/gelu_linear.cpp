#include "linear/gelu_linear.h"

#include "linear/packed_pairs.h"
#include "simd/rough.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace {

using namespace packed;

// out = gelu(sums + bias).
struct WithGelu {
  static constexpr int kPanels = 1;
  const bf16* bias;
  bf16* out;
  int64_t num_outputs;

  int64_t items() const { return (num_outputs + kPanel - 1) / kPanel; }
  int64_t panel(int64_t item, int) const { return item; }
  void fetch(int64_t row, int rows, int64_t item) const {
    for (int r = 0; r < rows; ++r) __builtin_prefetch(out + (row + r) * num_outputs + item * kPanel, 1);
  }
  void finish(int64_t row, int rows, int64_t item, const std::array<const float*, kPanels>& sums) const {
    const int64_t column = item * kPanel;
    const int size = static_cast<int>(std::min<int64_t>(kPanel, num_outputs - column));
    const int low = std::min(kLanes, size), high = size - low;
    const Vec low_offset = bias ? load(bias + column, low) : Vec();
    const Vec high_offset = bias ? load(bias + column + low, high) : Vec();
    for (int r = 0; r < rows; ++r) {
      const Vec a(_mm512_load_ps(sums[0] + r * kPanel)), b(_mm512_load_ps(sums[0] + r * kPanel + kLanes));
      bf16* to = out + (row + r) * num_outputs + column;
      store(to, RoughGelu()(a + low_offset), low);
      store(to + low, RoughGelu()(b + high_offset), high);
    }
  }
};

}  // namespace

void packed_gelu_linear(const bf16* x, int64_t x_stride, const bf16* weight, const bf16* bias, bf16* out,
                        int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int num_threads) {
  if (num_rows == 0) return;
  const Pairs pairs{{{x, x_stride, num_inputs / 2}, num_rows}, weight};
  PanelProduct<Pairs, WithGelu>{pairs, WithGelu{bias, out, num_outputs}, Tiles(num_rows)}.run(num_threads);
}

#endif

}  // namespace pagoda
