#include "ops.h"
#include "parallel.h"
#include "vec.h"

namespace pagoda {
namespace {

inline Vec sigmoid(Vec x) { return Vec(1.0f) / (Vec(1.0f) + exp(Vec() - x)); }

struct Silu {
  Vec operator()(Vec x) const { return x * sigmoid(x); }
};

struct QuickGelu {
  Vec operator()(Vec x) const { return x * sigmoid(x * Vec(1.702f)); }
};

// x / 2 * (1 + tanh(u)) is x * sigmoid(2 u).
struct GeluTanh {
  Vec operator()(Vec x) const {
    const Vec cubed = fma(x * x, x * Vec(0.044715f), x);
    return x * sigmoid(cubed * Vec(1.5957691216057308f));
  }
};

// x / 2 * erfc(-x / sqrt(2)); erfc(z) is t * exp(-z^2) * p(t) with t = 1 / (1 + 0.3 z), p fitted to 2e-8 for z to 10.
struct Gelu {
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
    // Behind zero all but the tail remains of x, before it the tail; max(0, x) - |x| * tail is both.
    return max(Vec(), x) - size * half_tail;
  }
};

// The second operand of max is the one that a NaN comes through.
struct Relu {
  Vec operator()(Vec x) const { return max(Vec(), x); }
};

struct ReluSquared {
  Vec operator()(Vec x) const {
    const Vec kept = max(Vec(), x);
    return kept * kept;
  }
};

template <typename T, typename Act>
void rows(const T* x, int64_t x_stride, T* out, int64_t num_rows, int64_t size, int num_threads, const Act& act) {
  const int64_t whole = size / kLanes * kLanes;
  const int rest = static_cast<int>(size - whole);
  const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(size, 1));
  parallel_for(num_rows, grain, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = x + row * x_stride;
      const T* up = gate + size;
      T* to = out + row * size;
      for (int64_t i = 0; i < whole; i += kLanes) store(to + i, act(load(gate + i)) * load(up + i));
      if (rest) store(to + whole, act(load(gate + whole, rest)) * load(up + whole, rest), rest);
    }
  });
}

}  // namespace

template <typename T>
void act_and_mul(const T* x, int64_t x_stride, T* out, int64_t num_rows, int64_t size, Activation activation,
                 int num_threads) {
  const auto run = [&](const auto& act) { rows(x, x_stride, out, num_rows, size, num_threads, act); };
  switch (activation) {
    case Activation::kSilu:
      return run(Silu{});
    case Activation::kGelu:
      return run(Gelu{});
    case Activation::kGeluTanh:
      return run(GeluTanh{});
    case Activation::kQuickGelu:
      return run(QuickGelu{});
    case Activation::kRelu:
      return run(Relu{});
    case Activation::kReluSquared:
      return run(ReluSquared{});
  }
}

template void act_and_mul(const float*, int64_t, float*, int64_t, int64_t, Activation, int);
template void act_and_mul(const bf16*, int64_t, bf16*, int64_t, int64_t, Activation, int);

}  // namespace pagoda
