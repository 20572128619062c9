// Rows of bfloat16 in pairs of inputs against packed weights.
#pragma once

#include "linear/panel_product.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace packed {

// How rows are packed, and how much of a panel stays in L1.
struct PairRows {
  static constexpr bool kLeavesVectors = packed::kLeavesVectors;
  Input x;
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
};

// weight: [panels, pairs, 32, 2].
struct Pairs : PairRows {
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
  const bf16* weight;

  int64_t depth(int64_t num_tiles) const { return num_tiles == 1 ? x.pairs : pairs_in_l1(); }
  int64_t num_stretches(int64_t num_tiles) const { return (x.pairs + depth(num_tiles) - 1) / depth(num_tiles); }
  // While all tiles pass over one stretch of weights, the next one comes into L2, of the next panel at the end.
  Stretch stretch(int64_t panel, int64_t i, int64_t num_tiles) const {
    const int64_t begin = i * depth(num_tiles), size = std::min(depth(num_tiles), x.pairs - begin);
    const bf16* w = weight + (panel * x.pairs + begin) * 2 * kPanel;
    return {w, begin, size, reinterpret_cast<const char*>(w + pairs_in_l1() * 2 * kPanel), 128 / num_tiles};
  }
};

}  // namespace packed

#endif

}  // namespace pagoda
