// The products of few query rows with keys and values of all heads, as they lie in the cache: packing would take
// longer. Here are those of AMX; each sum is made of the same products in the same order as multiply_in_tiles's on a
// packed tile, and so of the same bits. Those of vectors are multiply_keys and multiply_values of
// paged_attention_unpacked.h.
#pragma once

#include "attention/paged_attention_unpacked.h"

namespace pagoda::attention {

constexpr int kKeysInPlace = 16;  // the rows of one register: keys of a block, one after the other
// Query rows of a KV head: for AMX, which takes them as columns, and for vectors, which load and store the sums of more
// of them too often.
template <typename P>
constexpr int kRowsInPlace = kUsesAmx<P> ? 16 : 2;
constexpr int kValueRowsInPlace = 2;  // with more of them, values are packed
constexpr int kValuesAStep = 4;       // of the cache lines ahead

// So many keys, or values, of all heads come before the next ones. Vectors go through the cache nearly as it lies: a
// core then has keys and values of 12 heads of 64 out of memory at 28 GB/s instead of 25.
template <typename P>
constexpr int kPartInPlace = kUsesAmx<P> ? kTileKeys : 16;

// A quantized cache has scales that lie elsewhere.
template <typename P, typename S>
constexpr bool kHasInPlace = kUsesAmx<P> ? std::is_same_v<P, S> : !std::is_same_v<S, int8_t>;

template <typename P, typename S>
inline bool can_stay_in_place(int64_t rows, int64_t head_dim, int64_t block_size) {
  if (!kHasInPlace<P, S> || rows > kRowsInPlace<P>) return false;
  if (!kUsesAmx<P>) return can_stay_unpacked<P>(rows, head_dim);
  return head_dim % (kStep<P> * kAmxSteps) == 0 && block_size % kKeysInPlace == 0;
}

#if defined(__AMX_BF16__)

// products[row][kTileKeys] of kGroups * kKeysInPlace keys. columns: [pair of the inner dimension][row] pairs, `blocks`
// times amx::kWords of them; the registers are set for as many columns. Calls ahead.step() with every block of every
// group. What follows the last key makes products that are not read.
template <int kGroups>
void multiply_keys(const Cached<bf16>& keys, const uint32_t* columns, int num_rows, int64_t blocks, float* products,
                   Prefetch& ahead) {
  const int64_t stride = keys.stride * 2, width = num_rows * 4;
  amx::settle(columns);
  amx::settle(keys.base);
  // The numbers of registers must be literals.
  _tile_zero(0);
  if constexpr (kGroups > 1) _tile_zero(1);
  if constexpr (kGroups > 2) _tile_zero(2);
  if constexpr (kGroups > 3) _tile_zero(3);
  for (int64_t i = 0; i < blocks; ++i) {
    const auto rows = [&](int group) {
      ahead.step();
      return keys.base + keys.slots[group * kKeysInPlace] * keys.stride + i * amx::kWords * 2;
    };
    _tile_loadd(6, columns + i * amx::kWords * num_rows, width);
    _tile_loadd(4, rows(0), stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kGroups > 1) {
      _tile_loadd(5, rows(1), stride);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (kGroups > 2) {
      _tile_loadd(4, rows(2), stride);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (kGroups > 3) {
      _tile_loadd(5, rows(3), stride);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  alignas(64) float turned[kTileKeys * kRowsInPlace<bf16>];  // [key][row]
  float* sums = num_rows == 1 ? products : turned;
  const auto sums_of = [&](int group) { return sums + group * kKeysInPlace * num_rows; };
  _tile_stored(0, sums_of(0), width);
  if constexpr (kGroups > 1) _tile_stored(1, sums_of(1), width);
  if constexpr (kGroups > 2) _tile_stored(2, sums_of(2), width);
  if constexpr (kGroups > 3) _tile_stored(3, sums_of(3), width);
  if (num_rows == 1) return;
  amx::settle(turned);
  for (int first = 0; first < kGroups * kKeysInPlace; first += kLanes) {
    Vec square[kLanes];
    for (int i = 0; i < kLanes; ++i) square[i] = load(turned + (first + i) * num_rows, num_rows);
    transpose(square);
    for (int row = 0; row < num_rows; ++row) store(products + row * kTileKeys + first, square[row]);
  }
}

inline void multiply_keys(const Cached<bf16>& keys, const bf16* columns, int num_rows, int64_t head_dim,
                          float* products, Prefetch& ahead) {
  static constexpr std::array kByGroups{&multiply_keys<1>, &multiply_keys<2>, &multiply_keys<3>, &multiply_keys<4>};
  kByGroups[(keys.num_keys - 1) / kKeysInPlace](keys, reinterpret_cast<const uint32_t*>(columns), num_rows,
                                                head_dim / (2 * amx::kWords), products, ahead);
}

// Even and odd ones of 32 elements.
inline Vec evens(__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline Vec odds(__m512i x) { return _mm512_castsi512_ps(_mm512_andnot_si512(_mm512_set1_epi32(0xffff), x)); }

// Two vectors of neighbours to their even and odd elements, and back.
inline void part(Vec* v) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const Vec first(_mm512_permutex2var_ps(v[0].v, even, v[1].v));
  v[1] = _mm512_permutex2var_ps(v[0].v, _mm512_add_epi32(even, _mm512_set1_epi32(1)), v[1].v);
  v[0] = first;
}
inline void join(Vec* v) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const Vec first(_mm512_permutex2var_ps(v[0].v, low, v[1].v));
  v[1] = _mm512_permutex2var_ps(v[0].v, _mm512_add_epi32(low, _mm512_set1_epi32(8)), v[1].v);
  v[0] = first;
}

// out[row] = factors[row] * out[row] + weights[row] * values of keys [0, end), for kM rows and kChunks times 32
// columns, as AMX sums: of 32 keys even ones and odd ones by themselves, then both. Calls ahead.step() every
// kValuesAStep keys.
template <int kM, int kChunks>
void multiply_values(const bf16* weights, const Cached<bf16>& values, int end, float* out, int64_t out_stride,
                     const float* factors, Prefetch& ahead) {
  constexpr int kN = 2 * kChunks;
  Vec sums[kM][kN];
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) sums[m][n] = load(out + m * out_stride + n * kLanes) * Vec(factors[m]);
    for (int n = 0; n < kN; n += 2) part(sums[m] + n);
  }
  for (int first = 0; first < end; first += 2 * amx::kWords) {
    Vec parts[2][kM][kN];
    const auto add = [&](int key, auto& to) {
      const bf16* row = values.base + values.slots[key] * values.stride;
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const __m512i x = _mm512_loadu_si512(row + chunk * 2 * kLanes);
        for (int m = 0; m < kM; ++m) {
          const Vec weight(to_float(weights[m * kTileKeys + key]));
          to[m][2 * chunk] = fma(weight, evens(x), to[m][2 * chunk]);
          to[m][2 * chunk + 1] = fma(weight, odds(x), to[m][2 * chunk + 1]);
        }
      }
    };
    const int last = std::min(first + 2 * amx::kWords, end);
    int key = first;
    for (; key + kValuesAStep <= last; key += kValuesAStep) {
      ahead.step();
      for (int i = 0; i < kValuesAStep; ++i) add(key + i, parts[i % 2]);
    }
    if (key < last) ahead.step();
    for (; key < last; ++key) add(key, parts[key % 2]);
    for (int m = 0; m < kM; ++m) {
      for (int n = 0; n < kN; ++n) sums[m][n] = sums[m][n] + (parts[0][m][n] + parts[1][m][n]);
    }
  }
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; n += 2) join(sums[m] + n);
    for (int n = 0; n < kN; ++n) store(out + m * out_stride + n * kLanes, sums[m][n]);
  }
}

// The same for up to kValueRowsInPlace rows, and any number of chunks. Weights and out: rows of kTileKeys and of
// head_dim.
inline void multiply_values(int num_rows, const bf16* weights, const Cached<bf16>& values, int end, int64_t head_dim,
                            float* out, const float* factors, Prefetch& ahead) {
  constexpr int64_t kChunk = 2 * kLanes;
  static constexpr std::array kOne{&multiply_values<1, 1>, &multiply_values<2, 1>};
  static constexpr std::array kTwo{&multiply_values<1, 2>, &multiply_values<2, 2>};
  for (int64_t column = 0; column < head_dim; column += 2 * kChunk) {
    const auto& kernels = head_dim - column == kChunk ? kOne : kTwo;
    const Cached<bf16> from{values.base + column, values.stride, values.slots, values.num_keys};
    kernels[num_rows - 1](weights, from, end, out + column, head_dim, factors, ahead);
  }
}

#endif

}  // namespace pagoda::attention
