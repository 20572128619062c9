// Mixtures of experts as a class for Python; the arguments are described in pagoda_kernels/moe/experts.py.
#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>

#include "python/mixture.h"

#if defined(__AVX512BF16__)

pagoda::Team team_of(std::unique_ptr<pagoda::Helpers>& helpers) {
  const int count = pagoda::num_helpers();
  if (count == 0) return {at::get_num_threads(), nullptr};
  if (!helpers || helpers->count() != count) helpers = std::make_unique<pagoda::Helpers>(count);
  return {at::get_num_threads(), helpers.get()};
}

namespace {

using at::Tensor;
using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;

pagoda::Expert keep(MixtureTensors& mixture, const LinearTensors& gate_up, const LinearTensors& down) {
  for (const LinearTensors* linear : {&gate_up, &down}) {
    mixture.kept.insert(mixture.kept.end(), linear->tensors.begin(), linear->tensors.end());
  }
  return {gate_up.weights, down.weights};
}

std::shared_ptr<MixtureTensors> make(const std::vector<std::pair<LinearTensors, LinearTensors>>& experts,
                                     int64_t activation, double limit, double alpha, double up_offset,
                                     bool scales_input) {
  TORCH_CHECK(!experts.empty(), "a mixture has experts");
  auto mixture = std::make_shared<MixtureTensors>();
  for (const auto& [gate_up, down] : experts) mixture->experts.experts.push_back(keep(*mixture, gate_up, down));
  mixture->experts.activation = {static_cast<pagoda::ActivationKind>(activation), static_cast<float>(limit),
                                 static_cast<float>(alpha), static_cast<float>(up_offset)};
  mixture->experts.scales_input = scales_input;
  mixture->mixture.experts = &mixture->experts;
  return mixture;
}

void set_router(MixtureTensors& mixture, const LinearTensors& router, int64_t top_k, int64_t scoring,
                bool is_normalized, double norm_min, double norm_added, double scale, int64_t num_groups,
                int64_t top_groups, bool groups_by_two, const std::optional<Tensor>& correction) {
  mixture.kept.insert(mixture.kept.end(), router.tensors.begin(), router.tensors.end());
  if (correction) mixture.kept.push_back(*correction);
  mixture.mixture.router = router.weights;
  mixture.mixture.routing = {.top_k = top_k,
                             .scoring = static_cast<pagoda::Scoring>(scoring),
                             .is_normalized = is_normalized,
                             .norm_min = static_cast<float>(norm_min),
                             .norm_added = static_cast<float>(norm_added),
                             .scale = static_cast<float>(scale),
                             .num_groups = num_groups,
                             .top_groups = top_groups,
                             .groups_by_two = groups_by_two,
                             .correction = correction ? data<const float>(*correction) : nullptr};
}

void set_shared(MixtureTensors& mixture, const LinearTensors& gate_up, const LinearTensors& down,
                const std::optional<LinearTensors>& gate) {
  mixture.shared = keep(mixture, gate_up, down);
  mixture.mixture.shared = &*mixture.shared;
  if (!gate) return;
  mixture.kept.insert(mixture.kept.end(), gate->tensors.begin(), gate->tensors.end());
  mixture.shared_gate = gate->weights;
  mixture.mixture.shared_gate = &*mixture.shared_gate;
}

void forward(MixtureTensors& mixture, const Tensor& x, const Tensor& chosen, const Tensor& weights,
             const std::optional<Tensor>& residual, const Tensor& out) {
  using pagoda::bf16;
  const pagoda::Choices choices{chosen.size(0), chosen.size(1), data<const int64_t>(chosen),
                                data<const float>(weights)};
  const pagoda::Extra extra{pointer(residual), nullptr, nullptr};
  pagoda::experts(mixture.experts, data<const bf16>(x), choices, extra, data<bf16>(out), team_of(mixture.helpers));
}

void forward_all(MixtureTensors& mixture, const Tensor& x, const std::optional<Tensor>& residual, const Tensor& out) {
  using pagoda::bf16;
  pagoda::mixture(mixture.mixture, data<const bf16>(x), pointer(residual), data<bf16>(out), x.size(0),
                  team_of(mixture.helpers));
}

}  // namespace

void bind_mixtures(pybind11::module_& module) {
  module.def("linear_weights", &linear_weights);
  pybind11::class_<LinearTensors>(module, "LinearTensors");
  module.def("mixture_of_experts", &make);
  pybind11::class_<MixtureTensors, std::shared_ptr<MixtureTensors>>(module, "MixtureTensors")
      .def("set_router", &set_router)
      .def("set_shared", &set_shared)
      .def("forward", &forward, Unlocked())
      .def("forward_all", &forward_all, Unlocked());
}

#else

void bind_mixtures(pybind11::module_&) {}

#endif
