#include "decoder/decode_rows.h"

#include <algorithm>

namespace pagoda {

int64_t decode_rows(const SequenceColumns& columns, const int64_t* slots, int64_t count, int64_t block_size,
                    int64_t max_tokens, int64_t* rows, bool& all_greedy) {
  int64_t longest = 0;
  all_greedy = true;
  for (int64_t row = 0; row < count; ++row) {
    const int64_t slot = slots[row];
    if (slot < 0 || slot >= columns.num_slots || !columns.is_in_use[slot]) return -1;
    const int64_t length = columns.num_tokens[slot], position = columns.num_computed[slot];
    if (position + 1 != length || length > columns.num_blocks[slot] * block_size || length >= max_tokens) return -1;
    const int64_t block = columns.block_table[slot * columns.table_stride + position / block_size];
    rows[row] = length;
    rows[count + row] = position;
    rows[2 * count + row] = columns.tokens[slot * columns.tokens_stride + position];
    rows[3 * count + row] = block * block_size + position % block_size;
    longest = std::max(longest, length);
    all_greedy &= columns.is_greedy[slot];
  }
  return (longest + block_size - 1) / block_size;
}

void append_rows(const int64_t* slots, int64_t count, const int64_t* token_ids, int64_t* num_tokens,
                 int64_t* num_computed, int32_t* tokens, int64_t tokens_stride) {
  for (int64_t row = 0; row < count; ++row) {
    const int64_t slot = slots[row], length = num_tokens[slot];
    num_computed[slot] = length;
    tokens[slot * tokens_stride + length] = static_cast<int32_t>(token_ids[row]);
    num_tokens[slot] = length + 1;
  }
}

}  // namespace pagoda
