// From tensors to pointers. The only file that knows torch, and so the only one that is slow to compile. The callers in
// pagoda_kernels/*.py have checked shapes, types and devices.
#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>

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
  module.def("rms_norm", &rms_norm, Unlocked());
}
