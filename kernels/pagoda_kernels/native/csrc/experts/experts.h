// A mixture of experts: every expert's matrices are read once a step, for all tokens that chose it.
#pragma once

#include <vector>

#include "linear/linear_weights.h"

namespace pagoda {

struct Mixture;

#if defined(__AVX512BF16__)

// down(activation(gate(x)) * up(x)); gate_up has both, one after the other.
struct Expert {
  LinearWeights gate_up, down;
};

enum class Scoring { kSoftmax, kSigmoid, kTopSigmoid };

// How a router chooses; as Routing in moe/route_tokens.py.
struct Routing {
  int64_t top_k;
  Scoring scoring;
  bool is_normalized;
  float norm_min, norm_added, scale;
  int64_t num_groups, top_groups;
  bool groups_by_two;       // by the sum of a group's two highest scores
  const float* correction;  // [num_experts] or null
};

struct Experts {
  std::vector<Expert> experts;
  Activation activation;
  bool scales_input;  // a weight is on what goes into its expert
};

// A layer's: router, experts, and one that sees every token, if there is one.
struct Mixture {
  LinearWeights router;
  Routing routing;
  const Experts* experts;
  const Expert* shared;              // or null
  const LinearWeights* shared_gate;  // [1, hidden_size], or null
};

// weights and chosen: [num_tokens, top_k]. Of equal scores the expert with the lower number comes first.
void route(const float* logits, int64_t num_tokens, int64_t num_experts, const Routing& routing, float* weights,
           int64_t* chosen);

// Tokens and what they chose.
struct Choices {
  int64_t num_tokens, top_k;
  const int64_t* chosen;  // [num_tokens, top_k]
  const float* weights;   // the same
};

// What is added to the experts' sum; each may be null.
struct Extra {
  const bf16 *residual, *shared;  // [num_tokens, hidden_size]
  const float* shared_scale;      // [num_tokens], on `shared`
};

// What an expert gives is rounded to bfloat16; the weighted sum is taken in float32, in the order of a token's choices,
// with `extra`, and rounded once. A token's result depends on that token alone. `out` may be the residual.
void experts(const Experts& experts, const bf16* x, const Choices& choices, const Extra& extra, bf16* out,
             const Team& team);

// All of a mixture: out = residual + mixture(x), [num_tokens, hidden_size]; residual may be null, or out itself.
void mixture(const Mixture& mixture, const bf16* x, const bf16* residual, bf16* out, int64_t num_tokens,
             const Team& team);

#endif

}  // namespace pagoda
