// Layers composed of PyTorch's operations, as a class for Python. Of a file's own: it takes as long to compile as
// bindings.cpp does, and beside it.
#include <ATen/ops/embedding.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/max.h>
#include <torch/csrc/utils/pybind.h>

#include <tuple>

#include "python/bindings.h"
#include "decoder/composed_layers.h"

namespace {

using at::Tensor;
using Linear = std::pair<Tensor, std::optional<Tensor>>;
using Decodes = std::vector<std::tuple<std::optional<Tensor>, Tensor, Tensor>>;
using Prefills = std::vector<std::tuple<int64_t, int64_t, Tensor, int64_t, int64_t, std::optional<Tensor>>>;
using Plans = std::vector<std::pair<Decodes, Prefills>>;

class ComposedLayers {
 public:
  explicit ComposedLayers(int64_t num_kv_heads) : num_kv_heads_(num_kv_heads) {}

  void add(const Tensor& attention_norm, const Tensor& mlp_norm, double eps, double weight_offset,
           const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double head_eps,
           double head_weight_offset, bool head_norms_are_last, const std::vector<Linear>& linears, int64_t activation,
           int rotation, bool is_interleaved, double scale, int plan, const Tensor& k_cache, const Tensor& v_cache,
           int group) {
    TORCH_CHECK(linears.size() == 4, "a layer has 4 matrices, got ", linears.size());
    const auto linear = [&](int i) { return pagoda::PlainLinear{linears[i].first, linears[i].second}; };
    const auto head_norm = [&](const std::optional<Tensor>& weight) {
      return weight ? std::optional(pagoda::RmsNorm{*weight, head_eps, head_weight_offset}) : std::nullopt;
    };
    layers_.push_back({
        .attention_norm = {attention_norm, eps, weight_offset},
        .mlp_norm = {mlp_norm, eps, weight_offset},
        .q_norm = head_norm(q_norm),
        .k_norm = head_norm(k_norm),
        .head_norms_are_last = head_norms_are_last,
        .qkv = linear(0),
        .output = linear(1),
        .gate_up = linear(2),
        .down = linear(3),
        .activation = {static_cast<pagoda::ActivationKind>(activation)},
        .rotation = rotation,
        .is_interleaved = is_interleaved,
        .scale = scale,
        .plan = plan,
        .group = group,
        .k_cache = k_cache,
        .v_cache = v_cache,
    });
  }

  // cos and sin: [max_positions, 1, angles] float32, one pair for each rotation.
  void rotate(const Tensor& cos, const Tensor& sin) { tables_.push_back({cos, sin}); }

  void ends(const Tensor& embedding, const Tensor& norm, double eps, double weight_offset, const Linear& linear) {
    embedding_ = embedding;
    norm_ = {norm, eps, weight_offset};
    head_ = {linear.first, linear.second};
  }

  // slot_mappings: one a group.
  Tensor forward(const Tensor& x, const Plans& plans, const std::vector<Tensor>& slot_mappings,
                 const Tensor& positions) {
    pagoda::ComposedBatch batch{
        .plans = {}, .rotations = {}, .slot_mappings = slot_mappings, .num_kv_heads = num_kv_heads_};
    for (const auto& [decodes, prefills] : plans) {
      pagoda::ComposedPlan& plan = batch.plans.emplace_back();
      for (const auto& [query_rows, block_ids, mask] : decodes) plan.decodes.push_back({query_rows, block_ids, mask});
      for (const auto& [start, length, block_ids, first, num_keys, mask] : prefills) {
        plan.prefills.push_back({start, length, block_ids, first, num_keys, mask});
      }
    }
    for (const auto& [cos, sin] : tables_) {
      batch.rotations.push_back({cos.index_select(0, positions), sin.index_select(0, positions)});
    }
    return pagoda::composed_layers(layers_, batch, x);
  }

  // `forward` of embedded tokens, and the logits of some rows with the greatest of each and its index.
  std::tuple<Tensor, Tensor, Tensor> forward_to_logits(const Tensor& input_ids, const Plans& plans,
                                                       const std::vector<Tensor>& slot_mappings,
                                                       const Tensor& positions, const Tensor& rows) {
    const Tensor x = forward(at::embedding(embedding_, input_ids), plans, slot_mappings, positions);
    Tensor hidden = pagoda::composed_norm(norm_, x);
    if (rows.size(0) != hidden.size(0)) hidden = hidden.index_select(0, rows);
    const Tensor logits = pagoda::composed_linear(head_, hidden).to(at::kFloat);
    const auto [values, indices] = logits.max(-1);
    return {logits, values, indices};
  }

 private:
  int64_t num_kv_heads_;
  std::vector<pagoda::ComposedLayer> layers_;
  std::vector<std::pair<Tensor, Tensor>> tables_;
  Tensor embedding_;
  pagoda::RmsNorm norm_{};
  pagoda::PlainLinear head_;
};

}  // namespace

void bind_composed_layers(pybind11::module_& module) {
  using AllUnlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  pybind11::class_<ComposedLayers>(module, "composed_layers")
      .def(pybind11::init<int64_t>())
      .def("add", &ComposedLayers::add)
      .def("rotate", &ComposedLayers::rotate)
      .def("ends", &ComposedLayers::ends)
      .def("forward", &ComposedLayers::forward, AllUnlocked())
      .def("forward_to_logits", &ComposedLayers::forward_to_logits, AllUnlocked());
}
