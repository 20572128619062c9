// The layers of a decoder as PyTorch's own operations, called from here: the same bits as from Python, without it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "ops.h"

namespace pagoda {

// y = x W^T + bias; weight: [num_outputs, num_inputs].
struct PlainLinear {
  at::Tensor weight;
  std::optional<at::Tensor> bias;
};

struct RmsNorm {
  at::Tensor weight;
  double eps, weight_offset;
};

// x += attention(norm(x)); x += down(activation(gate(norm(x))) * up(norm(x))).
struct ComposedLayer {
  RmsNorm attention_norm, mlp_norm;
  std::optional<RmsNorm> q_norm, k_norm;  // of each head
  bool head_norms_are_last;               // they are of rotated heads
  PlainLinear qkv, output, gate_up, down;
  Activation activation;
  int rotation;  // index into ComposedBatch::rotations; -1: none
  bool is_interleaved;
  double scale;
  int plan;                     // index into ComposedBatch::plans
  int group;                    // index into ComposedBatch::slot_mappings
  at::Tensor k_cache, v_cache;  // [num_blocks, block_size, num_kv_heads, head_dim]
};

// Sequences with one query token each; see DecodeGroup in attention_plan.py.
struct DecodeRows {
  std::optional<at::Tensor> query_rows;
  at::Tensor block_ids, mask;
};

// A sequence with several query tokens; see PrefillRow in attention_plan.py.
struct PrefillRows {
  int64_t query_start, query_len;
  at::Tensor block_ids;
  int64_t first, num_keys;
  std::optional<at::Tensor> mask;
};

struct ComposedPlan {
  std::vector<DecodeRows> decodes;
  std::vector<PrefillRows> prefills;
};

struct ComposedBatch {
  std::vector<ComposedPlan> plans;
  std::vector<std::pair<at::Tensor, at::Tensor>> rotations;  // cosines and sines, [num_tokens, 1, angles]
  std::vector<at::Tensor> slot_mappings;                     // [num_tokens] each, no -1
  int64_t num_kv_heads;
};

at::Tensor composed_norm(const RmsNorm& norm, const at::Tensor& x);
at::Tensor composed_linear(const PlainLinear& linear, const at::Tensor& x);

// x: [num_tokens, hidden_size]; the result is another tensor.
at::Tensor composed_layers(const std::vector<ComposedLayer>& layers, const ComposedBatch& batch, at::Tensor x);

}  // namespace pagoda
