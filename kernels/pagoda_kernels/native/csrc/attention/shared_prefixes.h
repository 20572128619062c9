// Finds sequences of a batch whose block tables begin alike. Knows tables and lengths; nothing of tasks or sums.
#pragma once

#include <cstdint>
#include <vector>

#include "ops.h"

namespace pagoda::attention {

// A sequence that may share up to `num_keys` of its first keys, whole tiles.
struct Candidate {
  int64_t seq, num_keys;
};

// Two sequences or more whose first `num_keys` keys, whole tiles, lie in the same blocks.
struct SharedPrefix {
  std::vector<int64_t> seqs;
  int64_t num_keys;
};

// Groups of the candidates, each in one at most, that leave the fewest keys to be read more than once.
std::vector<SharedPrefix> find_shared_prefixes(const AttentionBatch& batch, std::vector<Candidate> candidates);

}  // namespace pagoda::attention
