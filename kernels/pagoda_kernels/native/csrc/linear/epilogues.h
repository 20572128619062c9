// What becomes of the sums of a tile: outputs of panels of 32, with what is added to them or computed of them.
#pragma once

#include <algorithm>
#include <array>

#include "simd/activations.h"
#include "simd/packed_tiles.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace packed {

// out = sums + bias + residual. Lines of `out` and `residual` lie far apart: they come while sums are made (`fetch`),
// and are written once.
template <typename Out>
struct Linear {
  static constexpr int kPanels = 1;  // that an item takes
  const bf16 *bias, *residual;
  int64_t residual_stride;
  Out* out;
  int64_t num_outputs;

  int64_t items() const { return (num_outputs + kPanel - 1) / kPanel; }
  int64_t panel(int64_t item, int) const { return item; }
  void fetch(int64_t row, int rows, int64_t item) const {
    const Out* to = out + row * num_outputs + item * kPanel;
    for (int r = 0; r < rows; ++r) __builtin_prefetch(to + r * num_outputs, 1);
  }
  void finish(int64_t row, int rows, int64_t item, const std::array<const float*, kPanels>& sums) const {
    const int64_t column = item * kPanel;
    const int size = static_cast<int>(std::min<int64_t>(kPanel, num_outputs - column));
    const int low = std::min(kLanes, size), high = size - low;
    const Vec low_offset = bias ? load(bias + column, low) : Vec();
    const Vec high_offset = bias ? load(bias + column + low, high) : Vec();
    for (int r = 0; r < rows; ++r) {
      Vec a(_mm512_load_ps(sums[0] + r * kPanel)), b(_mm512_load_ps(sums[0] + r * kPanel + kLanes));
      if (bias) {
        a = a + low_offset;
        b = b + high_offset;
      }
      if (residual) {
        const bf16* more = residual + (row + r) * residual_stride + column;
        a = a + load(more, low);
        b = b + load(more + low, high);
      }
      Out* to = out + (row + r) * num_outputs + column;
      store(to, a, low);
      store(to + low, b, high);
    }
  }
};

// out = activation(gate) * up of two halves of the outputs, each rounded to bfloat16 as Linear would have written it.
template <typename Act>
struct Gated {
  static constexpr int kPanels = 2;
  const bf16* bias;
  bf16* out;
  int64_t size;  // a multiple of kPanel
  Act act;

  int64_t items() const { return size / kPanel; }
  int64_t panel(int64_t item, int half) const { return item + half * items(); }
  void fetch(int64_t row, int rows, int64_t item) const {
    for (int r = 0; r < rows; ++r) __builtin_prefetch(out + (row + r) * size + item * kPanel, 1);
  }
  void finish(int64_t row, int rows, int64_t item, const std::array<const float*, kPanels>& sums) const {
    for (int lanes = 0; lanes < kPanel; lanes += kLanes) {
      const int64_t column = item * kPanel + lanes;
      const auto value = [&](int half, int r) {
        Vec sum(_mm512_load_ps(sums[half] + r * kPanel + lanes));
        if (bias) sum = sum + load(bias + half * size + column);
        bf16 rounded[kLanes];
        store(rounded, sum);
        return load(rounded);
      };
      for (int r = 0; r < rows; ++r) store(out + (row + r) * size + column, act(value(0, r)) * act.up(value(1, r)));
    }
  }
};

// Rows whose sums are there and whose outputs are not.
template <typename Epilogue>
struct Unfinished {
  static constexpr int kAhead = 8;  // rows whose lines come meanwhile

  const Epilogue* epilogue = nullptr;
  int64_t row = 0, item = 0;
  int rows = 0;  // that are left
  std::array<const float*, Epilogue::kPanels> sums{};

  void finish(int most) {
    const int count = std::min(most, rows);
    if (count == 0) return;
    if (rows > kAhead) epilogue->fetch(row + kAhead, std::min(count, rows - kAhead), item);
    epilogue->finish(row, count, item, sums);
    for (const float*& of_panel : sums) of_panel += count * kPanel;
    row += count;
    rows -= count;
  }
  void finish() { finish(rows); }
};

}  // namespace packed

#endif

}  // namespace pagoda
