// The product of weights with values as they lie in the cache, for so few query rows that packing the tile first would take
// longer: keys are paired in registers. The same instructions in the same order for each sum as multiply_all's on a packed
// tile, and so the same bits.
#pragma once

#include "paged_attention_tile.h"

namespace pagoda::attention {

// One tile's values at rows + slots[key] * stride.
template <typename S>
struct Values {
  const S* rows;
  int64_t stride;
  const int64_t* slots;
  int num_keys;
};

// out[row] = factors[row] * out[row] + weights[row] * values of keys [0, end), for kM rows and kChunks chunks of kLanes *
// kStep columns.
template <typename P, int kM, int kChunks, typename S>
void multiply_chunks(const P* weights, const Values<S>& values, int end, float* out, int64_t out_stride, const float* factors,
                     Prefetch& ahead) {
  constexpr int kN = kChunks * kStep<P>;
  Vec sums[kM][kN];
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) sums[m][n] = load(out + m * out_stride + n * kLanes) * Vec(factors[m]);
  }
  const auto add = [&](int key, int num_keys) {
    Vec columns[kN];
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      for (int i = 0; i < kStep<P>; ++i) {
        if (i >= num_keys) continue;
        const S* row = values.rows + values.slots[key + i] * values.stride;
        columns[chunk * kStep<P> + i] = load_packed(row + chunk * kLanes * kStep<P>, -1, P{});
      }
      pair_values(columns + chunk * kStep<P>, P{});
    }
    for (int m = 0; m < kM; ++m) {
      for (int n = 0; n < kN; ++n) sums[m][n] = multiply_add(weights + m * kTileKeys + key, columns[n], sums[m][n]);
    }
  };
  for (int key = 0; key < end; key += kStep<P>) {
    if (key % 8 == 0) ahead.step();
    if (key + kStep<P> <= values.num_keys) {
      add(key, kStep<P>);
    } else {
      add(key, 1);
    }
  }
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) store(out + m * out_stride + n * kLanes, sums[m][n]);
  }
}

template <typename P, typename S, int kM, int... kChunks>
constexpr auto by_chunks(std::integer_sequence<int, kChunks...>) {
  return std::array{&multiply_chunks<P, kM, kChunks + 1, S>...};
}
template <typename P, typename S, int... kMs>
constexpr auto by_rows_and_chunks(std::integer_sequence<int, kMs...>) {
  return std::array{by_chunks<P, S, kMs + 1>(std::make_integer_sequence<int, kVectors / kStep<P>>())...};
}
// kMultiplyChunks[rows - 1][chunks - 1].
template <typename P, typename S>
inline constexpr auto kMultiplyChunks = by_rows_and_chunks<P, S>(std::make_integer_sequence<int, kRows>());

// Whether there is a kernel: others are packed, and for AMX all.
template <typename P>
inline bool can_stay_unpacked(int64_t num_rows, int64_t head_dim) {
  return !kUsesAmx<P> && num_rows <= kRows && head_dim % (kLanes * kStep<P>) == 0;
}

// The same for any number of chunks, in parts of like size. Weights and out: rows of kTileKeys and of head_dim.
template <typename P, typename S>
void multiply_values(int num_rows, const P* weights, const Values<S>& values, int end, int64_t head_dim, float* out,
                     const float* factors, Prefetch& ahead) {
  constexpr int kWidth = kLanes * kStep<P>, kChunks = kVectors / kStep<P>;
  const int chunks = static_cast<int>(head_dim / kWidth), parts = (chunks + kChunks - 1) / kChunks;
  for (int part = 0; part < parts; ++part) {
    const int first = chunks * part / parts, count = chunks * (part + 1) / parts - first;
    const Values<S> from{values.rows + first * kWidth, values.stride, values.slots, values.num_keys};
    kMultiplyChunks<P, S>[num_rows - 1][count - 1](weights, from, end, out + first * kWidth, head_dim, factors, ahead);
  }
}

}  // namespace pagoda::attention
