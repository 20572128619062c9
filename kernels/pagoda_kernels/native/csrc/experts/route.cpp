#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "experts/experts.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace {

float sigmoid_of(float x) { return 1.0f / (1.0f + std::exp(-x)); }

void score(const float* logits, int64_t count, Scoring scoring, float* scores) {
  if (scoring == Scoring::kTopSigmoid) {
    std::copy_n(logits, count, scores);
  } else if (scoring == Scoring::kSigmoid) {
    std::transform(logits, logits + count, scores, sigmoid_of);
  } else {
    const float most = *std::max_element(logits, logits + count);
    std::transform(logits, logits + count, scores, [most](float x) { return std::exp(x - most); });
    const float total = std::accumulate(scores, scores + count, 0.0f);
    for (int64_t i = 0; i < count; ++i) scores[i] /= total;
  }
}

// Numbers of the `count` highest values, the highest first; a NaN counts as the highest.
void top(const float* values, int64_t size, int64_t count, int64_t* numbers, std::vector<int64_t>& order) {
  order.resize(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  const auto is_before = [values](int64_t a, int64_t b) {
    const bool a_is_nan = std::isnan(values[a]), b_is_nan = std::isnan(values[b]);
    if (a_is_nan || b_is_nan) return a_is_nan != b_is_nan ? a_is_nan : a < b;
    return values[a] != values[b] ? values[a] > values[b] : a < b;
  };
  std::partial_sort(order.begin(), order.begin() + count, order.end(), is_before);
  std::copy_n(order.begin(), count, numbers);
}

// -inf for experts outside of the groups that a token may go to.
void leave_groups(const Routing& routing, int64_t num_experts, float* choice, std::vector<int64_t>& order) {
  const int64_t size = num_experts / routing.num_groups;
  std::vector<float> of_groups(static_cast<size_t>(routing.num_groups));
  for (int64_t group = 0; group < routing.num_groups; ++group) {
    std::array<float, 2> most;
    most.fill(-std::numeric_limits<float>::infinity());
    for (const float* at = choice + group * size; at < choice + (group + 1) * size; ++at) {
      if (*at > most[0]) {
        most = {*at, most[0]};
      } else {
        most[1] = std::max(most[1], *at);
      }
    }
    of_groups[group] = routing.groups_by_two && size > 1 ? most[0] + most[1] : most[0];
  }
  std::vector<int64_t> kept(static_cast<size_t>(routing.top_groups));
  top(of_groups.data(), routing.num_groups, routing.top_groups, kept.data(), order);
  for (int64_t group = 0; group < routing.num_groups; ++group) {
    if (std::find(kept.begin(), kept.end(), group) != kept.end()) continue;
    std::fill_n(choice + group * size, size, -std::numeric_limits<float>::infinity());
  }
}

}  // namespace

void route(const float* logits, int64_t num_tokens, int64_t num_experts, const Routing& routing, float* weights,
           int64_t* chosen) {
  std::vector<float> scores(static_cast<size_t>(num_experts)), choice(static_cast<size_t>(num_experts));
  std::vector<int64_t> order;
  const int64_t top_k = routing.top_k;
  for (int64_t token = 0; token < num_tokens; ++token, weights += top_k, chosen += top_k) {
    score(logits + token * num_experts, num_experts, routing.scoring, scores.data());
    for (int64_t i = 0; i < num_experts; ++i)
      choice[i] = scores[i] + (routing.correction ? routing.correction[i] : 0.0f);
    if (routing.num_groups > 1) leave_groups(routing, num_experts, choice.data(), order);
    top(choice.data(), num_experts, top_k, chosen, order);
    float total = 0.0f;
    for (int64_t i = 0; i < top_k; ++i) {
      weights[i] = scores[chosen[i]];
      if (routing.scoring == Scoring::kTopSigmoid) weights[i] = sigmoid_of(weights[i]);
      total += weights[i];
    }
    const float factor =
        routing.scale /
        (routing.is_normalized ? std::max({total + routing.norm_added, routing.norm_min, 1e-20f}) : 1.0f);
    for (int64_t i = 0; i < top_k; ++i) weights[i] *= factor;
  }
}

#endif

}  // namespace pagoda
