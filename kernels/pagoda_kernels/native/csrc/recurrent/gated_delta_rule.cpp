#include "recurrent/gated_delta_rule.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd/vec.h"
#include "threads/parallel.h"

namespace pagoda {
namespace {

constexpr float kNormEps = 1e-6f;
constexpr int kVectors = 4;                // of a row of the state, that stay in registers while all rows pass by
constexpr int64_t kGrainValues = 1 << 14;  // of a state, that are worth a thread

// to = from / sqrt(sum(from^2) + eps) * factor.
void to_length(const float* from, float factor, int64_t size, float* to) {
  Vec squares;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) squares = fma(load(from + i), load(from + i), squares);
  if (i < size) {
    const Vec rest = load(from + i, static_cast<int>(size - i));
    squares = fma(rest, rest, squares);
  }
  const float scale = factor / std::sqrt(sum(squares) + kNormEps);
  for (i = 0; i < size; ++i) to[i] = from[i] * scale;
}

// Columns [column, column + count vectors) of one head's state [key_dim, value_dim], whose last vector has `rest`
// lanes.
template <int kCount>
void step(float* state, int64_t key_dim, int64_t stride, int rest, float decay, float beta, const float* query,
          const float* key, const float* value, float* out) {
  const auto get = [&](const float* from, int i) {
    return i + 1 < kCount || rest == kLanes ? load(from + i * kLanes) : load(from + i * kLanes, rest);
  };
  const auto put = [&](float* to, int i, Vec x) {
    i + 1 < kCount || rest == kLanes ? store(to + i * kLanes, x) : store(to + i * kLanes, x, rest);
  };
  Vec recalled[kCount], change[kCount], sums[kCount];
  const Vec factor(decay);
  for (int64_t k = 0; k < key_dim; ++k) {
    const Vec weight(key[k] * decay);
    for (int i = 0; i < kCount; ++i) recalled[i] = fma(get(state + k * stride, i), weight, recalled[i]);
  }
  for (int i = 0; i < kCount; ++i) change[i] = (get(value, i) - recalled[i]) * Vec(beta);
  for (int64_t k = 0; k < key_dim; ++k) {
    const Vec weight(key[k]), asked(query[k]);
    for (int i = 0; i < kCount; ++i) {
      const Vec now = fma(weight, change[i], get(state + k * stride, i) * factor);
      put(state + k * stride, i, now);
      sums[i] = fma(now, asked, sums[i]);
    }
  }
  for (int i = 0; i < kCount; ++i) put(out, i, sums[i]);
}

// One sequence's tokens in one value head.
void run(const DeltaRule& rule, int64_t seq, int64_t head, float* query, float* key) {
  const int64_t key_dim = rule.key_dim, value_dim = rule.value_dim, size = key_dim * value_dim;
  const int64_t key_head = head / (rule.num_value_heads / rule.num_key_heads);
  const auto state_of = [&](int64_t row) { return rule.states + (row * rule.num_value_heads + head) * size; };
  float* state = state_of(rule.rows[seq]);
  const float scale = 1.0f / std::sqrt(static_cast<float>(key_dim));
  for (int64_t token = rule.starts[seq]; token < rule.starts[seq + 1]; ++token) {
    to_length(rule.query + (token * rule.num_key_heads + key_head) * key_dim, scale, key_dim, query);
    to_length(rule.key + (token * rule.num_key_heads + key_head) * key_dim, 1.0f, key_dim, key);
    const int64_t place = token * rule.num_value_heads + head;
    const float decay = std::exp(rule.decay[place]), beta = rule.beta[place];
    const float* value = rule.value + place * value_dim;
    float* out = rule.out + place * value_dim;
    for (int64_t column = 0; column < value_dim; column += kVectors * kLanes) {
      const auto left = static_cast<int>(std::min<int64_t>(value_dim - column, kVectors * kLanes));
      const int count = (left + kLanes - 1) / kLanes, rest = left - (count - 1) * kLanes;
      const auto call = [&](auto function) {
        function(state + column, key_dim, value_dim, rest, decay, beta, query, key, value + column, out + column);
      };
      switch (count) {
        case 1:
          call(step<1>);
          break;
        case 2:
          call(step<2>);
          break;
        case 3:
          call(step<3>);
          break;
        default:
          call(step<kVectors>);
      }
    }
    if (rule.kept != nullptr && rule.kept[token] >= 0) std::copy_n(state, size, state_of(rule.kept[token]));
  }
}

}  // namespace

void gated_delta_rule(const DeltaRule& rule, int num_threads) {
  const int64_t heads = rule.num_value_heads;
  const int64_t grain = std::max<int64_t>(1, kGrainValues / (rule.key_dim * rule.value_dim));
  parallel_for(rule.num_seqs * heads, grain, num_threads, [&](int64_t begin, int64_t end) {
    std::vector<float> query(rule.key_dim), key(rule.key_dim);
    for (int64_t i = begin; i < end; ++i) run(rule, i / heads, i % heads, query.data(), key.data());
  });
}

}  // namespace pagoda
