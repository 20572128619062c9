// Weights of bfloat16 in 12 bits each, without loss: numbers of a matrix are of nearly one size, so that 4 bits say
// which of 15 neighbouring exponents one has. The few with smaller exponents are kept beside. After DFloat11 (Zhang et
// al., 2025), with codes of one length: they become numbers again in a few instructions a vector.
#pragma once

#include <algorithm>
#include <vector>

#include "ops.h"
#include "simd/packed_tiles.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace packed {

// A unit is 16 pairs of inputs of a panel: 32 lines of 32 numbers, as the packed weight has them; a group is 4 of its
// lines. The codes of a panel's groups are in three streams, one after the other, of 64 bytes a group each: a processor
// sees where streams lead, and brings more of three than of one. A word of stream i is the number of the group's line i
// with 4 bits of exponent instead of 8, all bits where bfloat16 has them: sign, 4 that are free, exponent, fraction.
// The free ones hold the number of line 3: its exponent in stream 0, the upper 4 bits of its fraction in stream 1, the
// lower 3 and its sign in stream 2. So a vector of numbers takes an `and` and an addition, every fourth one three
// shifts. A unit's word has in its upper 8 bits the least exponent, which is added to all. In its lower 24 bits is the
// first of its outliers, the last one is before the next unit's: place in the unit << 16, and the number. What follows
// the last row or pair of the matrix becomes any small number.
constexpr int kUnitPairs = 16, kLineNumbers = kPanel, kGroupLines = 4, kGroups = 8;
constexpr int64_t kUnitNumbers = int64_t{kUnitPairs} * 2 * kPanel;
constexpr int64_t kStreams = 3, kGroupBytes = 64, kUnitBytes = kGroups * kGroupBytes;  // in each stream
constexpr int kExponentShift = 24, kMaxCode = 15, kFraction = 7;                       // bits of the fraction
constexpr uint32_t kOutlierMask = (uint32_t{1} << kExponentShift) - 1;
constexpr uint16_t kOwnBits = 0x87ff;  // of a stream's word, that are its own line's

inline int64_t units_of(int64_t pairs) { return (pairs + kUnitPairs - 1) / kUnitPairs; }

// Where a unit's codes are.
template <typename Byte>
struct Streams {
  Byte* at;
  int64_t stride;  // from one stream to the next

  Streams(Byte* codes, int64_t panel, int64_t unit, int64_t units_of_panel)
      : at(codes + (panel * kStreams * units_of_panel + unit) * kUnitBytes), stride(units_of_panel * kUnitBytes) {}
  Byte* words(int stream, int group) const { return at + stream * stride + group * kGroupBytes; }
  // Brings a line of each stream nearer.
  [[gnu::always_inline]] void fetch(int64_t offset) const {
    for (int i = 0; i < kStreams; ++i)
      _mm_prefetch(reinterpret_cast<const char*>(at + i * stride + offset), _MM_HINT_T1);
  }
};

// A unit that is to become numbers, while the one some units ahead comes nearer.
struct Unit {
  CompressedMatrix weight;
  int64_t index;  // of all units
  Streams<const uint8_t> codes, ahead;
  __m512i least;  // exponent, where bfloat16 has it

  // The panel's last unit is followed by the next panel's first one.
  Unit(const CompressedMatrix& weight, int64_t panel, int64_t unit, int64_t units_of_panel, int64_t distance)
      : weight(weight),
        index(panel * units_of_panel + unit),
        codes(weight.codes, panel, unit, units_of_panel),
        ahead(weight.codes, panel, unit + distance, units_of_panel) {
    if (unit + distance >= units_of_panel) ahead.at += (kStreams - 1) * ahead.stride;
    _mm_prefetch(reinterpret_cast<const char*>(weight.units + index + 32), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(weight.outliers + (weight.units[index] & kOutlierMask) + 16),
                 _MM_HINT_T0);
    least = _mm512_set1_epi16(static_cast<short>(weight.units[index] >> kExponentShift << kFraction));
  }

  // The lines of one group.
  [[gnu::always_inline]] void decompress_group(int group, bf16* to) const {
    constexpr int kSelect = 0xca;  // a ? b : c
    const auto same = [](int x) { return _mm512_set1_epi16(static_cast<short>(x)); };
    __m512i words[kStreams];
#pragma GCC unroll 3
    for (int i = 0; i < kStreams; ++i) {
      words[i] = _mm512_loadu_si512(codes.words(i, group));
    }
    to += group * kGroupLines * kLineNumbers;
#pragma GCC unroll 3
    for (int i = 0; i < kStreams; ++i) {
      const __m512i own = _mm512_and_si512(words[i], same(kOwnBits));
      _mm512_store_si512(to + i * kLineNumbers, _mm512_add_epi16(own, least));
    }
    const __m512i exponent = _mm512_srli_epi16(words[0], 4), upper = _mm512_srli_epi16(words[1], 8);
    const __m512i rest = _mm512_shldi_epi16(words[2], words[2], 4);
    const __m512i most = _mm512_ternarylogic_epi64(same(kMaxCode << kFraction), exponent, upper, kSelect);
    const __m512i last = _mm512_ternarylogic_epi64(same(0x8007), rest, most, kSelect);
    _mm512_store_si512(to + kStreams * kLineNumbers, _mm512_add_epi16(last, least));
  }

  void set_outliers(bf16* to) const {
    const uint32_t end = weight.units[index + 1] & kOutlierMask;
    for (uint32_t i = weight.units[index] & kOutlierMask; i < end; ++i) {
      to[weight.outliers[i] >> 16].bits = static_cast<uint16_t>(weight.outliers[i]);
    }
  }
};

inline void decompress(const Unit& unit, bf16* to) {
  for (int group = 0; group < kGroups; ++group) {
    unit.ahead.fetch(group * kGroupBytes);
    unit.decompress_group(group, to);
  }
  unit.set_outliers(to);
}

// The opposite, of the lines of one unit, of which so many pairs and outputs are there; returns its word but for the
// place of its outliers.
inline uint32_t compress(const bf16* lines, int64_t pairs, int64_t outputs, const Streams<uint8_t>& to,
                         std::vector<uint32_t>& outliers) {
  const auto same = [](int x) { return _mm512_set1_epi16(static_cast<short>(x)); };
  const auto exponent = [&](__m512i numbers) {
    return _mm512_and_si512(_mm512_srli_epi16(numbers, kFraction), same(0xff));
  };
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < kUnitNumbers; i += kLineNumbers) {
    most = _mm512_max_epi16(most, exponent(_mm512_loadu_si512(lines + i)));
  }
  alignas(64) int16_t lanes[kLineNumbers];
  _mm512_store_si512(lanes, most);
  const int least = std::max(0, *std::max_element(lanes, lanes + kLineNumbers) - kMaxCode);
  const auto code = [&](int64_t line) {
    const bf16* from = lines + line * kLineNumbers;
    const __m512i numbers = _mm512_loadu_si512(from);
    const __mmask32 is_coded = _mm512_cmpge_epi16_mask(exponent(numbers), same(least));
    const int64_t there = line / 2 < pairs ? std::clamp<int64_t>(outputs - line % 2 * kLanes, 0, kLanes) : 0;
    const uint64_t is_there = (uint64_t{1} << 2 * there) - 1;
    for (uint64_t left = ~uint64_t{is_coded} & is_there; left != 0; left &= left - 1) {
      const int lane = __builtin_ctzll(left);
      outliers.push_back(static_cast<uint32_t>((line * kLineNumbers + lane) << 16) | from[lane].bits);
    }
    return _mm512_maskz_sub_epi16(is_coded, numbers, same(least << kFraction));
  };
  for (int group = 0; group < kGroups; ++group) {
    const int line = group * kGroupLines;
    __m512i words[kStreams] = {code(line), code(line + 1), code(line + 2)};
    const __m512i last = code(line + kStreams), sign = _mm512_srli_epi16(_mm512_and_si512(last, same(0x8000)), 4);
    const __m512i free_bits[kStreams] = {_mm512_slli_epi16(last, 4), _mm512_slli_epi16(last, 8),
                                         _mm512_or_si512(_mm512_slli_epi16(_mm512_and_si512(last, same(7)), 12), sign)};
    for (int i = 0; i < kStreams; ++i) {
      const __m512i free_word = _mm512_andnot_si512(same(kOwnBits), free_bits[i]);
      _mm512_storeu_si512(to.words(i, group), _mm512_or_si512(words[i], free_word));
    }
  }
  return static_cast<uint32_t>(least) << kExponentShift;
}

}  // namespace packed

#endif

}  // namespace pagoda
