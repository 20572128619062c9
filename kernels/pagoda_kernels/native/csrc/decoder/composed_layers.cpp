#include "decoder/composed_layers.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/stack.h>

namespace pagoda {

namespace {

using at::Tensor;

Tensor activated(const Tensor& x, const Activation& activation) {
  switch (activation.kind) {
    case ActivationKind::kSilu:
      return at::silu(x);
    case ActivationKind::kGelu:
      return at::gelu(x);
    case ActivationKind::kGeluTanh:
      return at::gelu(x, "tanh");
    case ActivationKind::kQuickGelu:
      return x * at::sigmoid(x * 1.702);
    case ActivationKind::kRelu:
      return at::relu(x);
    case ActivationKind::kReluSquared:
      return at::relu(x).square();
    case ActivationKind::kClampedSwiglu:
      break;  // no composed layer has it
  }
  TORCH_CHECK(false, "unknown activation");
}

Tensor rotated(const Tensor& x, const Tensor& cos, const Tensor& sin, bool is_interleaved) {
  const int64_t angles = cos.size(-1), width = x.size(-1);
  if (2 * angles < width) {
    const Tensor first = rotated(x.narrow(-1, 0, 2 * angles), cos, sin, is_interleaved);
    return at::cat({first, x.narrow(-1, 2 * angles, width - 2 * angles)}, -1);
  }
  if (is_interleaved) {
    const Tensor first = x.slice(-1, 0, width, 2), second = x.slice(-1, 1, width, 2);
    return at::stack({first * cos - second * sin, second * cos + first * sin}, -1).flatten(-2).to(x.scalar_type());
  }
  const Tensor first = x.narrow(-1, 0, angles), second = x.narrow(-1, angles, angles);
  return at::cat({first * cos - second * sin, second * cos + first * sin}, -1).to(x.scalar_type());
}

Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
              double scale) {
  return at::scaled_dot_product_attention(query, key, value, mask, 0.0, !mask, scale);
}

// query: [n, num_kv_heads, group, head_dim]; so is the result.
Tensor decode(const ComposedLayer& layer, const Tensor& query, const DecodeRows& rows) {
  // The heads of one KV head stand where the query tokens would: grouped queries without a copy of the keys.
  const std::vector<int64_t> shape{query.size(0), -1, query.size(1), query.size(3)};
  const Tensor key = layer.k_cache.index_select(0, rows.block_ids).view(shape).transpose(1, 2);
  const Tensor value = layer.v_cache.index_select(0, rows.block_ids).view(shape).transpose(1, 2);
  return attend(query, key, value, rows.mask, layer.scale);
}

// query: [query_len, num_kv_heads, group, head_dim]; so is the result.
Tensor prefill(const ComposedLayer& layer, const Tensor& query, const PrefillRows& row) {
  const auto keys = [&](const Tensor& cache) {
    const Tensor all = cache.index_select(0, row.block_ids).flatten(0, 1).narrow(0, row.first, row.num_keys);
    return all.transpose(0, 1).unsqueeze(1).expand({-1, query.size(2), -1, -1});
  };
  const Tensor attended =
      attend(query.permute({1, 2, 0, 3}), keys(layer.k_cache), keys(layer.v_cache), row.mask, layer.scale);
  return attended.permute({2, 0, 1, 3});
}

// query: [num_tokens, num_kv_heads, group, head_dim]; [num_tokens, num_heads * head_dim].
Tensor attention(const ComposedLayer& layer, const Tensor& query, const ComposedPlan& plan) {
  if (plan.prefills.empty() && plan.decodes.size() == 1 && !plan.decodes[0].query_rows) {
    return decode(layer, query, plan.decodes[0]).flatten(1);
  }
  Tensor output = at::empty_like(query);
  for (const DecodeRows& rows : plan.decodes) {
    if (rows.query_rows) {
      output.index_copy_(0, *rows.query_rows, decode(layer, query.index_select(0, *rows.query_rows), rows));
    } else {
      output = decode(layer, query, rows);
    }
  }
  for (const PrefillRows& row : plan.prefills) {
    const Tensor part = query.narrow(0, row.query_start, row.query_len);
    output.narrow(0, row.query_start, row.query_len).copy_(prefill(layer, part, row));
  }
  return output.flatten(1);
}

// Queries, [num_tokens, num_heads, head_dim]; keys and values go into the cache.
Tensor rotate_and_store(const ComposedLayer& layer, const ComposedBatch& batch, const Tensor& qkv) {
  const int64_t kv_heads = batch.num_kv_heads, head_dim = layer.k_cache.size(3);
  const Tensor heads = qkv.view({qkv.size(0), -1, head_dim});
  const int64_t num_heads = heads.size(1) - 2 * kv_heads;
  Tensor turned = heads.narrow(1, 0, num_heads + kv_heads);
  const auto norm = [&] {
    turned = at::cat({composed_norm(*layer.q_norm, turned.narrow(1, 0, num_heads)),
                      composed_norm(*layer.k_norm, turned.narrow(1, num_heads, kv_heads))},
                     1);
  };
  if (layer.q_norm && !layer.head_norms_are_last) norm();
  if (layer.rotation >= 0) {
    const auto& [cos, sin] = batch.rotations[layer.rotation];
    turned = rotated(turned, cos, sin, layer.is_interleaved);
  }
  if (layer.q_norm && layer.head_norms_are_last) norm();
  const Tensor& slots = batch.slot_mappings[layer.group];
  layer.k_cache.flatten(0, 1).index_copy_(0, slots, turned.narrow(1, num_heads, kv_heads));
  layer.v_cache.flatten(0, 1).index_copy_(0, slots, heads.narrow(1, num_heads + kv_heads, kv_heads));
  return turned.narrow(1, 0, num_heads);
}

}  // namespace

Tensor composed_norm(const RmsNorm& norm, const Tensor& x) {
  if (norm.weight_offset != 0) {
    const Tensor weight = norm.weight.to(at::kFloat) + norm.weight_offset;
    return at::rms_norm(x.to(at::kFloat), norm.weight.sizes(), weight, norm.eps).to(x.scalar_type());
  }
  return at::rms_norm(x, norm.weight.sizes(), norm.weight, norm.eps);
}

Tensor composed_linear(const PlainLinear& linear, const Tensor& x) { return at::linear(x, linear.weight, linear.bias); }

Tensor composed_layers(const std::vector<ComposedLayer>& layers, const ComposedBatch& batch, Tensor x) {
  for (const ComposedLayer& layer : layers) {
    const Tensor qkv = composed_linear(layer.qkv, composed_norm(layer.attention_norm, x));
    const Tensor query = rotate_and_store(layer, batch, qkv);
    const int64_t group = query.size(1) / batch.num_kv_heads;
    const Tensor grouped = query.view({query.size(0), batch.num_kv_heads, group, query.size(2)});
    x = x + composed_linear(layer.output, attention(layer, grouped, batch.plans[layer.plan]));
    const Tensor wide = composed_linear(layer.gate_up, composed_norm(layer.mlp_norm, x));
    const int64_t size = wide.size(1) / 2;
    const Tensor gated = activated(wide.narrow(1, 0, size), layer.activation) * wide.narrow(1, size, size);
    x = x + composed_linear(layer.down, gated);
  }
  return x;
}

}  // namespace pagoda
