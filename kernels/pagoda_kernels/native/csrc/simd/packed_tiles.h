// Tiles of a product with a packed weight: some rows of x, packed too, against a panel of outputs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "simd/amx.h"
#include "simd/vec.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace packed {

constexpr int kPanel = 2 * kLanes;  // output features of a panel: two vectors
constexpr int kVectorRows = 14;     // rows of x in vectors: 28 accumulators, 2 vectors of weights, 1 of x
#if defined(__AMX_BF16__)
constexpr int kTileRows = amx::kBlock;
#else
constexpr int kTileRows = kVectorRows;
#endif
constexpr int64_t kPairsInL1 = 128;  // pairs of inputs whose weights (16 KiB a panel) stay in L1 for all tiles
constexpr int64_t kManyRows = 256;
#if defined(__AMX_BF16__)
constexpr int64_t kPairsForMany = 256;  // the same for many rows, whose sums then come and go half as often
#else
constexpr int64_t kPairsForMany = kPairsInL1;
#endif

#if defined(__AMX_BF16__)

using TileRegisters = amx::Registers;
constexpr int kBlockWords = amx::kWords;  // of a row, that an instruction takes at a time
constexpr bool kLeavesVectors = true;     // `tile` computes with none

// One tile: sums[r, :] += x[r, begin..end) W^T, 16 pairs of inputs after the other, whatever the number of rows.
// x: [blocks, height, 16] pairs, zeros after the last one; w: [pairs, 32] pairs; both at `begin`. Meanwhile lines from
// `ahead` on come nearer, and meanwhile(n) is called n times.
template <typename Meanwhile>
void tile(const uint32_t* x, int height, const bf16* w, int64_t pairs, float* sums, bool is_first, const char* ahead,
          int64_t step, const Meanwhile& meanwhile) {
  constexpr int64_t kRow = amx::kWords * 4, kStride = kPanel * 4;
  const int64_t blocks = pairs / amx::kWords, done = blocks * amx::kWords, lines = std::max<int64_t>(1, step / 4);
  const auto run = [&](const uint32_t* rows, const bf16* columns, int64_t count, bool adds, const auto& between) {
    const amx::Operand left{rows, kRow, height * kRow}, right{columns, kStride, amx::kWords * kStride};
    if (height > amx::kRows) {
      amx::multiply<true, true, amx::Passing::kLeft>(left, right, count, sums, kStride, adds, between);
    } else {
      amx::multiply<false, true, amx::Passing::kLeft>(left, right, count, sums, kStride, adds, between);
    }
  };
  if (blocks > 0) {
    run(x, w, blocks, !is_first, [&](int turn) {
      // A few at a time: more than a core can wait for would hold up the loads of tiles.
      for (int64_t line = turn; line < lines; line += amx::kTurns, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
      if (turn == 0) meanwhile(blocks);
    });
  }
  if (done < pairs) {
    alignas(64) bf16 padded[amx::kWords * 2 * kPanel] = {};
    std::copy_n(w + done * 2 * kPanel, (pairs - done) * 2 * kPanel, padded);
    run(x + done * height, padded, 1, !is_first || blocks > 0, [](int) {});
  }
}

// Rows [height, words] of four bytes as `tile` reads them, of which the first `rows` are there. `stride` is in bytes.
inline void pack_blocks(const void* x, int64_t stride, int rows, int height, int64_t words, uint32_t* to) {
  for (int64_t k = 0; k < words; k += amx::kWords) {
    const __mmask16 mask = first_lanes(static_cast<int>(std::min<int64_t>(amx::kWords, words - k)));
    for (int r = 0; r < height; ++r, to += amx::kWords) {
      const char* from = static_cast<const char*>(x) + r * stride + 4 * k;
      _mm512_storeu_si512(to, r < rows ? _mm512_maskz_loadu_epi32(mask, from) : _mm512_setzero_si512());
    }
  }
}

#else

// Sums of a tile in registers, [R, 32]: a pair of inputs after the other, whatever the number of rows.
template <int R>
class VectorSums {
 public:
  VectorSums(const float* sums, bool is_first) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      acc_[r][0] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * kPanel);
      acc_[r][1] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * kPanel + kLanes);
    }
  }
  // x: [R] pairs; w: [32] pairs.
  [[gnu::always_inline]] void add(const uint32_t* x, const bf16* w) {
    const __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + kPanel);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[r]));
      acc_[r][0] = _mm512_dpbf16_ps(acc_[r][0], pair, w0);
      acc_[r][1] = _mm512_dpbf16_ps(acc_[r][1], pair, w1);
    }
  }
  void store(float* sums) const {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      _mm512_store_ps(sums + r * kPanel, acc_[r][0]);
      _mm512_store_ps(sums + r * kPanel + kLanes, acc_[r][1]);
    }
  }

 private:
  __m512 acc_[R][2];
};

// One tile: sums[r, :] += x[r, begin..end) W^T. x: [pairs, R] pairs; w: [pairs, 32] pairs; both at `begin`. fetch(k) is
// called with each pair, to bring nearer what comes next.
template <int R, typename Fetch>
void tile(const uint32_t* x, const bf16* w, int64_t pairs, float* sums, bool is_first, const Fetch& fetch) {
  VectorSums<R> of_tile(sums, is_first);
  for (int64_t k = 0; k < pairs; ++k, x += R, w += 2 * kPanel) {
    fetch(k);
    of_tile.add(x, w);
  }
  of_tile.store(sums);
}

// f(the number as a constant), of 1 to kVectorRows.
template <int R = 1, typename F>
void with_height(int height, const F& f) {
  if constexpr (R == kVectorRows) {
    f(std::integral_constant<int, R>());
  } else if (height == R) {
    f(std::integral_constant<int, R>());
  } else {
    with_height<R + 1>(height, f);
  }
}

// The lines from `ahead` on come nearer.
template <typename Meanwhile>
void tile(const uint32_t* x, int height, const bf16* w, int64_t pairs, float* sums, bool is_first, const char* ahead,
          int64_t step, const Meanwhile&) {
  const auto fetch = [&](int64_t k) __attribute__((always_inline)) {
    _mm_prefetch(ahead + k * step, _MM_HINT_T1);
    _mm_prefetch(ahead + k * step + 64, _MM_HINT_T1);
  };
  with_height(height, [&](auto rows) { tile<decltype(rows)::value>(x, w, pairs, sums, is_first, fetch); });
}

constexpr int kBlockWords = 1;
constexpr bool kLeavesVectors = false;

struct TileRegisters {
  TileRegisters(int64_t, int) {}
};

#endif

// Rows divided into tiles of nearly equal height, so that no tile leaves registers idle.
struct Tiles {
  int64_t num_rows, count, height, num_higher;
  explicit Tiles(int64_t rows, int64_t highest = kTileRows)
      : num_rows(rows), count((rows + highest - 1) / highest), height(rows / count), num_higher(rows % count) {
#if defined(__AMX_BF16__)
    // All of one height, so that registers keep their shapes; rows of zeros after the last one.
    if (num_higher > 0) ++height;
    num_higher = 0;
#endif
  }
  int64_t begin(int64_t tile) const { return tile * height + std::min(tile, num_higher); }
  int height_of(int64_t tile) const { return static_cast<int>(height + (tile < num_higher)); }
  // Of them, those that are before the end.
  int rows(int64_t tile) const { return static_cast<int>(std::min<int64_t>(height_of(tile), num_rows - begin(tile))); }
};

// x [rows, words] of four bytes to [words, width], rows <= width <= 16, in squares of 16 by 16; what follows the last
// row is zero. `stride` is in bytes.
inline void pack_rows(const void* x, int64_t stride, int rows, int64_t words, uint32_t* to, int64_t to_stride,
                      int width) {
  if (width == 1 && to_stride == 1) {
    std::memcpy(to, x, static_cast<size_t>(words) * 4);
    return;
  }
  const auto* bytes = static_cast<const char*>(x);
  const __mmask16 mask = first_lanes(width);
  for (int64_t k = 0; k < words; k += 16) {
    const int count = static_cast<int>(std::min<int64_t>(16, words - k));
    __m512i a[16], b[16];
    for (int r = 0; r < 16; ++r) {
      a[r] =
          r < rows ? _mm512_maskz_loadu_epi32(first_lanes(count), bytes + r * stride + 4 * k) : _mm512_setzero_si512();
    }
    // Transposed within pairs of rows, then of pairs, then of the four 128-bit lanes.
    for (int r = 0; r < 16; r += 2) {
      b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
      b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    for (int r = 0; r < 16; r += 4) {
      a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
      a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
      a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
      a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    // a[4 q + i]: rows 4 q .. 4 q + 3 of columns i, 4 + i, 8 + i, 12 + i, one in each 128-bit lane.
    for (int i = 0; i < 4; ++i) {
      const __m512i low = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), high = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
      const __m512i low2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
      const __m512i high2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
      b[i] = _mm512_shuffle_i32x4(low, low2, 0x88);
      b[8 + i] = _mm512_shuffle_i32x4(low, low2, 0xdd);
      b[4 + i] = _mm512_shuffle_i32x4(high, high2, 0x88);
      b[12 + i] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
    for (int i = 0; i < count; ++i) _mm512_mask_storeu_epi32(to + (k + i) * to_stride, mask, b[i]);
  }
}

}  // namespace packed

#endif

}  // namespace pagoda
