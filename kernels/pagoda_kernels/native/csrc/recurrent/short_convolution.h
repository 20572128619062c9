// A causal convolution over the last few tokens of each channel; see pagoda_kernels/recurrent/short_convolution.py.
#pragma once

#include <cstdint>

namespace pagoda {

constexpr int kMaxConvWidth = 16;  // tokens

template <typename T>
struct ShortConvolution {
  int64_t num_seqs, num_channels, width;
  const int64_t* starts;  // [num_seqs + 1] first token of each sequence
  const int64_t* rows;    // [num_seqs] of the states
  const int64_t* kept;    // [num_tokens] further rows, or -1; or null
  const T* x;             // [num_tokens, num_channels]
  int64_t x_stride;       // of a token
  const T* weight;        // [num_channels, width]
  const T* bias;          // [num_channels]; or null
  bool has_silu;
  T* states;  // [rows, width - 1, num_channels]
  T* out;     // [num_tokens, num_channels]
};

template <typename T>
void short_convolution(const ShortConvolution<T>& convolution, int num_threads);

}  // namespace pagoda
