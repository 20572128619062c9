// What the other file of bindings adds to the module.
#pragma once

#include <torch/csrc/utils/pybind.h>

void bind_composed_layers(pybind11::module_& module);
