// The gated delta rule of a ragged batch; see pagoda_kernels/recurrent/gated_delta_rule.py.
#pragma once

#include <cstdint>

namespace pagoda {

struct DeltaRule {
  int64_t num_seqs, num_key_heads, num_value_heads, key_dim, value_dim;
  const int64_t* starts;  // [num_seqs + 1] first token of each sequence
  const int64_t* rows;    // [num_seqs] of the states
  const int64_t* kept;    // [num_tokens] further rows, or -1; or null
  const float *query, *key, *value, *decay, *beta;
  float* states;  // [rows, num_value_heads, key_dim, value_dim]
  float* out;     // [num_tokens, num_value_heads, value_dim]
};

void gated_delta_rule(const DeltaRule& rule, int num_threads);

}  // namespace pagoda
