// Codes of quantized weights to numbers: for tiles of 32 output features, four inputs after the other four.
#pragma once

#include <algorithm>

#include "ops.h"
#include "simd/vec.h"

namespace pagoda {

constexpr int kTile = 32;
// Inputs whose products are summed before they are scaled, at most; a group of more is summed in several parts.
constexpr int64_t kMaxPart = 128;

inline int64_t part_size(const QuantizedMatrix& w) { return std::min({w.num_inputs, w.group_size, kMaxPart}); }
// Where the scales of a tile are, and the zero points, for the inputs from k on.
inline int64_t scales_at(const QuantizedMatrix& w, int64_t tile, int64_t k) {
  return (tile * w.num_groups + k / w.group_size) * kTile;
}

// int8: of the 128 bytes of a quad, four inputs of a tile, byte 4 i + h belongs to output i, input h. A code is the
// number plus 128.
//
// int4: bits 0 to 3 of byte 4 i + h, of 64, are of output i, input h; bits 4 to 7 of output 16 + i. A code is the
// number plus 8.
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
void to_pairs(const uint8_t* from, int64_t quads, uint8_t* to);

// Codes of inputs 0 and 1 in the lower bytes of a pair of words, those of 2 and 3 in the upper ones. Tables of the
// numbers that follow ignore all but the lowest four bits of a word.
template <>
inline void to_pairs<4>(const uint8_t* from, int64_t quads, uint8_t* to) {
  alignas(32) static constexpr uint16_t kNumbers[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                                        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
  const __m512i table = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(kNumbers)));
  const __m512i order = _mm512_set4_epi32(0x0f0d0e0c, 0x0b090a08, 0x07050604, 0x03010200);
  for (int64_t q = 0; q < quads; ++q, from += 64, to += 256) {
    const __m512i codes = _mm512_shuffle_epi8(_mm512_loadu_si512(from), order);
    _mm512_store_si512(to, _mm512_permutexvar_epi16(codes, table));
    _mm512_store_si512(to + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table));
    _mm512_store_si512(to + 128, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table));
    _mm512_store_si512(to + 192, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table));
  }
}

// A code in the lowest byte of 2^23 as float32 adds to it; the difference has the number's bfloat16 in its upper half.
template <>
inline void to_pairs<8>(const uint8_t* from, int64_t quads, uint8_t* to) {
  const __m512i whole = _mm512_set1_epi32(0x4b000000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512 offset = _mm512_set1_ps(0x1p23f + Codes<8>::kOffset);
  for (int64_t q = 0; q < quads; ++q, from += 128, to += 256) {
    for (int half = 0; half < 2; ++half) {
      const __m512i codes = _mm512_loadu_si512(from + 64 * half);
      const auto number = [&](int h) __attribute__((always_inline)) {
        const __m512i places = _mm512_set4_epi32(12 + h, 8 + h, 4 + h, h);
        const __m512i code = _mm512_mask_shuffle_epi8(whole, 0x1111111111111111u, codes, places);
        return _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(code), offset));
      };
      for (int h = 0; h < 4; h += 2) {
        const __m512i even = _mm512_srli_epi32(number(h), 16), odd = number(h + 1);
        _mm512_store_si512(to + 64 * (h + half), _mm512_ternarylogic_epi64(even, odd, upper, 0xf8));  // a | (b & c)
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

#if defined(__AMX_BF16__)

// The numbers themselves, a byte each: [quads, 32, 4].
template <int kBits>
inline void to_numbers(const uint8_t* from, int64_t quads, uint8_t* to) {
  const __m512i low = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(static_cast<char>(Codes<kBits>::kOffset));
  for (int64_t q = 0; q < quads; ++q, from += Codes<kBits>::kQuadBytes, to += 128) {
    __m512i first = _mm512_loadu_si512(from), second;
    if constexpr (kBits == 8) {
      second = _mm512_loadu_si512(from + 64);
    } else {
      second = _mm512_and_si512(_mm512_srli_epi16(first, 4), low);
      first = _mm512_and_si512(first, low);
    }
    _mm512_store_si512(to, _mm512_sub_epi8(first, offset));
    _mm512_store_si512(to + 64, _mm512_sub_epi8(second, offset));
  }
}

#endif

}  // namespace pagoda
