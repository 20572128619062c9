// What a step reads and writes that decodes the last known token of each sequence.
#pragma once

#include <cstdint>

namespace pagoda {

// Indexed by slot; see pagoda_kernels/decoder/decode_rows.py.
struct SequenceColumns {
  int64_t num_slots;
  const bool *is_in_use, *is_greedy;
  const int64_t *num_tokens, *num_computed, *num_blocks;
  const int32_t* tokens;
  int64_t tokens_stride;
  const int32_t* block_table;
  int64_t table_stride;
};

// rows [4, count]: lengths, positions, token ids, slots of the cache. The blocks of the longest sequence, or -1: some
// sequence has not exactly one token to compute, or no room for it.
int64_t decode_rows(const SequenceColumns& columns, const int64_t* slots, int64_t count, int64_t block_size,
                    int64_t max_tokens, int64_t* rows, bool& all_greedy);

// Each sequence's tokens are computed, and one more comes after them.
void append_rows(const int64_t* slots, int64_t count, const int64_t* token_ids, int64_t* num_tokens,
                 int64_t* num_computed, int32_t* tokens, int64_t tokens_stride);

}  // namespace pagoda
