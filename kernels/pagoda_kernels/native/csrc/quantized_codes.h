// Codes of quantized weights to numbers: for tiles of 32 output features, four inputs after the other four.
#pragma once

#include <algorithm>

#include "ops.h"
#include "vec.h"

namespace pagoda {

constexpr int kTile = 32;
// Inputs whose products are summed before they are scaled, at most; a group of more is summed in several parts.
constexpr int64_t kMaxPart = 128;

inline int64_t part_size(const QuantizedMatrix& w) { return std::min({w.num_inputs, w.group_size, kMaxPart}); }
// Where the scales of a tile are, and the zero points, for the inputs from k on.
inline int64_t scales_at(const QuantizedMatrix& w, int64_t tile, int64_t k) {
  return (tile * w.num_groups + k / w.group_size) * kTile;
}

// int8: of the 128 bytes of a quad, four inputs of a tile, byte 4 i + h belongs to output i, input h. A code is the number
// plus 128.
//
// int4: bits 0 to 3 of byte 4 i + h, of 64, are of output i, input h; bits 4 to 7 of output 16 + i. A code is the number
// plus 8.
template <int kBits>
struct Codes {
  static constexpr int64_t kQuadBytes = 16 * kBits;
  static constexpr int kOffset = 1 << (kBits - 1);

  static const uint8_t* at(const QuantizedMatrix& w, int64_t tile, int64_t k) {
    return w.codes + (tile * w.num_inputs + k) / 4 * kQuadBytes;
  }
  static int number(const uint8_t* quad, int output, int input) {
    if (kBits == 8) return quad[4 * output + input] - kOffset;
    return ((quad[4 * (output % 16) + input] >> (output / 16 * 4)) & 15) - kOffset;
  }
#if defined(__AVX512F__)
  // Input h of 16 outputs, the first or the second ones.
  static __m512 numbers(const uint8_t* quad, int half, int h) {
    const __m512i codes = _mm512_loadu_si512(quad + (kBits == 8 ? 64 * half : 0));
    const __m512i shifted = _mm512_srli_epi32(codes, static_cast<unsigned>(8 * h + (kBits == 8 ? 0 : 4 * half)));
    const __m512i code = _mm512_and_si512(shifted, _mm512_set1_epi32((1 << kBits) - 1));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(kOffset)));
  }
#endif
};

// Quads of a tile as float32 [4 quads, 32].
template <int kBits>
inline void to_floats(const uint8_t* from, int64_t quads, float* to) {
  for (int64_t q = 0; q < quads; ++q, from += Codes<kBits>::kQuadBytes, to += 4 * kTile) {
#if defined(__AVX512F__)
    for (int h = 0; h < 4; ++h) {
      for (int half = 0; half < 2; ++half) {
        _mm512_store_ps(to + h * kTile + 16 * half, Codes<kBits>::numbers(from, half, h));
      }
    }
#else
    for (int h = 0; h < 4; ++h) {
      for (int i = 0; i < kTile; ++i) to[h * kTile + i] = static_cast<float>(Codes<kBits>::number(from, i, h));
    }
#endif
  }
}

#if defined(__AVX512BF16__)

// The same as pairs of bfloat16 [2 quads, 32, 2], which hold them exactly.
template <int kBits>
inline void to_pairs(const uint8_t* from, int64_t quads, uint8_t* to) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int64_t q = 0; q < quads; ++q, from += Codes<kBits>::kQuadBytes) {
    for (int h = 0; h < 4; h += 2) {
      for (int half = 0; half < 2; ++half, to += 64) {
        const __m512i even = _mm512_castps_si512(Codes<kBits>::numbers(from, half, h));
        const __m512i odd = _mm512_castps_si512(Codes<kBits>::numbers(from, half, h + 1));
        _mm512_store_si512(to, _mm512_ternarylogic_epi64(_mm512_srli_epi32(even, 16), odd, upper, 0xf8));  // a | (b & c)
      }
    }
  }
}

// Codes of four bits, a byte each: [quads, 32, 4].
inline void to_bytes(const uint8_t* from, int64_t quads, uint8_t* to) {
  const __m512i low = _mm512_set1_epi8(15);
  for (int64_t q = 0; q < quads; ++q, from += 64, to += 128) {
    const __m512i codes = _mm512_loadu_si512(from);
    _mm512_store_si512(to, _mm512_and_si512(codes, low));
    _mm512_store_si512(to + 64, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low));
  }
}

#endif

}  // namespace pagoda
