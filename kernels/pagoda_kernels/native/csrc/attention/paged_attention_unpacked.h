// The products of few query rows with keys and values as they lie in the cache: packing the tile first would take
// longer, so keys are transposed and values paired in registers. The same instructions in the same order for each sum
// as multiply_all's on a packed tile, and so the same bits.
#pragma once

#include "attention/paged_attention_tile.h"

namespace pagoda::attention {

constexpr int kPairsAStep = 8;  // values, of the cache lines ahead

// products[row][kTileKeys] of keys with kM rows of head_dim. Calls ahead.step() with every square.
template <typename P, int kM, typename S>
void multiply_squares(const Cached<S>& keys, const P* query, int64_t head_dim, float* products, Prefetch& ahead) {
  for (int first = 0; first < keys.num_keys; first += kLanes) {
    Vec sums[kM];
    for (int64_t column = 0; column < head_dim; column += kLanes * kStep<P>) {
      Vec square[kLanes];
      load_square<P>(keys.base + column, keys.stride, keys.slots + first, keys.num_keys - first, head_dim - column,
                     square);
      ahead.step();
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        for (int m = 0; m < kM; ++m) {
          sums[m] = multiply_add(query + m * head_dim + column + i * kStep<P>, square[i], sums[m]);
        }
      }
    }
    for (int m = 0; m < kM; ++m) store(products + m * kTileKeys + first, sums[m]);
  }
}

template <typename P, typename S, int... kMs>
constexpr auto squares_by_rows(std::integer_sequence<int, kMs...>) {
  return std::array{&multiply_squares<P, kMs + 1, S>...};
}

// The same for up to kRows rows.
template <typename P, typename S>
void multiply_keys(const Cached<S>& keys, const P* query, int num_rows, int64_t head_dim, float* products,
                   Prefetch& ahead) {
  static constexpr auto kByRows = squares_by_rows<P, S>(std::make_integer_sequence<int, kRows>());
  kByRows[num_rows - 1](keys, query, head_dim, products, ahead);
}

// out[row] = factors[row] * out[row] + weights[row] * values of keys [0, end), for kM rows and kChunks chunks of kLanes
// * kStep columns.
template <typename P, int kM, int kChunks, typename S>
void multiply_chunks(const P* weights, const Cached<S>& values, int end, float* out, int64_t out_stride,
                     const float* factors, Prefetch& ahead) {
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
        const S* row = values.base + values.slots[key + i] * values.stride;
        columns[chunk * kStep<P> + i] = load_packed(row + chunk * kLanes * kStep<P>, -1, P{});
      }
      pair_values(columns + chunk * kStep<P>, P{});
    }
    for (int m = 0; m < kM; ++m) {
      for (int n = 0; n < kN; ++n) sums[m][n] = multiply_add(weights + m * kTileKeys + key, columns[n], sums[m][n]);
    }
  };
  for (int key = 0; key < end; key += kStep<P>) {
    if (key % kPairsAStep == 0) ahead.step();
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

// Whether there are kernels: others are packed, and for AMX all.
template <typename P>
inline bool can_stay_unpacked(int64_t num_rows, int64_t head_dim) {
  return !kUsesAmx<P> && num_rows <= kRows && head_dim % (kLanes * kStep<P>) == 0;
}

// The same for any number of chunks, in parts of like size. Weights and out: rows of kTileKeys and of head_dim.
template <typename P, typename S>
void multiply_values(int num_rows, const P* weights, const Cached<S>& values, int end, int64_t head_dim, float* out,
                     const float* factors, Prefetch& ahead) {
  constexpr int kWidth = kLanes * kStep<P>, kChunks = kVectors / kStep<P>;
  const int chunks = static_cast<int>(head_dim / kWidth), parts = (chunks + kChunks - 1) / kChunks;
  for (int part = 0; part < parts; ++part) {
    const int first = chunks * part / parts, count = chunks * (part + 1) / parts - first;
    const Cached<S> from{values.base + first * kWidth, values.stride, values.slots, values.num_keys};
    kMultiplyChunks<P, S>[num_rows - 1][count - 1](weights, from, end, out + first* kWidth, head_dim, factors, ahead);
  }
}

}  // namespace pagoda::attention
