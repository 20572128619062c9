// What the files of bindings share, and what the others add to the module.
#pragma once

#include <pybind11/numpy.h>
#include <torch/csrc/utils/pybind.h>

#include "decoder/decode_rows.h"
#include "linear/lora.h"
#include "ops.h"
#include "simd/vec.h"

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style>;

template <typename T>
T* data(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// Calls body with a value of the tensor's type, float or pagoda::bf16.
template <typename Body>
void by_dtype(const at::Tensor& tensor, const Body& body) {
  if (tensor.scalar_type() == at::kFloat) {
    body(float{});
  } else {
    TORCH_CHECK(tensor.scalar_type() == at::kBFloat16, "dtype is ", tensor.scalar_type(),
                ", must be float32 or bfloat16");
    body(pagoda::bf16{});
  }
}

#if defined(__AVX512BF16__)
// Of the bytes that `compress_weight` returns.
inline pagoda::CompressedMatrix compressed_matrix(const at::Tensor& weight, int64_t num_outputs, int64_t num_inputs) {
  const auto* codes = data<const uint8_t>(weight);
  const auto* units = codes + pagoda::compressed_code_bytes(num_outputs, num_inputs);
  const auto* outliers = units + 4 * (pagoda::compressed_units(num_outputs, num_inputs) + 1);
  return {codes, reinterpret_cast<const uint32_t*>(units), reinterpret_cast<const uint32_t*>(outliers)};
}
#endif

// The arguments are described in pagoda_kernels/lora/add_lora.py.
inline pagoda::LoraRows lora_rows(const at::Tensor& rows, const at::Tensor& starts) {
  return {data<const int64_t>(rows), data<const int64_t>(starts), starts.size(0) - 1};
}

// The arguments are described in pagoda_kernels/decoder/decode_rows.py.
inline pagoda::SequenceColumns sequence_columns(const Array<bool>& is_in_use, const Array<bool>& is_greedy,
                                                const Array<int64_t>& num_tokens, const Array<int64_t>& num_computed,
                                                const Array<int64_t>& num_blocks, const Array<int32_t>& tokens,
                                                const Array<int32_t>& block_table) {
  return {
      .num_slots = is_in_use.size(),
      .is_in_use = is_in_use.data(),
      .is_greedy = is_greedy.data(),
      .num_tokens = num_tokens.data(),
      .num_computed = num_computed.data(),
      .num_blocks = num_blocks.data(),
      .tokens = tokens.data(),
      .tokens_stride = tokens.shape(1),
      .block_table = block_table.data(),
      .table_stride = block_table.shape(1),
  };
}

void bind_decoder_layers(pybind11::module_& module);
void bind_mixtures(pybind11::module_& module);
void bind_composed_layers(pybind11::module_& module);
void bind_recurrent(pybind11::module_& module);
