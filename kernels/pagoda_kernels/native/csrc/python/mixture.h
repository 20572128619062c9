// Matrices and mixtures of experts as Python hands them over.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "experts/experts.h"
#include "python/bindings.h"

#if defined(__AVX512BF16__)

inline const pagoda::bf16* pointer(const std::optional<at::Tensor>& tensor) {
  return tensor ? data<const pagoda::bf16>(*tensor) : nullptr;
}

// A matrix of one layer: packed, compressed, or codes with scales. The bias is for its owner to keep.
struct LinearTensors {
  pagoda::LinearWeights weights;
  std::vector<at::Tensor> tensors;  // the matrix itself
};

inline LinearTensors linear_weights(const at::Tensor& weight, const std::optional<at::Tensor>& scales,
                                    const std::optional<at::Tensor>& zeros, int64_t group_size, bool quantizes_inputs,
                                    const std::optional<at::Tensor>& bias, int64_t num_outputs, int64_t num_inputs) {
  LinearTensors result{{nullptr, {}, pointer(bias), num_outputs, num_inputs}, {weight}};
  if (!scales && weight.scalar_type() == at::kByte) {
    result.weights.compressed = compressed_matrix(weight, num_outputs, num_inputs);
    return result;
  }
  if (!scales) {
    result.weights.packed = data<const pagoda::bf16>(weight);
    return result;
  }
  result.weights.quantized = {
      data<uint8_t>(weight), data<float>(*scales), zeros ? data<float>(*zeros) : nullptr, num_outputs,     num_inputs,
      scales->size(1),       group_size,           static_cast<int>(weight.size(2) / 16), quantizes_inputs};
  result.tensors.push_back(*scales);
  if (zeros) result.tensors.push_back(*zeros);
  return result;
}

// Who computes for this thread: its helpers, if it has any, else the threads of OpenMP.
pagoda::Team team_of(std::unique_ptr<pagoda::Helpers>& helpers);

// One caller at a time.
struct MixtureTensors {
  pagoda::Experts experts;
  pagoda::Mixture mixture{};
  std::optional<pagoda::Expert> shared;
  std::optional<pagoda::LinearWeights> shared_gate;
  std::vector<at::Tensor> kept;  // all that is pointed to
  std::unique_ptr<pagoda::Helpers> helpers;

  MixtureTensors() = default;
  MixtureTensors(const MixtureTensors&) = delete;
  MixtureTensors& operator=(const MixtureTensors&) = delete;
};

#endif
