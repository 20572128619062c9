// Weights of bfloat16 in 12 bits each, without loss: numbers of a matrix are of nearly one size, so that 4 bits say which of
// 15 neighbouring exponents one has. The few with smaller exponents are kept beside. After DFloat11 (Zhang et al., 2025),
// with codes of one length: they become numbers again in a few instructions a vector.
#pragma once

#include <algorithm>
#include <vector>

#include "ops.h"
#include "packed_tiles.h"

namespace pagoda {

#if defined(__AMX_BF16__)

namespace packed {

// A unit is 16 pairs of inputs of a panel: 32 lines of 32 numbers, as the packed weight has them, zeros behind the last pair;
// a group is 4 of its lines. Codes of a panel's groups are in three streams, one behind the other, of 64 bytes a group each: a
// processor sees where streams lead, and brings more of three than of one. In the first are 4 bits for each number (the lowest
// ones of 32 words are those of the group's first line), in the second the sign and 7 bits of the fraction of those of the
// first two lines, a byte each, in the third the others'. A unit's word has in its upper 8 bits an exponent, to which the 4
// bits are added; 0 is the exponent 0. In its lower 24 bits is the first of its outliers, the last one is before the next
// unit's: place in the unit << 16, and the number.
constexpr int kUnitPairs = 16, kLineNumbers = kPanel, kGroupLines = 4, kGroups = 8;
constexpr int64_t kUnitNumbers = int64_t{kUnitPairs} * 2 * kPanel;
constexpr int64_t kStreams = 3, kGroupBytes = 64, kUnitBytes = kGroups * kGroupBytes;  // in each stream
constexpr int kExponentShift = 24, kMaxCode = 15;
constexpr uint32_t kOutlierMask = (uint32_t{1} << kExponentShift) - 1;

inline int64_t units_of(int64_t pairs) { return (pairs + kUnitPairs - 1) / kUnitPairs; }

// Where a unit's codes are.
template <typename Byte>
struct Streams {
  Byte* at;
  int64_t stride;  // from one stream to the next

  Streams(Byte* codes, int64_t panel, int64_t unit, int64_t units_of_panel)
      : at(codes + (panel * kStreams * units_of_panel + unit) * kUnitBytes), stride(units_of_panel * kUnitBytes) {}
  Byte* exponents(int group) const { return at + group * kGroupBytes; }
  // The sign and fraction of the first number of a line.
  Byte* bytes(int group, int line) const { return at + (1 + line / 2) * stride + group * kGroupBytes + line % 2 * kLineNumbers; }
};

// A unit that is to become numbers, while the one some units ahead comes nearer.
struct Unit {
  CompressedMatrix weight;
  int64_t index;  // of all units
  Streams<const uint8_t> codes, ahead;
  __m512i exponents;

  // The panel's last unit is followed by the next panel's first one.
  Unit(const CompressedMatrix& weight, int64_t panel, int64_t unit, int64_t units_of_panel, int64_t distance)
      : weight(weight),
        index(panel * units_of_panel + unit),
        codes(weight.codes, panel, unit, units_of_panel),
        ahead(weight.codes, panel, unit + distance, units_of_panel) {
    if (unit + distance >= units_of_panel) ahead.at += (kStreams - 1) * ahead.stride;
    exponents = exponents_of(weight.units[index]);
  }

  // The exponent of each code, where bfloat16 has it; in both halves, since a fifth bit is the next number's.
  static __m512i exponents_of(uint32_t word) {
    alignas(32) static constexpr uint16_t kCodes[16] = {0,      1 << 7, 2 << 7,  3 << 7,  4 << 7,  5 << 7,  6 << 7,  7 << 7,
                                                        8 << 7, 9 << 7, 10 << 7, 11 << 7, 12 << 7, 13 << 7, 14 << 7, 15 << 7};
    const __m512i codes = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(kCodes)));
    const auto least = static_cast<short>((word >> kExponentShift) << 7);
    return _mm512_maskz_add_epi16(0xfffefffeu, codes, _mm512_set1_epi16(least));
  }

  // The lines of one group.
  void decompress_group(int group, bf16* to) const {
    for (int stream = 0; stream < kStreams; ++stream) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead.exponents(group) + stream * ahead.stride), _MM_HINT_T1);
    }
    const __m512i fours = _mm512_loadu_si512(codes.exponents(group)), of_byte = _mm512_set1_epi16(static_cast<short>(0x807f));
#pragma GCC unroll 4
    for (int line = 0; line < kGroupLines; ++line) {
      const __m512i exponent = _mm512_permutexvar_epi16(_mm512_srli_epi16(fours, 4 * line), exponents);
      const auto* bytes = reinterpret_cast<const __m256i*>(codes.bytes(group, line));
      const __m512i byte = _mm512_cvtepi8_epi16(_mm256_loadu_si256(bytes));
      _mm512_store_si512(to + (group * kGroupLines + line) * kLineNumbers,
                         _mm512_ternarylogic_epi64(byte, of_byte, exponent, 0xea));  // (a & b) | c
    }
  }

  void set_outliers(bf16* to) const {
    const uint32_t end = weight.units[index + 1] & kOutlierMask;
    for (uint32_t i = weight.units[index] & kOutlierMask; i < end; ++i) {
      to[weight.outliers[i] >> 16].bits = static_cast<uint16_t>(weight.outliers[i]);
    }
  }
};

inline void decompress(const Unit& unit, bf16* to) {
  for (int group = 0; group < kGroups; ++group) unit.decompress_group(group, to);
  unit.set_outliers(to);
}

// The opposite, of the lines of one unit; returns its word but for the place of its outliers.
inline uint32_t compress(const bf16* lines, const Streams<uint8_t>& to, std::vector<uint32_t>& outliers) {
  const __m512i mask = _mm512_set1_epi16(0xff);
  const auto exponent = [&](const bf16* line) {
    return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(line), 7), mask);
  };
  __m512i most = _mm512_setzero_si512();
  for (int line = 0; line < 2 * kUnitPairs; ++line) most = _mm512_max_epi16(most, exponent(lines + line * kLineNumbers));
  alignas(64) int16_t lanes[32];
  _mm512_store_si512(lanes, most);
  const int least = std::max(0, *std::max_element(lanes, lanes + 32) - kMaxCode);
  for (int g = 0; g < kGroups; ++g) {
    __m512i codes = _mm512_setzero_si512();
    for (int line = 0; line < kGroupLines; ++line) {
      const bf16* from = lines + (g * kGroupLines + line) * kLineNumbers;
      const __m512i numbers = _mm512_loadu_si512(from), whole = exponent(from);
      const __m512i code = _mm512_subs_epu16(whole, _mm512_set1_epi16(static_cast<short>(least)));
      const __mmask32 is_coded = _mm512_test_epi16_mask(code, code), is_zero = _mm512_testn_epi16_mask(whole, whole);
      codes = _mm512_or_si512(codes, _mm512_slli_epi16(code, static_cast<unsigned>(4 * line)));
      const __m512i sign = _mm512_and_si512(_mm512_srli_epi16(numbers, 8), _mm512_set1_epi16(0x80));
      const __m512i byte = _mm512_or_si512(sign, _mm512_and_si512(numbers, _mm512_set1_epi16(0x7f)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.bytes(g, line)), _mm512_cvtepi16_epi8(byte));
      for (uint32_t left = ~(is_coded | is_zero); left != 0; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        outliers.push_back(static_cast<uint32_t>(from + lane - lines) << 16 | from[lane].bits);
      }
    }
    _mm512_storeu_si512(to.exponents(g), codes);
  }
  return static_cast<uint32_t>(least) << kExponentShift;
}

}  // namespace packed

#endif

}  // namespace pagoda
