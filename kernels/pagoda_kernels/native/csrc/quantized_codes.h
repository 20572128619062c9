// Codes of quantized weights to numbers: for tiles of 64 output features, a pair of inputs after the other.
#pragma once

#include "ops.h"
#include "vec.h"

namespace pagoda {

constexpr int kTile = 64;
// Inputs whose products are summed before they are scaled, at most; a group of more is summed in several parts. Products
// of bfloat16 with one group for all inputs are one part.
constexpr int64_t kMaxPart = 128;

// int4: a 16-bit word holds one input of four output features; bits 4 j .. 4 j + 3 of word 2 i + h are those of output
// 16 j + i, input h of the pair. A code is the number plus 8.
//
// int8: of the 128 bytes, byte 64 b + 16 l + 8 c + 2 i + h belongs to output 32 b + 16 c + 4 l + i, input h of the pair.
// A code is sign and magnitude, with the sign alone for -128.
template <int kBits>
struct Codes;

inline int number_of(const uint8_t* pair, int bits, int output, int half) {
  if (bits == 4) {
    const int block = output / 16, word = 2 * (output % 16) + half;
    return ((pair[2 * word + block / 2] >> (4 * (block % 2))) & 15) - 8;
  }
  const int within = output % 16;
  const uint8_t code = pair[64 * (output / 32) + 16 * (within / 4) + 8 * (output / 16 % 2) + 2 * (within % 4) + half];
  if (code == 0x80) return -128;
  return code & 0x80 ? -(code & 0x7f) : code;
}

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

// Four vectors of pairs of bfloat16, [16 outputs, 2] each; every code is exact in bfloat16.
template <>
struct Codes<4> {
  static constexpr int64_t kPairBytes = 64;
  __m512i table;

  Codes() {
    alignas(64) uint16_t values[32];
    for (int i = 0; i < 32; ++i) {  // twice: the index has five bits, and only four are the code's
      bf16 value;
      from_float(static_cast<float>(i % 16 - 8), &value);
      values[i] = value.bits;
    }
    table = _mm512_load_si512(values);
  }
  // The vectors of one half of the outputs.
  template <int kHalf>
  void half(const uint8_t* from, __m512i* w) const {
    const __m512i words = _mm512_loadu_si512(from);
    w[0] = _mm512_permutexvar_epi16(kHalf ? _mm512_srli_epi16(words, 8) : words, table);
    w[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8 * kHalf + 4), table);
  }
  void operator()(const uint8_t* from, __m512i (&w)[4]) const {
    half<0>(from, w);
    half<1>(from, w + 2);
  }
};

template <>
struct Codes<8> {
  static constexpr int64_t kPairBytes = 128;
  __m512i low[2], high[2];  // bytes of the bfloat16 of each magnitude

  Codes() {
    alignas(64) uint8_t lows[128], highs[128];
    for (int i = 0; i < 128; ++i) {
      bf16 value;
      from_float(static_cast<float>(i), &value);
      lows[i] = static_cast<uint8_t>(value.bits), highs[i] = static_cast<uint8_t>(value.bits >> 8);
    }
    for (int i = 0; i < 2; ++i) low[i] = _mm512_load_si512(lows + 64 * i), high[i] = _mm512_load_si512(highs + 64 * i);
  }
  template <int kHalf>
  void half(const uint8_t* from, __m512i* w) const {
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80)), least = _mm512_set1_epi8(static_cast<char>(0xc3));
    const __m512i codes = _mm512_loadu_si512(from + 64 * kHalf);
    const __m512i lows = _mm512_permutex2var_epi8(low[0], codes, low[1]);
    __m512i highs = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    highs = _mm512_ternarylogic_epi64(highs, codes, sign, 0xf8);  // highs | (codes & sign)
    highs = _mm512_mask_mov_epi8(highs, _mm512_cmpeq_epi8_mask(codes, sign), least);
    w[0] = _mm512_unpacklo_epi8(lows, highs);
    w[1] = _mm512_unpackhi_epi8(lows, highs);
  }
  void operator()(const uint8_t* from, __m512i (&w)[4]) const {
    half<0>(from, w);
    half<1>(from, w + 2);
  }
};

#else

template <>
struct Codes<4> {
  static constexpr int64_t kPairBytes = 64;
};
template <>
struct Codes<8> {
  static constexpr int64_t kPairBytes = 128;
};

#endif

// `pairs` pairs of inputs of a tile as float32 [2 pairs, 64].
template <int kBits>
inline void to_floats(const Codes<kBits>& codes, const uint8_t* from, int64_t pairs, float* to) {
  for (int64_t p = 0; p < pairs; ++p, from += Codes<kBits>::kPairBytes, to += 2 * kTile) {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
    __m512i w[4];
    codes(from, w);
    for (int j = 0; j < 4; ++j) {
      _mm512_store_si512(to + 16 * j, _mm512_slli_epi32(w[j], 16));
      _mm512_store_si512(to + kTile + 16 * j, _mm512_and_si512(w[j], _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }
#else
    for (int output = 0; output < kTile; ++output) {
      to[output] = static_cast<float>(number_of(from, kBits, output, 0));
      to[kTile + output] = static_cast<float>(number_of(from, kBits, output, 1));
    }
#endif
  }
}

}  // namespace pagoda
