// From tensors to pointers. The only file that knows torch, and so the only one that is slow to compile. The callers in
// pagoda_kernels/*.py have checked shapes, types and devices.
#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "ops.h"

namespace {

using at::Tensor;

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// Calls body with a value of the tensor's type, float or pagoda::bf16.
template <typename Body>
void by_dtype(const Tensor& tensor, const Body& body) {
  if (tensor.scalar_type() == at::kFloat) {
    body(float{});
  } else {
    TORCH_CHECK(tensor.scalar_type() == at::kBFloat16, "dtype is ", tensor.scalar_type(), ", must be float32 or bfloat16");
    body(pagoda::bf16{});
  }
}

void quantized_linear(const Tensor& x, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& zeros,
                      int64_t group_size, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                      const Tensor& out) {
  const pagoda::QuantizedMatrix weight{data<uint8_t>(codes),
                                       data<float>(scales),
                                       zeros ? data<float>(*zeros) : nullptr,
                                       out.size(-1),
                                       x.size(1),
                                       scales.size(1),
                                       group_size,
                                       static_cast<int>(codes.size(2) / 16)};
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const auto run = [&](auto* to) {
      pagoda::quantized_linear(data<const T>(x), x.stride(0), weight, bias ? data<const T>(*bias) : nullptr,
                               residual ? data<const T>(*residual) : nullptr, residual ? residual->stride(0) : 0, to,
                               x.size(0), at::get_num_threads());
    };
    if (out.scalar_type() == at::kFloat) {
      run(data<float>(out));
    } else {
      run(data<T>(out));
    }
  });
}

void rms_norm(const Tensor& x, const Tensor& weight, const Tensor& out, double eps, double weight_offset) {
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    pagoda::rms_norm<T>(data<T>(x), x.stride(0), data<T>(weight), data<T>(out), x.size(0), x.size(1), eps, weight_offset,
                        at::get_num_threads());
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("quantized_linear", &quantized_linear, Unlocked());
  module.def("rms_norm", &rms_norm, Unlocked());
}
