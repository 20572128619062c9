// What the files of bindings share, and what the others add to the module.
#pragma once

#include <torch/csrc/utils/pybind.h>

template <typename T>
T* data(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

void bind_decoder_layers(pybind11::module_& module);
void bind_composed_layers(pybind11::module_& module);
