// The layers of a decoder one after the other, from the kernels of ops.h: what they compute, they compute alike.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "experts/experts.h"
#include "linear/linear_weights.h"
#include "linear/lora.h"

namespace pagoda {

// x += attention(norm(x)); x += down(activation(gate(norm(x))) * up(norm(x))), or x += mixture(norm(x)).
struct DecoderLayer {
  const bf16 *attention_norm, *mlp_norm;
  float eps, weight_offset;
  HeadNorms<bf16> head_norms;
  LinearWeights qkv, output, gate_up, down;  // of a mixture, the last two are of no use
  Activation activation;
  const Mixture* mixture = nullptr;
  int rotation;  // index into DecoderBatch::rotations; -1: none
  bool is_interleaved;
  float scale, softcap;  // of attention; softcap 0: none
  int64_t window;        // 0: all
  bf16 *k_cache, *v_cache;
  int group;  // index into DecoderBatch::groups
};

struct Rotation {
  const float *cos, *sin;  // [num_tokens, half]
  int half;
};

// Logits of the last hidden state: its norm, then a matrix.
struct DecoderHead {
  const bf16* norm;
  float eps, weight_offset;
  LinearWeights linear;
};

// Where a group of layers has its keys and values.
struct CacheGroup {
  const int64_t* slot_mapping;  // [num_tokens]
  const int32_t* block_table;
  int64_t table_stride;
};

// Adapters of some tokens.
struct DecoderAdapters {
  static constexpr int kMatrices = 4;  // of a layer: qkv, output, gate_up, down
  LoraRows rows;
  LoraTable table;        // of the first place
  const int64_t* places;  // [num_layers, kMatrices] which `num_parts` lines of a group are of each matrix; -1: none
};

struct DecoderBatch {
  int64_t num_tokens;
  std::vector<CacheGroup> groups;
  AttentionBatch attention;         // all but what a layer says itself
  const int64_t* wanted = nullptr;  // last tokens of each sequence whose hidden states are wanted; null: all
  CacheLayout cache;
  std::vector<Rotation> rotations;
  const DecoderAdapters* adapters = nullptr;  // null: no token has one
};

// Numbers of bfloat16 that `decoder_layers` needs for a batch beside x.
int64_t decoder_scratch_size(const std::vector<DecoderLayer>& layers, const DecoderBatch& batch);

// x: [num_tokens, hidden_size], in place. Of tokens that are not wanted, the last layer computes keys and values alone,
// and their rows of x hold anything.
void decoder_layers(const std::vector<DecoderLayer>& layers, DecoderBatch& batch, bf16* x, bf16* scratch,
                    const Team& team);

// Numbers of bfloat16 that `decoder_logits` needs.
int64_t head_scratch_size(const DecoderHead& head, int64_t num_rows);

// logits [num_rows, num_outputs] of some rows of x [num_tokens, hidden_size]; values and indices [num_rows]: argmax.
void decoder_logits(const DecoderHead& head, const bf16* x, const int64_t* rows, int64_t num_rows, bf16* scratch,
                    float* logits, float* values, int64_t* indices, const Team& team);

// out[i] = table[rows[i]], rows of `size`.
template <typename T>
void gather(const T* table, const int64_t* rows, int64_t num_rows, int64_t size, T* out) {
  for (int64_t i = 0; i < num_rows; ++i) std::memcpy(out + i * size, table + rows[i] * size, size * sizeof(T));
}

}  // namespace pagoda
