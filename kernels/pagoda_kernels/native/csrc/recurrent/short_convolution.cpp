#include "recurrent/short_convolution.h"

#include <algorithm>

#include "simd/activations.h"
#include "simd/vec.h"
#include "threads/parallel.h"

namespace pagoda {
namespace {

constexpr int64_t kGrainValues = 1 << 13;  // of the output, that are worth a thread

// One sequence's tokens in channels [channel, channel + lanes). kWidth: tokens that a channel sees; 0: only the
// convolution knows.
template <int kWidth, typename T>
void run(const ShortConvolution<T>& one, int64_t seq, int64_t channel, int lanes) {
  constexpr int kRegisters = kWidth ? kWidth : kMaxConvWidth;
  const int width = kWidth ? kWidth : static_cast<int>(one.width);
  const int64_t channels = one.num_channels;
  const auto get = [&](const T* from) { return lanes == kLanes ? load(from) : load(from, lanes); };
  const auto put = [&](T* to, Vec value) { lanes == kLanes ? store(to, value) : store(to, value, lanes); };
  const auto state_of = [&](int64_t row) { return one.states + row * (width - 1) * channels + channel; };
  Vec weights[kRegisters], inputs[kRegisters];
  for (int i = 0; i < width; ++i) {
    float column[kLanes] = {};
    for (int lane = 0; lane < lanes; ++lane) column[lane] = to_float(one.weight[(channel + lane) * width + i]);
    weights[i] = load(column);
  }
  const Vec bias = one.bias != nullptr ? get(one.bias + channel) : Vec();
  T* state = state_of(one.rows[seq]);
  for (int i = 0; i + 1 < width; ++i) inputs[i] = get(state + i * channels);
  for (int64_t token = one.starts[seq]; token < one.starts[seq + 1]; ++token) {
    inputs[width - 1] = get(one.x + token * one.x_stride + channel);
    Vec sum = bias;
    for (int i = 0; i < width; ++i) sum = fma(inputs[i], weights[i], sum);
    put(one.out + token * channels + channel, one.has_silu ? Silu{}(sum) : sum);
    for (int i = 0; i + 1 < width; ++i) inputs[i] = inputs[i + 1];
    if (one.kept != nullptr && one.kept[token] >= 0) {
      T* kept = state_of(one.kept[token]);
      for (int i = 0; i + 1 < width; ++i) put(kept + i * channels, inputs[i]);
    }
  }
  for (int i = 0; i + 1 < width; ++i) put(state + i * channels, inputs[i]);
}

}  // namespace

template <typename T>
void short_convolution(const ShortConvolution<T>& one, int num_threads) {
  const int64_t blocks = (one.num_channels + kLanes - 1) / kLanes;
  const int64_t tokens = std::max<int64_t>(1, one.num_seqs ? one.starts[one.num_seqs] / one.num_seqs : 1);
  const int64_t grain = std::max<int64_t>(1, kGrainValues / (tokens * kLanes));
  parallel_for(one.num_seqs * blocks, grain, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t seq = i / blocks, channel = i % blocks * kLanes;
      const int lanes = static_cast<int>(std::min<int64_t>(kLanes, one.num_channels - channel));
      switch (one.width) {
        case 3:
          run<3>(one, seq, channel, lanes);
          break;
        case 4:
          run<4>(one, seq, channel, lanes);
          break;
        default:
          run<0>(one, seq, channel, lanes);
      }
    }
  });
}

template void short_convolution(const ShortConvolution<float>&, int);
template void short_convolution(const ShortConvolution<bf16>&, int);

}  // namespace pagoda
