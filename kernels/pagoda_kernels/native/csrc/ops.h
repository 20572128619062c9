// The kernels: plain pointers in, nothing of torch. T is float or bf16; strides and sizes count elements.
#pragma once

#include <cstdint>

#include "simd/vec.h"

namespace pagoda {

class Helpers;

enum class ActivationKind { kSilu, kGelu, kGeluTanh, kQuickGelu, kRelu, kReluSquared, kClampedSwiglu };

// What a gated layer computes of gate and up: activation(gate) * up; of kClampedSwiglu as ClampedSwiglu in
// activations.h, which alone reads the numbers.
struct Activation {
  ActivationKind kind = ActivationKind::kSilu;
  float limit = 0.0f, alpha = 1.0f, up_offset = 0.0f;
};

// out[row] = activation(x[row][:size]) * x[row][size:]; rows of 2 * `size`, out contiguous.
template <typename T>
void act_and_mul(const T* x, int64_t x_stride, T* out, int64_t num_rows, int64_t size, Activation activation,
                 int num_threads);

// out = activation(x) of `size` numbers; x and out may be the same.
template <typename T>
void activate(const T* x, T* out, int64_t size, Activation activation, int num_threads);

// The greatest value of each row, a NaN if there is one, and its first index.
void argmax(const float* x, int64_t x_stride, float* values, int64_t* indices, int64_t num_rows, int64_t size,
            int num_threads);

// A packed weight in 12 bits for each number, to the bit the same (compressed_weight.h).
struct CompressedMatrix {
  const uint8_t* codes;
  const uint32_t* units;
  const uint32_t* outliers;
};

#if defined(__AVX512BF16__)
// The layout of packed_linear of a contiguous weight [num_outputs, num_inputs].
void pack_weight(const bf16* weight, bf16* out, int64_t num_outputs, int64_t num_inputs, int num_threads);

// out[i] = row ids[i] of a packed weight.
void packed_embedding(const int64_t* ids, const bf16* weight, bf16* out, int64_t num_ids, int64_t num_inputs,
                      int num_threads);

// out = residual + x weight^T + bias, summed in float32; bias and residual may be null; out contiguous. num_inputs is
// even. weight: [ceil(num_outputs / 32), num_inputs / 2, 32, 2], zeros after the last output. Helpers, if any, take
// part instead of other threads; the weight has to outlive them.
template <typename Out>
void packed_linear(const bf16* x, int64_t x_stride, const bf16* weight, const bf16* bias, const bf16* residual,
                   int64_t residual_stride, Out* out, int64_t num_rows, int64_t num_outputs, int64_t num_inputs,
                   int num_threads, Helpers* helpers = nullptr);

// act_and_mul of packed_linear of 2 * `size` outputs, to the bit, in one go. `size` is a multiple of 32.
void packed_gated_linear(const bf16* x, int64_t x_stride, const bf16* weight, const bf16* bias, Activation activation,
                         bf16* out, int64_t num_rows, int64_t size, int64_t num_inputs, int num_threads);
// Whether products with gates are possible, and faster.
bool should_gate(int64_t num_rows, int64_t size);

// Bytes of codes, and how many units there are.
int64_t compressed_code_bytes(int64_t num_outputs, int64_t num_inputs);
int64_t compressed_units(int64_t num_outputs, int64_t num_inputs);

// Compresses a contiguous weight [num_outputs, num_inputs]; units: one more than there are. False, with nothing of use
// written, if there are more outliers than `capacity`.
bool compress_weight(const bf16* weight, uint8_t* codes, uint32_t* units, uint32_t* outliers, int64_t capacity,
                     int64_t num_outputs, int64_t num_inputs, int num_threads);

// The same of a compressed weight, to the bit.
void compressed_embedding(const int64_t* ids, const CompressedMatrix& weight, bf16* out, int64_t num_ids,
                          int64_t num_inputs, int num_threads);
template <typename Out>
void compressed_linear(const bf16* x, int64_t x_stride, const CompressedMatrix& weight, const bf16* bias,
                       const bf16* residual, int64_t residual_stride, Out* out, int64_t num_rows, int64_t num_outputs,
                       int64_t num_inputs, int num_threads, Helpers* helpers = nullptr);
void compressed_gated_linear(const bf16* x, int64_t x_stride, const CompressedMatrix& weight, const bf16* bias,
                             Activation activation, bf16* out, int64_t num_rows, int64_t size, int64_t num_inputs,
                             int num_threads);
#endif

// A ragged batch of queries over the paged KV cache; AttentionPlan's fields.
struct AttentionBatch {
  int64_t num_seqs;
  const int64_t* query_lens;
  const int64_t* seq_lens;
  const int32_t* block_table;
  int64_t table_stride, block_size;
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t query_stride;  // between tokens
  int64_t window;        // keys that a query sees; 0: all
  float scale, softcap;  // softcap 0: none
  const float* slopes;   // of linear biases, one a head, or null
  const float* sinks;    // scores of a key without a value that every query sees, one a head, or null
};

// [num_blocks, block_size, num_kv_heads, width] of S = T or int8_t; T's width is head_dim, a row of int8_t ends with
// its float32 scale.
template <typename S>
struct AttentionCache {
  const S *keys, *values;
  int64_t width;
};

// out [num_tokens, num_heads, head_dim] = softmax(query keys^T * scale) values, each token over the keys up to itself.
// What follows a sequence's length makes no difference, and blocks that all of its queries' windows have left are not
// read.
template <typename T, typename S>
void paged_attention(const AttentionBatch& batch, const AttentionCache<S>& cache, const T* query, T* out,
                     int num_threads);

// Whole sequences, one after the other, without a cache. Strides are those of tokens and of heads; values of a head are
// neighbours.
struct SequenceBatch {
  int64_t num_seqs;
  const int64_t* starts;  // the first token of each sequence, then the number of tokens
  int64_t num_heads, num_kv_heads, head_dim, value_dim;
  int64_t query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride;
  int64_t out_stride;
  float scale;
  bool is_causal;       // a token sees those up to itself; else all of its sequence
  const float* slopes;  // [num_heads]: what a score loses for each token between query and key; null: nothing
};

// out [num_tokens, num_heads, value_dim] = softmax(query keys^T * scale - slope * distance) values, in float32, rounded
// once.
template <typename T>
void sequence_attention(const SequenceBatch& batch, const T* query, const T* key, const T* value, T* out,
                        int num_threads);

// Whether helpers can: no prompt is divided, and no keys are shared, which they would read again and again.
bool can_help_attend(const AttentionBatch& batch);

// The same with helpers, to the bit. False: nothing is computed; they cannot, or there are too few keys or too many
// parts.
bool paged_attention(const AttentionBatch& batch, const AttentionCache<bf16>& cache, const bf16* query, bf16* out,
                     Helpers& helpers);

// winners[row] = argmax of probs[row][token] / token_exponentials(keys[row], token), or -1 where two come so close that
// only the exact logarithms decide.
void race(const float* probs, int64_t stride, const int64_t* keys, int64_t* winners, int64_t num_rows, int64_t size,
          int num_threads);

// A matrix [num_outputs, num_inputs] of int4 or int8 numbers, packed in tiles of 32 outputs (quantized_codes.h), zeros
// after the last. An element is scale * (number - zero).
struct QuantizedMatrix {
  const uint8_t* codes;
  const float* scales;              // [tiles, num_groups, 32]
  const float* zeros;               // the same; null where all are 0
  int64_t num_outputs, num_inputs;  // num_inputs is a multiple of 4
  int64_t num_groups, group_size;   // inputs of a group, a multiple of 4; above 128 of 128, or all
  int bits;
  bool quantizes_inputs;  // rows of bfloat16 are taken to int8 with a scale for each of their parts (quantized_rows.h)
};

// out = x W^T + bias + residual, rounded once. x: [num_rows, num_inputs]; bias and residual may be null; out
// contiguous. Helpers as for packed_linear.
template <typename T, typename Out>
void quantized_linear(const T* x, int64_t x_stride, const QuantizedMatrix& weight, const T* bias, const T* residual,
                      int64_t residual_stride, Out* out, int64_t num_rows, int num_threads, Helpers* helpers = nullptr);

// As packed_gated_linear.
void quantized_gated_linear(const bf16* x, int64_t x_stride, const QuantizedMatrix& weight, const bf16* bias,
                            Activation activation, bf16* out, int64_t num_rows, int num_threads);

// Where a QuantizedMatrix without zeros is made.
struct WritableMatrix {
  uint8_t* codes;
  float* scales;
  int64_t num_inputs;              // a multiple of 4
  int64_t num_groups, group_size;  // inputs of a group: a multiple of 4, or all
  int bits;
};

// Quantizes rows of x into outputs `first_row` and on of a matrix, and leaves all others as they are. The numbers are
// those of quantize() in quantized_matrix.py.
template <typename T>
void quantize_rows(const T* x, int64_t x_stride, int64_t num_rows, int64_t first_row, const WritableMatrix& weight,
                   int num_threads);

// out[i] = row ids[i] of the matrix.
void quantized_embedding(const int64_t* ids, const QuantizedMatrix& weight, bf16* out, int64_t num_ids,
                         int num_threads);

// out[row] = x[row] / sqrt(mean(x[row]^2) + eps) * (weight + weight_offset); rows of `size`, out contiguous.
template <typename T>
void rms_norm(const T* x, int64_t x_stride, const T* weight, T* out, int64_t num_rows, int64_t size, float eps,
              float weight_offset, int num_threads);

constexpr int kMaxHeadDim = 1024;

// How a paged cache lies in memory: strides of block, token and head; values of one head are neighbours.
struct CacheLayout {
  int64_t block_size;
  int64_t k_strides[3];
  int64_t v_strides[3];
};

// Root-mean-square norms of each head of queries and keys, before their rotation or after it.
template <typename T>
struct HeadNorms {
  const T *q_weight, *k_weight;  // [head_dim]; null: there are no norms
  float eps, weight_offset;
  bool is_last;
};

// Norms queries and keys per head, rotates the first 2 * half values of each, and writes queries back where they were,
// keys and values into the cache. Rows of qkv: queries, keys, values. cos and sin: [num_tokens, half]. Slot -1 is not
// written.
template <typename T>
void rope_store(T* qkv, int64_t qkv_stride, const HeadNorms<T>& norms, const float* cos, const float* sin, int half,
                bool is_interleaved, const int64_t* slot_mapping, T* k_cache, T* v_cache, const CacheLayout& layout,
                int64_t num_tokens, int num_heads, int num_kv_heads, int head_dim, int num_threads);

// Keys and values, a token's heads one after the other, and rows of `width` bytes in the cache for them.
struct Int8Rows {
  int64_t num_tokens, num_kv_heads, head_dim;
  int64_t key_stride, value_stride;  // between tokens
  int64_t width;
};

// Quantizes into the slots of [num_slots, num_kv_heads, width] caches; -1 skips a token.
template <typename T>
void store_int8(const T* key, const T* value, const int64_t* slot_mapping, int8_t* k_cache, int8_t* v_cache,
                const Int8Rows& rows, int num_threads);

}  // namespace pagoda
