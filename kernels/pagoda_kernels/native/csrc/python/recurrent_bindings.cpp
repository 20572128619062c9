// Kernels of recurrent layers for Python.
#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "python/bindings.h"
#include "recurrent/gated_delta_rule.h"

namespace {

using at::Tensor;

void gated_delta_rule(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay, const Tensor& beta,
                      const Tensor& states, const Tensor& starts, const Tensor& rows, const std::optional<Tensor>& kept,
                      const Tensor& out) {
  const pagoda::DeltaRule rule{
      .num_seqs = rows.size(0),
      .num_key_heads = key.size(1),
      .num_value_heads = value.size(1),
      .key_dim = key.size(2),
      .value_dim = value.size(2),
      .starts = data<int64_t>(starts),
      .rows = data<int64_t>(rows),
      .kept = kept ? data<int64_t>(*kept) : nullptr,
      .query = data<float>(query),
      .key = data<float>(key),
      .value = data<float>(value),
      .decay = data<float>(decay),
      .beta = data<float>(beta),
      .states = data<float>(states),
      .out = data<float>(out),
  };
  pagoda::gated_delta_rule(rule, at::get_num_threads());
}

}  // namespace

void bind_recurrent(pybind11::module_& module) {
  module.def("gated_delta_rule", &gated_delta_rule, pybind11::call_guard<pybind11::gil_scoped_release>());
}
