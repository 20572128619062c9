#include "recurrent/state_space_scan.h"

#include <algorithm>
#include <cmath>

#include "simd/vec.h"
#include "threads/parallel.h"

namespace pagoda {
namespace {

constexpr int kVectors = 4;                // of a row of the state, whose sums stay in registers while all rows pass by
constexpr int64_t kGrainValues = 1 << 14;  // of a state, that are worth a thread
constexpr float kLinear = 20.0f;           // from here on softplus(x) is x

float softplus(float x) { return x > kLinear ? x : std::log1p(std::exp(x)); }

// Columns [column, column + count vectors) of one head's state [state_size, head_dim], whose last vector has `rest`
// lanes.
template <int kCount>
void advance(float* state, int64_t state_size, int64_t stride, int rest, float decay, float step, float skip,
             const float* x, const float* b, const float* c, float* out) {
  const auto get = [&](const float* from, int i) {
    return i + 1 < kCount || rest == kLanes ? load(from + i * kLanes) : load(from + i * kLanes, rest);
  };
  const auto put = [&](float* to, int i, Vec value) {
    i + 1 < kCount || rest == kLanes ? store(to + i * kLanes, value) : store(to + i * kLanes, value, rest);
  };
  Vec input[kCount], sums[kCount];
  const Vec factor(decay);
  for (int i = 0; i < kCount; ++i) {
    const Vec value = get(x, i);
    input[i] = value * Vec(step);
    sums[i] = value * Vec(skip);
  }
  for (int64_t n = 0; n < state_size; ++n) {
    const Vec weight(b[n]), asked(c[n]);
    for (int i = 0; i < kCount; ++i) {
      const Vec now = fma(weight, input[i], get(state + n * stride, i) * factor);
      put(state + n * stride, i, now);
      sums[i] = fma(now, asked, sums[i]);
    }
  }
  for (int i = 0; i < kCount; ++i) put(out, i, sums[i]);
}

// One sequence's tokens in one head.
void run(const StateSpaceScan& scan, int64_t seq, int64_t head) {
  const int64_t head_dim = scan.head_dim, state_size = scan.state_size, size = head_dim * state_size;
  const int64_t group = head / (scan.num_heads / scan.num_groups);
  const auto state_of = [&](int64_t row) { return scan.states + (row * scan.num_heads + head) * size; };
  float* state = state_of(scan.rows[seq]);
  const float rate = -std::exp(scan.decay_log[head]), bias = scan.step_bias[head], skip = scan.skip[head];
  for (int64_t token = scan.starts[seq]; token < scan.starts[seq + 1]; ++token) {
    const int64_t place = token * scan.num_heads + head;
    const float step = std::min(std::max(softplus(scan.step[place] + bias), scan.min_step), scan.max_step);
    const float decay = std::exp(rate * step);
    const float* x = scan.x + place * head_dim;
    const float* b = scan.b + (token * scan.num_groups + group) * state_size;
    const float* c = scan.c + (token * scan.num_groups + group) * state_size;
    float* out = scan.out + place * head_dim;
    for (int64_t column = 0; column < head_dim; column += kVectors * kLanes) {
      const auto left = static_cast<int>(std::min<int64_t>(head_dim - column, kVectors * kLanes));
      const int count = (left + kLanes - 1) / kLanes, rest = left - (count - 1) * kLanes;
      const auto call = [&](auto function) {
        function(state + column, state_size, head_dim, rest, decay, step, skip, x + column, b, c, out + column);
      };
      switch (count) {
        case 1:
          call(advance<1>);
          break;
        case 2:
          call(advance<2>);
          break;
        case 3:
          call(advance<3>);
          break;
        default:
          call(advance<kVectors>);
      }
    }
    if (scan.kept != nullptr && scan.kept[token] >= 0) std::copy_n(state, size, state_of(scan.kept[token]));
  }
}

}  // namespace

void state_space_scan(const StateSpaceScan& scan, int num_threads) {
  const int64_t grain = std::max<int64_t>(1, kGrainValues / (scan.head_dim * scan.state_size));
  parallel_for(scan.num_seqs * scan.num_heads, grain, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(scan, i / scan.num_heads, i % scan.num_heads);
  });
}

}  // namespace pagoda
