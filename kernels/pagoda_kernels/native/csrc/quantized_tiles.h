// Products of bfloat16 rows with tiles of quantized weights, a part (a group's inputs, or some of them) at a time.
#pragma once

#include <algorithm>
#include <cstring>

#include "packed_tiles.h"
#include "quantized_codes.h"

namespace pagoda {

// Sums stay in registers only where all of this is inlined.
namespace {

// Sum of a row's inputs of one part, for the zero points.
template <typename T>
[[gnu::always_inline]] inline float sum_of(const T* x, int64_t size) {
  Vec total;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) total = total + load(x + i);
  if (i < size) total = total + load(x + i, static_cast<int>(size - i));
  return sum(total);
}

// sums [64] += scales * (part - zeros * x_sum)
template <int kVectors>
[[gnu::always_inline]] inline void add_part(const Vec (&part)[kVectors], const float* scales, const float* zeros,
                                            float x_sum, float* sums) {
  for (int j = 0; j < kVectors; ++j) {
    Vec p = part[j];
    if (zeros) p = fma(load(zeros + j * kLanes), Vec(-x_sum), p);
    store(sums + j * kLanes, fma(load(scales + j * kLanes), p, load(sums + j * kLanes)));
  }
}

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

constexpr int kBlockRows = 6;  // 24 accumulators, 4 vectors of weights, 1 of x
constexpr int64_t kAheadBytes = 8 << 10;

// Weights of a part that are numbers already, [pairs, 64, 2].
struct Numbers {
  static constexpr int64_t kPairBytes = 256;
  void operator()(const uint8_t* from, __m512i (&w)[4]) const {
    for (int j = 0; j < 4; ++j) w[j] = _mm512_load_si512(from + 64 * j);
  }
};

// R rows of x against one part of a tile. Meanwhile kLines lines a pair from `ahead` come nearer.
template <int R, int kLines, typename Source>
void block(const Source& source, const uint8_t* w_from, const uint8_t* ahead, const bf16* x, int64_t x_stride,
           int64_t pairs, const float* scales, const float* zeros, float* sums) {
  __m512 part[R][4];
  const char* rows[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < 4; ++j) part[r][j] = _mm512_setzero_ps();
    rows[r] = reinterpret_cast<const char*>(x + r * x_stride);
  }
  for (int64_t k = 0; k < pairs; ++k) {
    __m512i w[4];
    source(w_from, w);
#pragma GCC unroll 2
    for (int line = 0; line < kLines; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
    w_from += Source::kPairBytes;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      int32_t bits;
      std::memcpy(&bits, rows[r] + 4 * k, sizeof(bits));
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(bits);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) part[r][j] = _mm512_dpbf16_ps(part[r][j], pair, (__m512bh)w[j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Vec all[4] = {part[r][0], part[r][1], part[r][2], part[r][3]};
    add_part<4>(all, scales, zeros, zeros ? sum_of(x + r * x_stride, 2 * pairs) : 0.0f, sums + r * kTile);
  }
}

template <int kLines, typename Source>
void block_of(int64_t rows, const Source& source, const uint8_t* w, const uint8_t* ahead, const bf16* x,
              int64_t x_stride, int64_t pairs, const float* scales, const float* zeros, float* sums) {
  switch (rows) {
    case 1: return block<1, kLines>(source, w, ahead, x, x_stride, pairs, scales, zeros, sums);
    case 2: return block<2, kLines>(source, w, ahead, x, x_stride, pairs, scales, zeros, sums);
    case 3: return block<3, kLines>(source, w, ahead, x, x_stride, pairs, scales, zeros, sums);
    case 4: return block<4, kLines>(source, w, ahead, x, x_stride, pairs, scales, zeros, sums);
    case 5: return block<5, kLines>(source, w, ahead, x, x_stride, pairs, scales, zeros, sums);
    default: return block<6, kLines>(source, w, ahead, x, x_stride, pairs, scales, zeros, sums);
  }
}

// A few rows take the codes to numbers in registers; for more they go through the nearest cache, and the codes of the
// next part come nearer while this one is computed with.
template <int kBits>
void add(const Codes<kBits>& codes, const uint8_t* w, const bf16* x, int64_t x_stride, int64_t rows, int64_t size,
         const float* scales, const float* zeros, float* numbers, float* sums) {
  constexpr int kLines = Codes<kBits>::kPairBytes / 64;
  const int64_t pairs = size / 2;
  if (rows <= kBlockRows) {
    for (int line = 0; line < 4; ++line) _mm_prefetch(scales + 4 * kTile + line * kLanes, _MM_HINT_T0);
    block_of<kLines>(rows, codes, w, w + kAheadBytes, x, x_stride, pairs, scales, zeros, sums);
    return;
  }
  auto* to = reinterpret_cast<uint8_t*>(numbers);
  for (int64_t k = 0; k < pairs; ++k, w += Codes<kBits>::kPairBytes) {
    __m512i v[4];
    codes(w, v);
    for (int j = 0; j < 4; ++j) _mm512_store_si512(to + k * Numbers::kPairBytes + 64 * j, v[j]);
  }
  const int64_t count = (rows + kBlockRows - 1) / kBlockRows;
  for (int64_t b = 0; b < count; ++b) {
    const int64_t begin = rows * b / count, height = rows * (b + 1) / count - begin;
    const bf16* from = x + begin * x_stride;
    float* total = sums + begin * kTile;
    if (b < kLines) {
      block_of<1>(height, Numbers(), to, w + b * pairs * 64, from, x_stride, pairs, scales, zeros, total);
    } else {
      block_of<0>(height, Numbers(), to, w, from, x_stride, pairs, scales, zeros, total);
    }
  }
}

// Codes of a panel, half of a tile's outputs, to numbers: [pairs, 32] pairs.
template <int kHalf, int kBits>
inline void to_panel(const Codes<kBits>& codes, const uint8_t* from, int64_t pairs, bf16* to) {
  for (int64_t k = 0; k < pairs; ++k, from += Codes<kBits>::kPairBytes, to += 2 * packed::kPanel) {
    __m512i w[2];
    codes.template half<kHalf>(from, w);
    _mm512_store_si512(to, w[0]);
    _mm512_store_si512(to + 2 * kLanes, w[1]);
  }
}

#endif

}  // namespace

}  // namespace pagoda
