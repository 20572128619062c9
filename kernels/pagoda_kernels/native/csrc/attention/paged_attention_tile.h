// What paged attention does with one tile of keys: pack it, multiply it with a few query rows, softmax, multiply with
// the values. Every row is computed by itself in one fixed order: its bits do not depend on the rows beside it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <variant>

#include "simd/amx.h"
#include "simd/vec.h"

namespace pagoda::attention {

constexpr int kTileKeys = 64;  // tiles begin at multiples of this position
constexpr int kKeyVectors = kTileKeys / kLanes;
constexpr int kRows = 6;  // query rows of a multiplication that stays in vectors
#if defined(__AVX512F__)
constexpr int kVectors = 4;  // columns of it, in vectors: 24 sums of 32 registers
#else
constexpr int kVectors = 2;  // 12 of 16
#endif
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504088896341f;

// What is multiplied: bfloat16 in pairs where the CPU can, else float32. A "step" of a product is what one instruction
// takes of its inner dimension; packed operands are [step][column][kStep].
#if defined(__AVX512BF16__)
template <typename T>
using Packed = T;
#else
template <typename T>
using Packed = float;
#endif
template <typename P>
constexpr int kStep = sizeof(float) / sizeof(P);
// Whether that is done by AMX, which takes more steps and more rows at a time.
#if defined(__AMX_BF16__)
template <typename P>
constexpr bool kUsesAmx = std::is_same_v<P, bf16>;
constexpr int kAmxRows = amx::kBlock, kAmxSteps = amx::kWords;
using Registers = amx::Registers;
template <typename P>
using Rounding = std::conditional_t<kUsesAmx<P>, amx::TinyIsZero, std::monostate>;
#else
template <typename P>
constexpr bool kUsesAmx = false;
constexpr int kAmxRows = kRows, kAmxSteps = 1;
struct Registers {
  void set(int64_t) {}
  void set_columns(int) {}
};
template <typename P>
using Rounding = std::monostate;
#endif
template <typename P>
constexpr int kRowsOf = kUsesAmx<P> ? kAmxRows : kRows;
template <typename P>
constexpr int kStepsAtOnce = kUsesAmx<P> ? kAmxSteps : 1;

inline constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// ---- loads of kLanes * kStep elements as one register, converted to the packed type; n < 0 is all of them

inline Vec load_packed(const float* p, int n, float) { return n < 0 ? load(p) : load(p, n); }
inline Vec load_packed(const bf16* p, int n, float) { return n < 0 ? load(p) : load(p, n); }
inline Vec load_packed(const int8_t* p, int n, float) {
#if defined(__AVX512F__)
  const __m128i bytes =
      n < 0 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)) : _mm_maskz_loadu_epi8(first_lanes(n), p);
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#else
  int64_t bytes = 0;
  std::memcpy(&bytes, p, n < 0 ? kLanes : n);
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes)));
#endif
}
#if defined(__AVX512BF16__)
inline __mmask32 first_words(int n) { return static_cast<__mmask32>((uint64_t{1} << n) - 1); }
inline Vec load_packed(const bf16* p, int n, bf16) {
  return _mm512_castsi512_ps(n < 0 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16(first_words(n), p));
}
inline Vec load_packed(const int8_t* p, int n, bf16) {
  const __m256i bytes =
      n < 0 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)) : _mm256_maskz_loadu_epi8(first_words(n), p);
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
  return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high, low));
}
#endif

// ---- transposition of a square of 32-bit lanes

#if defined(__AVX512F__)
inline void transpose(Vec* v) {
  __m512 a[16], b[16];
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_ps(v[2 * i].v, v[2 * i + 1].v);
    a[2 * i + 1] = _mm512_unpackhi_ps(v[2 * i].v, v[2 * i + 1].v);
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_castps_pd(a[4 * i + j]), high = _mm512_castps_pd(a[4 * i + 2 + j]);
      b[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      b[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  for (int i = 0; i < 4; ++i) {
    const __m512 x = _mm512_shuffle_f32x4(b[i], b[4 + i], 0x88), y = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0x88);
    const __m512 z = _mm512_shuffle_f32x4(b[i], b[4 + i], 0xdd), w = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0xdd);
    v[i] = _mm512_shuffle_f32x4(x, y, 0x88);
    v[8 + i] = _mm512_shuffle_f32x4(x, y, 0xdd);
    v[4 + i] = _mm512_shuffle_f32x4(z, w, 0x88);
    v[12 + i] = _mm512_shuffle_f32x4(z, w, 0xdd);
  }
}
#else
inline void transpose(Vec* v) {
  __m256 a[8], b[8];
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_ps(v[2 * i].v, v[2 * i + 1].v);
    a[2 * i + 1] = _mm256_unpackhi_ps(v[2 * i].v, v[2 * i + 1].v);
  }
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) {
      const __m256d low = _mm256_castps_pd(a[4 * i + j]), high = _mm256_castps_pd(a[4 * i + 2 + j]);
      b[4 * i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(low, high));
      b[4 * i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low, high));
    }
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_permute2f128_ps(b[i], b[4 + i], 0x20);
    v[4 + i] = _mm256_permute2f128_ps(b[i], b[4 + i], 0x31);
  }
}
#endif

// Keys of one head at base + slots[key] * stride, or values.
template <typename S>
struct Cached {
  const S* base;
  int64_t stride;
  const int64_t* slots;
  int num_keys;
};

// ---- packing

// Cache lines of later keys and values, fetched a few at a time between the work on earlier ones: all at once, they
// would only stand in each other's way.
struct Prefetch {
  const char *keys, *values;
  int64_t stride, bytes;  // between slots; of one slot
  const int64_t* slots;
  int64_t first, last;  // slots to fetch
  int64_t lines_a_step;
  int64_t at = 0;

  template <_mm_hint kHint = _MM_HINT_T0>
  void step(int64_t lines) {
    for (; lines > 0 && first < last; --lines) {
      _mm_prefetch(keys + slots[first] * stride + at, kHint);
      _mm_prefetch(values + slots[first] * stride + at, kHint);
      at += 64;
      if (at >= bytes) {
        at = 0;
        ++first;
      }
    }
  }
  void step() { step(lines_a_step); }
  void step_to_l2() { step<_MM_HINT_T1>(lines_a_step); }  // of more than L1 has room for
};

// A transposed square of up to kLanes keys, the first columns of each: a vector holds one step of every key. Zeros
// after the last key and column; nothing but these keys is read.
template <typename P, typename S>
inline void load_square(const S* base, int64_t stride, const int64_t* slots, int64_t num_keys, int64_t num_columns,
                        Vec* square) {
  if (num_keys >= kLanes && num_columns >= kLanes * kStep<P>) {
    for (int i = 0; i < kLanes; ++i) square[i] = load_packed(base + slots[i] * stride, -1, P{});
  } else {
    const int rest = num_columns >= kLanes * kStep<P> ? -1 : static_cast<int>(num_columns);
    for (int i = 0; i < kLanes; ++i)
      square[i] = i < num_keys ? load_packed(base + slots[i] * stride, rest, P{}) : Vec();
  }
  transpose(square);
}

// Keys at base + slots[key] * stride to packed[step][key][kStep]; zeros after the last key up to a whole vector, after
// the last step as far as they are taken at once.
template <typename P, typename S>
void pack_keys(const S* base, int64_t stride, const int64_t* slots, int num_keys, int64_t head_dim, P* packed,
               Prefetch& ahead) {
  const int num_steps = static_cast<int>(round_up(divide_up(head_dim, kStep<P>), kStepsAtOnce<P>));
  for (int first = 0; first < num_keys; first += kLanes) {
    for (int step = 0; step < num_steps; step += kLanes) {
      const int64_t column = int64_t{step} * kStep<P>;
      Vec square[kLanes];
      load_square<P>(base + column, stride, slots + first, num_keys - first, head_dim - column, square);
      ahead.step();
      auto* to = reinterpret_cast<float*>(packed + (int64_t{step} * kTileKeys + first) * kStep<P>);
      if (num_steps - step >= kLanes) {
        for (int i = 0; i < kLanes; ++i) store(to + i * kTileKeys, square[i]);
      } else {
        for (int i = 0; i < num_steps - step; ++i) store(to + i * kTileKeys, square[i]);
      }
    }
  }
}

// kLanes * kStep columns of values of kStep keys, a vector each, to packed columns.
inline void pair_values(Vec*, float) {}
#if defined(__AVX512BF16__)
alignas(64) inline constexpr std::array<uint16_t, 64> kPairs = [] {
  std::array<uint16_t, 64> order{};
  for (uint16_t i = 0; i < 32; ++i) {
    order[2 * i] = i;
    order[2 * i + 1] = static_cast<uint16_t>(32 + i);
  }
  return order;
}();
inline void pair_values(Vec* keys, bf16) {
  const __m512i low = _mm512_load_si512(kPairs.data()), high = _mm512_load_si512(kPairs.data() + 32);
  const __m512i even = _mm512_castps_si512(keys[0].v), odd = _mm512_castps_si512(keys[1].v);
  keys[0] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(even, low, odd));
  keys[1] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(even, high, odd));
}
#endif

// Values to packed[key / kStep][column][kStep], rows of `padded_dim` columns; zeros after the last column, and after
// the last key as far as keys are taken at once.
template <typename P, typename S>
void pack_values(const S* base, int64_t stride, const int64_t* slots, int num_keys, int64_t head_dim,
                 int64_t padded_dim, P* packed, Prefetch& ahead) {
  constexpr int kWidth = kLanes * kStep<P>;
  const int64_t end = round_up(num_keys, kStep<P> * kStepsAtOnce<P>);
  for (int key = 0; key < end; key += kStep<P>) {
    if (key % 8 == 0 && key < num_keys) ahead.step();
    for (int64_t column = 0; column < padded_dim; column += kWidth) {
      const int rest = head_dim - column >= kWidth ? -1 : static_cast<int>(head_dim - column);
      Vec columns[kStep<P>];
      for (int i = 0; i < kStep<P>; ++i) {
        if (key + i < num_keys) columns[i] = load_packed(base + slots[key + i] * stride + column, rest, P{});
      }
      pair_values(columns, P{});
      auto* to = reinterpret_cast<float*>(packed + key * padded_dim + column * kStep<P>);
      for (int i = 0; i < kStep<P>; ++i) {
        if (column + i * kLanes < padded_dim) store(to + i * kLanes, columns[i]);
      }
    }
  }
}

// ---- products

// sum + a * b over one step.
inline Vec multiply_add(const float* a, Vec b, Vec sum) { return fma(Vec(*a), b, sum); }
#if defined(__AVX512BF16__)
inline Vec multiply_add(const bf16* a, Vec b, Vec sum) {
  int32_t pair;
  std::memcpy(&pair, a, sizeof(pair));
  return _mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b.v);
}
#endif

// out[row] = factors[row] * out[row] + a[row] * b, without factors a[row] * b; kM rows, kN vectors of columns.
template <typename P, int kM, int kN>
void multiply(const P* a, int64_t a_stride, const P* b, int64_t b_stride, int num_steps, float* out, int64_t out_stride,
              const float* factors) {
  Vec sums[kM][kN];
  if (factors != nullptr) {
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < kN; ++n) sums[m][n] = load(out + m * out_stride + n * kLanes) * Vec(factors[m]);
    }
  }
  for (int step = 0; step < num_steps; ++step) {
    Vec columns[kN];
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n)
      columns[n] = load(reinterpret_cast<const float*>(b + step * b_stride + n * kLanes * kStep<P>));
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      const P* element = a + m * a_stride + step * kStep<P>;
#pragma GCC unroll 8
      for (int n = 0; n < kN; ++n) sums[m][n] = multiply_add(element, columns[n], sums[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) store(out + m * out_stride + n * kLanes, sums[m][n]);
  }
}

template <typename P, int kM, int... kNs>
constexpr auto by_vectors(std::integer_sequence<int, kNs...>) {
  return std::array{&multiply<P, kM, kNs + 1>...};
}
template <typename P, int... kMs>
constexpr auto by_rows(std::integer_sequence<int, kMs...>) {
  return std::array{by_vectors<P, kMs + 1>(std::make_integer_sequence<int, kVectors>())...};
}
// kMultiply[rows - 1][vectors - 1].
template <typename P>
inline constexpr auto kMultiply = by_rows<P>(std::make_integer_sequence<int, kRows>());

#if defined(__AMX_BF16__)
inline void scale_row(float* row, int num_vectors, float factor) {
  if (factor == 1.0f) return;
  for (int i = 0; i < num_vectors; ++i) store(row + i * kLanes, load(row + i * kLanes) * Vec(factor));
}

// The same in AMX's order, for up to kAmxRows rows: an amx::Operand, or what is like one, with `blocks` of kAmxSteps
// steps. After the last step a has zeros, b nothing that is not finite. kPassesBy: b is in L2, and leaves L1 first.
template <bool kPassesBy, typename Left, typename Between>
inline void multiply_in_tiles(int num_rows, int num_vectors, const Left& a, const bf16* b, int64_t b_stride,
                              int64_t blocks, float* out, int64_t out_stride, bool adds, const Between& between) {
  const auto run = [&](auto is_high, auto is_wide, int vector) {
    const amx::Operand right{b + vector * kLanes * 2, b_stride * 2, kAmxSteps * b_stride * 2};
    constexpr amx::Passing kPassing = kPassesBy ? amx::Passing::kRight : amx::Passing::kNothing;
    amx::multiply<is_high, is_wide, kPassing>(a, right, blocks, out + vector * kLanes, out_stride * 4, adds, between);
  };
  const std::true_type yes;
  const std::false_type no;
  int vector = 0;
  for (; vector + 2 <= num_vectors; vector += 2) num_rows > amx::kRows ? run(yes, yes, vector) : run(no, yes, vector);
  if (vector < num_vectors) num_rows > amx::kRows ? run(yes, no, vector) : run(no, no, vector);
}
#endif

// The same for any number of vectors, in parts of like size.
template <typename P>
inline void multiply_all(int num_rows, int num_vectors, const P* a, int64_t a_stride, const P* b, int64_t b_stride,
                         int num_steps, float* out, int64_t out_stride, const float* factors) {
#if defined(__AMX_BF16__)
  if constexpr (kUsesAmx<P>) {
    if (factors != nullptr) {
      for (int row = 0; row < num_rows; ++row) scale_row(out + row * out_stride, num_vectors, factors[row]);
    }
    const amx::Operand left{a, a_stride * 2, amx::kWords * 4};
    multiply_in_tiles<false>(num_rows, num_vectors, left, b, b_stride, divide_up(num_steps, kAmxSteps), out, out_stride,
                             factors != nullptr, [](int) {});
    return;
  }
#endif
  const int parts = (num_vectors + kVectors - 1) / kVectors;
  for (int part = 0; part < parts; ++part) {
    const int first = num_vectors * part / parts, count = num_vectors * (part + 1) / parts - first;
    kMultiply<P>[num_rows - 1][count - 1](a, a_stride, b + first* kLanes* kStep<P>, b_stride, num_steps,
                                          out + first* kLanes, out_stride, factors);
  }
}

// ---- softmax

// `x` in lanes [begin, end), elsewhere `other`.
inline Vec only_lanes(Vec x, int begin, int end, Vec other) {
  begin = std::clamp(begin, 0, kLanes);
  end = std::clamp(end, 0, kLanes);
#if defined(__AVX512F__)
  return _mm512_mask_blend_ps(first_lanes(end) & ~first_lanes(begin), other.v, x.v);
#else
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i is_in = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(begin), lane),
                                            _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
  return _mm256_blendv_ps(other.v, x.v, _mm256_castsi256_ps(is_in));
#endif
}

// 2^x for x up to kSlack to within 2 units in the last place; 2^-126 for x below -126, NaN for NaN. Cephes' polynomial.
inline Vec power_of_two(Vec x) {
  x = max(Vec(-126.0f), x);  // in this order NaN stays
  const Vec n = round_even(x), r = x - n;
  Vec p(1.535336188319500e-4f);
  p = fma(p, r, Vec(1.339887440266574e-3f));
  p = fma(p, r, Vec(9.618437357674640e-3f));
  p = fma(p, r, Vec(5.550332471162809e-2f));
  p = fma(p, r, Vec(2.402264791363012e-1f));
  p = fma(p, r, Vec(6.931472028550421e-1f));
  p = fma(p, r, Vec(1.0f));
  return scale_by_power(p, n);
}

inline float power_of_two(float x) {
  alignas(64) float lanes[kLanes];
  store(lanes, power_of_two(Vec(x)));
  return lanes[0];
}

// The weight of a key: 2^x for x up to kSlack, NaN for NaN. One that is rounded to bfloat16 is made to within 3e-6 of
// itself.
inline Vec weight_of(Vec x, float) { return power_of_two(x); }
#if defined(__AVX512BF16__)
inline Vec weight_of(Vec x, bf16) {
  const Vec r(_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));  // x - floor(x)
  Vec p(1.342668441e-2f);
  p = fma(p, r, Vec(5.224247390e-2f));
  p = fma(p, r, Vec(2.412802050e-1f));
  p = fma(p, r, Vec(6.930448449e-1f));
  p = fma(p, r, Vec(1.0f));
  return _mm512_scalef_ps(p.v, x.v);  // p 2^floor(x)
}
#endif

// To within some 1e-7: (1 - e) / (1 + e) with e = 2^(-2 |x| log2 e), a polynomial where that would cancel.
inline Vec tanh(Vec x) {
  const Vec zero, magnitude = max(zero - x, x);
  const Vec e = power_of_two(magnitude * Vec(-2.0f * kLog2E));
  const Vec square = x * x;
  Vec p(-5.70498872745e-3f);
  p = fma(p, square, Vec(2.06390887954e-2f));
  p = fma(p, square, Vec(-5.37397155531e-2f));
  p = fma(p, square, Vec(1.33314422036e-1f));
  p = fma(p, square, Vec(-3.33332819422e-1f));
  const Vec small = fma(p * square, x, x), large = (Vec(1.0f) - e) / (Vec(1.0f) + e);
#if defined(__AVX512F__)
  const __mmask16 is_small = _mm512_cmp_ps_mask(magnitude.v, _mm512_set1_ps(0.625f), _CMP_LT_OQ);
  const __m512 sign = _mm512_and_ps(x.v, _mm512_set1_ps(-0.0f));
  return _mm512_mask_blend_ps(is_small, _mm512_or_ps(large.v, sign), small.v);
#else
  const __m256 is_small = _mm256_cmp_ps(magnitude.v, _mm256_set1_ps(0.625f), _CMP_LT_OQ);
  const __m256 sign = _mm256_and_ps(x.v, _mm256_set1_ps(-0.0f));
  return _mm256_blendv_ps(_mm256_or_ps(large.v, sign), small.v, is_small);
#endif
}

struct Scoring {
  float scale;    // of a product
  float softcap;  // 0: none
};

// Weights are powers of two, relative to one of the row's scores: the first tile's maximum, and another one's only
// where that is higher by more than kSlack. So sums are hardly ever scaled, and no weight is above 2^kSlack
// (FlashAttention-4).
constexpr float kSlack = 8.0f;

// One query row's sums over the keys so far.
struct RowState {
  float reference = -kInfinity;
  float sum = 0.0f;
};

// Products of one row with a tile of keys to weights of its values, for keys [begin, end) of the tile; the others get
// 0. `slope` is taken for each token between query and key, `distance` that of the tile's first key (at most 0).
// Scales, one a key, are null where keys and values are not quantized. Returns the factor for what the row has summed
// up before.
template <typename P>
[[gnu::noinline]] float softmax_row(const float* products, P* weights, int begin, int end, const Scoring& scoring,
                                    float slope, float distance, const float* k_scales, const float* v_scales,
                                    RowState* state) {
  if (begin >= end) {
    std::memset(static_cast<void*>(weights), 0, kTileKeys * sizeof(P));
    return state->reference == -kInfinity ? 0.0f : 1.0f;
  }
  const bool is_edge = begin > 0 || end < kTileKeys;
  alignas(64) static const float kCount[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  // Where there is nothing but a scale, which is positive, it is applied in one rounding with the maximum's
  // subtraction.
  const bool is_plain = k_scales == nullptr && scoring.softcap == 0.0f && slope == 0.0f;
  const float unit = is_plain ? scoring.scale * kLog2E : 1.0f;  // of the scores below
  Vec scores[kKeyVectors], top(-kInfinity);
  for (int i = 0; i < kKeyVectors; ++i) {
    Vec x = load(products + i * kLanes);
    if (k_scales != nullptr) x = x * load(k_scales + i * kLanes);
    if (!is_plain) {
      if (scoring.softcap == 0.0f) {
        x = x * Vec(scoring.scale * kLog2E);
      } else {
        x = tanh(x * Vec(scoring.scale / scoring.softcap)) * Vec(scoring.softcap * kLog2E);
      }
      if (slope != 0.0f) x = fma(Vec(slope * kLog2E), load(kCount) + Vec(distance + static_cast<float>(i * kLanes)), x);
    }
    if (is_edge) x = only_lanes(x, begin - i * kLanes, end - i * kLanes, Vec(-kInfinity));
    top = max(top, x);
    scores[i] = x;
  }
  const float before = state->reference, highest = maximum(top) * unit,
              after = highest > before + kSlack ? highest : before;
  const float factor = before == -kInfinity ? 0.0f : before == after ? 1.0f : power_of_two(before - after);
  Vec total;
  for (int i = 0; i < kKeyVectors; ++i) {
    Vec weight = weight_of(fma(scores[i], Vec(unit), Vec(-after)), P{});
    if (is_edge) weight = only_lanes(weight, begin - i * kLanes, end - i * kLanes, Vec());
    total = total + weight;
    if (v_scales != nullptr) weight = weight * load(v_scales + i * kLanes);
    store(weights + i * kLanes, weight);
  }
  state->reference = after;
  state->sum = std::fma(state->sum, factor, sum(total));
  return factor;
}

}  // namespace pagoda::attention
