// Vectors of float32 over AVX-512 or AVX2, and bfloat16 in memory. One source for both: kLanes differs.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace pagoda {

// A bfloat16 in memory: the upper half of a float32.
struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &wide, sizeof(result));
  return result;
}

// Rounded to nearest, ties to even; NaN stays NaN.
inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    out->bits = static_cast<uint16_t>((bits >> 16) | 0x40u);
  } else {
    out->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

#if defined(__AVX512F__)

constexpr int kLanes = 16;

struct Vec {
  __m512 v;
  Vec() : v(_mm512_setzero_ps()) {}
  Vec(__m512 x) : v(x) {}
  explicit Vec(float x) : v(_mm512_set1_ps(x)) {}
};

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const bf16* p) {
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
// The first n lanes; zeros after them.
inline Vec load(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline Vec load(const bf16* p, int n) {
  __m256i half = _mm256_maskz_loadu_epi16(first_lanes(n), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
inline void store(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }

inline __m256i round_to_bf16(__m512 x) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0)));
#endif
}
inline void store(bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_to_bf16(x.v)); }
inline void store(bf16* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), round_to_bf16(x.v)); }

inline Vec operator+(Vec a, Vec b) { return _mm512_add_ps(a.v, b.v); }
inline Vec operator-(Vec a, Vec b) { return _mm512_sub_ps(a.v, b.v); }
inline Vec operator*(Vec a, Vec b) { return _mm512_mul_ps(a.v, b.v); }
inline Vec operator/(Vec a, Vec b) { return _mm512_div_ps(a.v, b.v); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a.v, b.v); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a.v, b.v); }
inline float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
inline float maximum(Vec a) { return _mm512_reduce_max_ps(a.v); }
inline Vec round_even(Vec a) { return _mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x * 2^n for whole n.
inline Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x.v, n.v); }

#else

constexpr int kLanes = 8;

struct Vec {
  __m256 v;
  Vec() : v(_mm256_setzero_ps()) {}
  Vec(__m256 x) : v(x) {}
  explicit Vec(float x) : v(_mm256_set1_ps(x)) {}
};

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const bf16* p) {
  __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
template <typename T>
inline Vec load(const T* p, int n) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x.v); }
inline void store(bf16* p, Vec x) {
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i even = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));  // a NaN stays one
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(even, quiet, is_nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
template <typename T>
inline void store(T* p, Vec x, int n) {
  T buffer[kLanes];
  store(buffer, x);
  std::memcpy(p, buffer, n * sizeof(T));
}

inline Vec operator+(Vec a, Vec b) { return _mm256_add_ps(a.v, b.v); }
inline Vec operator-(Vec a, Vec b) { return _mm256_sub_ps(a.v, b.v); }
inline Vec operator*(Vec a, Vec b) { return _mm256_mul_ps(a.v, b.v); }
inline Vec operator/(Vec a, Vec b) { return _mm256_div_ps(a.v, b.v); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a.v, b.v, c.v); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a.v, b.v); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a.v, b.v); }
inline float sum(Vec a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline float maximum(Vec a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline Vec round_even(Vec a) { return _mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec scale_by_power(Vec x, Vec n) {
  __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x.v, _mm256_castsi256_ps(power));
}

#endif

// e^x to within 2 units in the last place for x in [-87, 88]; below, 0 or next to it. Cephes' polynomial.
inline Vec exp(Vec x) {
  x = max(min(x, Vec(88.0f)), Vec(-87.3f));
  Vec n = round_even(x * Vec(1.44269504088896341f));
  Vec r = fma(n, Vec(-0.693359375f), x);
  r = fma(n, Vec(2.12194440e-4f), r);
  Vec p(1.9875691500e-4f);
  p = fma(p, r, Vec(1.3981999507e-3f));
  p = fma(p, r, Vec(8.3334519073e-3f));
  p = fma(p, r, Vec(4.1665795894e-2f));
  p = fma(p, r, Vec(1.6666665459e-1f));
  p = fma(p, r, Vec(5.0000001201e-1f));
  p = fma(p, r * r, r + Vec(1.0f));
  return scale_by_power(p, n);
}

}  // namespace pagoda
