// Activations of gated feed-forward layers, in float32.
#pragma once

#include "ops.h"
#include "simd/vec.h"

namespace pagoda {

inline Vec sigmoid(Vec x) { return Vec(1.0f) / (Vec(1.0f) + exp(Vec() - x)); }

// What most do with the other factor: nothing.
struct PlainUp {
  Vec up(Vec x) const { return x; }
};

struct Silu : PlainUp {
  Vec operator()(Vec x) const { return x * sigmoid(x); }
};

struct QuickGelu : PlainUp {
  Vec operator()(Vec x) const { return x * sigmoid(x * Vec(1.702f)); }
};

// x / 2 * (1 + tanh(u)) is x * sigmoid(2 u).
struct GeluTanh : PlainUp {
  Vec operator()(Vec x) const {
    const Vec cubed = fma(x * x, x * Vec(0.044715f), x);
    return x * sigmoid(cubed * Vec(1.5957691216057308f));
  }
};

// x / 2 * erfc(-x / sqrt(2)); erfc(z) is t * exp(-z^2) * p(t) with t = 1 / (1 + 0.3 z), p fitted to 2e-8 for z to 10.
struct Gelu : PlainUp {
  Vec operator()(Vec x) const {
    const Vec size = max(x, Vec() - x);
    const Vec z = size * Vec(0.70710678118654752f);
    const Vec t = Vec(1.0f) / fma(z, Vec(0.3f), Vec(1.0f));
    Vec p(-1.295236347e-01f);
    p = fma(p, t, Vec(4.855668565e-01f));
    p = fma(p, t, Vec(-5.122858448e-01f));
    p = fma(p, t, Vec(5.477291815e-01f));
    p = fma(p, t, Vec(-9.465726187e-02f));
    p = fma(p, t, Vec(2.149289424e-01f));
    p = fma(p, t, Vec(1.483384046e-01f));
    p = fma(p, t, Vec(1.707153385e-01f));
    p = fma(p, t, Vec(1.691879984e-01f));
    const Vec half_tail = p * t * exp(Vec() - z * z) * Vec(0.5f);
    // Above zero all but the tail remains of x, below it the tail; max(0, x) - |x| * tail is both.
    return max(Vec(), x) - size * half_tail;
  }
};

// The second operand of max is the one that a NaN comes through.
struct Relu : PlainUp {
  Vec operator()(Vec x) const { return max(Vec(), x); }
};

struct ReluSquared : PlainUp {
  Vec operator()(Vec x) const {
    const Vec kept = max(Vec(), x);
    return kept * kept;
  }
};

// g * sigmoid(alpha * g) with g = min(gate, limit), times clamp(up, -limit, limit) + up_offset. The second operand of
// min and max is the one that a NaN comes through.
struct ClampedSwiglu {
  float limit, alpha, up_offset;
  Vec operator()(Vec x) const {
    const Vec gate = min(Vec(limit), x);
    return gate * sigmoid(gate * Vec(alpha));
  }
  Vec up(Vec x) const { return max(Vec(-limit), min(Vec(limit), x)) + Vec(up_offset); }
};

// body(activation as one of the above)
template <typename Body>
void with_activation(const Activation& activation, const Body& body) {
  switch (activation.kind) {
    case ActivationKind::kSilu:
      return body(Silu{});
    case ActivationKind::kGelu:
      return body(Gelu{});
    case ActivationKind::kGeluTanh:
      return body(GeluTanh{});
    case ActivationKind::kQuickGelu:
      return body(QuickGelu{});
    case ActivationKind::kRelu:
      return body(Relu{});
    case ActivationKind::kReluSquared:
      return body(ReluSquared{});
    case ActivationKind::kClampedSwiglu:
      return body(ClampedSwiglu{activation.limit, activation.alpha, activation.up_offset});
  }
}

}  // namespace pagoda
