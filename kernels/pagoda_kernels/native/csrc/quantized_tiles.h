// Products of bfloat16 rows with tiles of quantized weights, a part (a group's inputs, or some of them) at a time.
#pragma once

#include <cstring>

#include "packed_tiles.h"
#include "quantized_codes.h"

namespace pagoda {

// Sum of a row's inputs of one part, for the zero points.
template <typename T>
inline float sum_of(const T* x, int64_t size) {
  Vec total;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) total = total + load(x + i);
  if (i < size) total = total + load(x + i, static_cast<int>(size - i));
  return sum(total);
}

// sums [64] += scales * (part - zeros * x_sum)
template <int kVectors>
inline void add_part(const Vec (&part)[kVectors], const float* scales, const float* zeros, float x_sum, float* sums) {
  for (int j = 0; j < kVectors; ++j) {
    Vec p = part[j];
    if (zeros) p = fma(load(zeros + j * kLanes), Vec(-x_sum), p);
    store(sums + j * kLanes, fma(load(scales + j * kLanes), p, load(sums + j * kLanes)));
  }
}

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

constexpr int kFewRows = 6;  // 24 accumulators, 4 vectors of weights, 1 of x
constexpr int64_t kAheadBytes = 8 << 10;

// sums [R, 64] += R rows of x against one part of a tile. Codes go to numbers in registers; what follows in memory, also
// of the scales, comes nearer meanwhile.
template <int R, int kBits>
void few_rows(const Codes<kBits>& codes, const uint8_t* from, const bf16* x, int64_t x_stride, int64_t pairs,
              const float* scales, const float* zeros, float* sums) {
  __m512 part[R][4] = {};
  for (int line = 0; line < 4; ++line) _mm_prefetch(scales + 4 * kTile + line * kLanes, _MM_HINT_T0);
  for (int64_t k = 0; k < pairs; ++k) {
    __m512i w[4];
    codes(from, w);
#pragma GCC unroll 2
    for (int64_t line = 0; line < Codes<kBits>::kPairBytes; line += 64) {
      _mm_prefetch(from + kAheadBytes + line, _MM_HINT_T1);
    }
    from += Codes<kBits>::kPairBytes;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      int32_t bits;
      std::memcpy(&bits, x + r * x_stride + 2 * k, sizeof(bits));
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

template <int kBits>
void few_rows(int64_t rows, const Codes<kBits>& codes, const uint8_t* from, const bf16* x, int64_t x_stride,
              int64_t pairs, const float* scales, const float* zeros, float* sums) {
  switch (rows) {
    case 1: return few_rows<1>(codes, from, x, x_stride, pairs, scales, zeros, sums);
    case 2: return few_rows<2>(codes, from, x, x_stride, pairs, scales, zeros, sums);
    case 3: return few_rows<3>(codes, from, x, x_stride, pairs, scales, zeros, sums);
    case 4: return few_rows<4>(codes, from, x, x_stride, pairs, scales, zeros, sums);
    case 5: return few_rows<5>(codes, from, x, x_stride, pairs, scales, zeros, sums);
    default: return few_rows<6>(codes, from, x, x_stride, pairs, scales, zeros, sums);
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

}  // namespace pagoda
