// The scan of a state space with one decay a head; see pagoda_kernels/recurrent/state_space_scan.py.
#pragma once

#include <cstdint>

namespace pagoda {

struct StateSpaceScan {
  int64_t num_seqs, num_heads, num_groups, head_dim, state_size;
  const int64_t* starts;  // [num_seqs + 1] first token of each sequence
  const int64_t* rows;    // [num_seqs] of the states
  const int64_t* kept;    // [num_tokens] further rows, or -1; or null
  const float *x, *b, *c;
  const float *step, *step_bias, *decay_log, *skip;
  float min_step, max_step;
  float* states;  // [rows, num_heads, state_size, head_dim]
  float* out;     // [num_tokens, num_heads, head_dim]
};

void state_space_scan(const StateSpaceScan& scan, int num_threads);

}  // namespace pagoda
