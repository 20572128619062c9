// Functions that are exact enough for results in bfloat16, whose last place is 4e-3 of a number, and no more.
#pragma once

#include "simd/vec.h"

namespace pagoda {

#if defined(__AVX512F__)

// 2^x to within 2e-4 of itself; 0 far below zero. A fit of the third degree.
inline Vec rough_exp2(Vec x) {
  const Vec n = round_even(x), r = x - n;
  Vec p(0.05517166f);
  p = fma(p, r, Vec(0.24261112f));
  p = fma(p, r, Vec(0.69326099f));
  p = fma(p, r, Vec(0.99992807f));
  return scale_by_power(p, n);
}

// Gelu (simd/activations.h) to within 1e-3 of itself: erfc(z) is t * exp(-z^2) * p(t) with t = 1 / (1 + 0.55 z), p
// fitted to 6e-5 for z to 13. The second operand of min and max is the one that a NaN comes through.
struct RoughGelu {
  Vec operator()(Vec x) const {
    const Vec size = max(x, Vec() - x);
    const Vec z = min(Vec(13.0f), size * Vec(0.70710678f));
    const Vec t(_mm512_rcp14_ps(fma(z, Vec(0.55f), Vec(1.0f)).v));
    Vec p(-0.17494983f);
    p = fma(p, t, Vec(0.33501755f));
    p = fma(p, t, Vec(0.2131209f));
    p = fma(p, t, Vec(0.31671735f));
    p = fma(p, t, Vec(0.31003738f));
    const Vec half_tail = p * t * rough_exp2(z * z * Vec(-1.44269504f)) * Vec(0.5f);
    return max(Vec(), x) - size * half_tail;
  }
};

#endif

}  // namespace pagoda
