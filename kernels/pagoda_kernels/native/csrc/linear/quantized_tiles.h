// Tiles of a product with quantized weights: some rows against a panel of outputs, for the inputs of one part.
#pragma once

#include <type_traits>
#include <utility>

#include "simd/packed_tiles.h"
#include "linear/quantized_codes.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace packed {

// Rows of a tile of height R, for one part.
struct RowPart {
  const uint32_t* x;      // [steps, R], four bytes of each row: two bfloat16 or four int8
  const float* scales;    // [R] of int8
  const int32_t* starts;  // [R] of int8: what the codes' offset adds to a sum, with its sign changed
  const float* sums;      // [R] of the numbers in x, if there are zero points
};

// A panel, for one part. Meanwhile the lines from `ahead` come nearer.
struct PanelPart {
  const uint8_t* w;  // [steps] vectors of a Source
  int64_t steps;
  const float *scales, *zeros;  // [32]; zeros may be null
  bool is_first;
  const char* ahead;
  int64_t ahead_step;
};

// Pairs of bfloat16, summed in float32 in the order of the inputs.
struct Floats {
  using Sum = __m512;
  static constexpr bool kScales = false;
  static constexpr int ways(int) { return 1; }
  static Sum dot(Sum sum, __m512i w, int32_t x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)w);
  }
  static __m512 value(Sum sum) { return sum; }
};

// Quads of int8 with codes, summed exactly: in any order. So a few rows have several sums each, which do not wait for
// each other.
struct Integers {
  using Sum = __v16si;  // as the instruction's: a __m512i would be written to memory in every step
  static constexpr bool kScales = true;
  static constexpr int ways(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
  static Sum dot(Sum sum, __m512i w, int32_t x) {
    return (Sum)_mm512_dpbusd_epi32((__m512i)sum, w, _mm512_set1_epi32(x));
  }
  static __m512 value(Sum sum) { return _mm512_cvtepi32_ps((__m512i)sum); }
};

struct Bytes {
  static constexpr int64_t kStepBytes = 128;
  static void load(const uint8_t* from, __m512i (&w)[2]) {
    w[0] = _mm512_loadu_si512(from);
    w[1] = _mm512_loadu_si512(from + 64);
  }
};

struct Nibbles {
  static constexpr int64_t kStepBytes = 64;
  static void load(const uint8_t* from, __m512i (&w)[2]) {
    const __m512i codes = _mm512_loadu_si512(from), low = _mm512_set1_epi8(15);
    w[0] = _mm512_and_si512(codes, low);
    w[1] = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low);
  }
};

// sums[r, :] += scales * (x w - zeros * sum(x)); the first part sets them.
template <int R, typename Kind, typename Source>
void part_tile(const RowPart& rows, const PanelPart& panel, float* sums) {
  constexpr int kWays = Kind::ways(R);
  typename Kind::Sum acc[R][2][kWays] = {};
  const uint32_t* x = rows.x;
  const uint8_t* from = panel.w;
  const char* ahead = panel.ahead;
  const auto step = [&](int way) __attribute__((always_inline)) {
    __m512i w[2];
    Source::load(from, w);
    from += Source::kStepBytes;
    _mm_prefetch(ahead, _MM_HINT_T1);
    _mm_prefetch(ahead + 64, _MM_HINT_T1);
    ahead += panel.ahead_step;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const int32_t value = static_cast<int32_t>(x[r]);
      acc[r][0][way] = Kind::dot(acc[r][0][way], w[0], value);
      acc[r][1][way] = Kind::dot(acc[r][1][way], w[1], value);
    }
    x += R;
  };
  int64_t k = 0;
  for (; k + kWays <= panel.steps; k += kWays) {
#pragma GCC unroll 4
    for (int way = 0; way < kWays; ++way) step(way);
  }
  if constexpr (kWays > 1) {
    for (; k < panel.steps; ++k) step(0);
  }
#pragma GCC unroll 2
  for (int j = 0; j < 2; ++j) {
    const __m512 scale = _mm512_loadu_ps(panel.scales + j * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      typename Kind::Sum sum = acc[r][j][0];
      if constexpr (kWays > 1) {
#pragma GCC unroll 4
        for (int way = 1; way < kWays; ++way) sum += acc[r][j][way];
      }
      if constexpr (Kind::kScales) sum += rows.starts[r];
      __m512 product = Kind::value(sum), factor = scale;
      if (panel.zeros) {
        product = _mm512_fmadd_ps(_mm512_loadu_ps(panel.zeros + j * kLanes), _mm512_set1_ps(-rows.sums[r]), product);
      }
      if constexpr (Kind::kScales) factor = _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales[r]));
      float* to = sums + r * kPanel + j * kLanes;
      const __m512 before = panel.is_first ? _mm512_setzero_ps() : _mm512_load_ps(to);
      _mm512_store_ps(to, _mm512_fmadd_ps(factor, product, before));
    }
  }
}

using PartTile = void (*)(const RowPart&, const PanelPart&, float*);

template <typename Kind, typename Source, int... R>
constexpr PartTile part_tile_of(int rows, std::integer_sequence<int, R...>) {
  constexpr PartTile tiles[] = {part_tile<R + 1, Kind, Source>...};
  return tiles[rows - 1];
}

template <typename Kind, typename Source>
PartTile part_tile_of(int rows) {
  return part_tile_of<Kind, Source>(rows, std::make_integer_sequence<int, kVectorRows>{});
}

}  // namespace packed

#endif

}  // namespace pagoda
