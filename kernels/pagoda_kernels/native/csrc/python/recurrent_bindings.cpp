// Kernels of recurrent layers for Python.
#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "python/bindings.h"
#include "recurrent/gate_and_norm.h"
#include "recurrent/gated_delta_rule.h"
#include "recurrent/short_convolution.h"
#include "recurrent/state_space_scan.h"

namespace {

using at::Tensor;

void gated_delta_rule(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay,
                      const Tensor& beta, const Tensor& states, const Tensor& starts, const Tensor& rows,
                      const std::optional<Tensor>& kept, const Tensor& out) {
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

void state_space_scan(const Tensor& x, const Tensor& b, const Tensor& c, const Tensor& step, const Tensor& step_bias,
                      const Tensor& decay_log, const Tensor& skip, double min_step, double max_step,
                      const Tensor& states, const Tensor& starts, const Tensor& rows, const std::optional<Tensor>& kept,
                      const Tensor& out) {
  const pagoda::StateSpaceScan scan{
      .num_seqs = rows.size(0),
      .num_heads = x.size(1),
      .num_groups = b.size(1),
      .head_dim = x.size(2),
      .state_size = b.size(2),
      .starts = data<int64_t>(starts),
      .rows = data<int64_t>(rows),
      .kept = kept ? data<int64_t>(*kept) : nullptr,
      .x = data<float>(x),
      .b = data<float>(b),
      .c = data<float>(c),
      .step = data<float>(step),
      .step_bias = data<float>(step_bias),
      .decay_log = data<float>(decay_log),
      .skip = data<float>(skip),
      .min_step = static_cast<float>(min_step),
      .max_step = static_cast<float>(max_step),
      .states = data<float>(states),
      .out = data<float>(out),
  };
  pagoda::state_space_scan(scan, at::get_num_threads());
}

void short_convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, bool has_silu,
                       const Tensor& states, const Tensor& starts, const Tensor& rows,
                       const std::optional<Tensor>& kept, const Tensor& out) {
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const pagoda::ShortConvolution<T> convolution{
        .num_seqs = rows.size(0),
        .num_channels = x.size(1),
        .width = weight.size(1),
        .starts = data<int64_t>(starts),
        .rows = data<int64_t>(rows),
        .kept = kept ? data<int64_t>(*kept) : nullptr,
        .x = data<T>(x),
        .x_stride = x.stride(0),
        .weight = data<T>(weight),
        .bias = bias ? data<T>(*bias) : nullptr,
        .has_silu = has_silu,
        .states = data<T>(states),
        .out = data<T>(out),
    };
    pagoda::short_convolution(convolution, at::get_num_threads());
  });
}

void gate_and_norm(const Tensor& x, const Tensor& gate, const std::optional<Tensor>& weight, double eps,
                   int64_t num_groups, bool is_gate_first, const Tensor& out) {
  by_dtype(gate, [&](auto zero) {
    using T = decltype(zero);
    const pagoda::GateAndNorm<T> one{
        .num_rows = x.size(0),
        .num_groups = num_groups,
        .group_size = x.size(1) / num_groups,
        .x = data<float>(x),
        .gate = data<T>(gate),
        .gate_stride = gate.stride(0),
        .weight = weight ? data<T>(*weight) : nullptr,
        .eps = static_cast<float>(eps),
        .is_gate_first = is_gate_first,
        .out = data<T>(out),
    };
    pagoda::gate_and_norm(one, at::get_num_threads());
  });
}

}  // namespace

void bind_recurrent(pybind11::module_& module) {
  using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("gated_delta_rule", &gated_delta_rule, Unlocked());
  module.def("state_space_scan", &state_space_scan, Unlocked());
  module.def("short_convolution", &short_convolution, Unlocked());
  module.def("gate_and_norm", &gate_and_norm, Unlocked());
}
