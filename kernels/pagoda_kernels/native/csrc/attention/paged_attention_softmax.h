// The softmax of a few query rows over one tile at once. To the bit what softmax_row makes of each of them alone, where
// nothing but the scale is asked for.
#pragma once

#include "attention/paged_attention_tile.h"

namespace pagoda::attention {

constexpr int kRowsAtOnce = 8;

#if defined(__AVX512F__)

static_assert(kRows <= kRowsAtOnce && kTileKeys == 64);

inline uint64_t first_keys(int n) { return n == kTileKeys ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

inline __mmask16 lanes_of(uint64_t keys, int vector) { return static_cast<__mmask16>(keys >> (vector * kLanes)); }

// Lane r of the result is all lanes of rows[r] combined, in the order of _mm512_reduce_add_ps.
template <typename Combine>
inline __m512 reduce_rows(const __m512* rows, const Combine& combine) {
  __m512 quads[2];
  for (int i = 0; i < 2; ++i) {
    __m512 halves[2];
    for (int j = 0; j < 2; ++j) {
      const __m512 a = rows[4 * i + 2 * j], b = rows[4 * i + 2 * j + 1];
      halves[j] = combine(_mm512_shuffle_f32x4(a, b, 0xee), _mm512_shuffle_f32x4(a, b, 0x44));
    }
    quads[i] =
        combine(_mm512_shuffle_f32x4(halves[0], halves[1], 0xdd), _mm512_shuffle_f32x4(halves[0], halves[1], 0x88));
  }
  const __m512d low = _mm512_castps_pd(quads[0]), high = _mm512_castps_pd(quads[1]);
  const __m512 even = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
               odd = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
  const __m512 pairs = combine(even, odd);
  const __m512 all = combine(pairs, _mm512_permute_ps(pairs, 0xb1));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0), all);
}

// Weights of one row's keys, a vector each.
inline void store_weights(float* to, const Vec* weights) {
  for (int i = 0; i < kKeyVectors; ++i) store(to + i * kLanes, weights[i]);
}
inline void store_weights(bf16* to, const Vec* weights) {
#if defined(__AVX512BF16__)
  for (int i = 0; i < kKeyVectors; i += 2) {
    _mm512_storeu_si512(to + i * kLanes, (__m512i)_mm512_cvtne2ps_pbh(weights[i + 1].v, weights[i].v));
  }
#else
  for (int i = 0; i < kKeyVectors; ++i) store(to + i * kLanes, weights[i]);
#endif
}

// As softmax_row for kCount rows, a tile of products and of weights each. `seen`: a bit for each key of each row.
template <int kCount, bool kSeesAll, typename P>
void softmax_rows(const float* products, P* weights, const uint64_t* seen, float scale, RowState* states,
                  float* factors) {
  const Vec factor(scale * kLog2E);
  __m512 rows[kRowsAtOnce];
#pragma GCC unroll 8
  for (int r = 0; r < kRowsAtOnce; ++r) {
    Vec top(-kInfinity);
#pragma GCC unroll 4
    for (int i = 0; i < kKeyVectors && r < kCount; ++i) {
      Vec x = load(products + r * kTileKeys + i * kLanes);
      if (!kSeesAll) x = _mm512_mask_mov_ps(_mm512_set1_ps(-kInfinity), lanes_of(seen[r], i), x.v);
      top = max(top, x);
    }
    rows[r] = top.v;
  }
  // States are pairs of maximum and sum.
  constexpr auto kUsed = static_cast<__mmask16>((1 << kCount) - 1),
                 kUsedPairs = static_cast<__mmask16>((1 << 2 * kCount) - 1);
  const __m512 pairs = _mm512_maskz_loadu_ps(kUsedPairs, reinterpret_cast<const float*>(states));
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512 before = _mm512_permutexvar_ps(even, pairs);
  const __m512 sums = _mm512_permutexvar_ps(_mm512_add_epi32(even, _mm512_set1_epi32(1)), pairs);
  const Vec tops = Vec(reduce_rows(rows, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); })) * factor;
  const __mmask16 is_higher = _mm512_cmp_ps_mask(tops.v, _mm512_add_ps(before, _mm512_set1_ps(kSlack)), _CMP_GT_OQ);
  const __m512 after = _mm512_mask_mov_ps(before, is_higher, tops.v);
  const __mmask16 has_sum = _mm512_cmp_ps_mask(before, _mm512_set1_ps(-kInfinity), _CMP_NEQ_UQ);
  const __m512 shrunk = _mm512_maskz_mov_ps(has_sum, power_of_two(Vec(before) - Vec(after)).v);
  _mm512_mask_storeu_ps(factors, kUsed, shrunk);
  alignas(64) float offsets[kLanes];
  _mm512_store_ps(offsets, _mm512_sub_ps(_mm512_setzero_ps(), after));
#pragma GCC unroll 8
  for (int r = 0; r < kCount; ++r) {
    Vec weight[kKeyVectors], total;
#pragma GCC unroll 4
    for (int i = 0; i < kKeyVectors; ++i) {
      weight[i] = weight_of(fma(load(products + r * kTileKeys + i * kLanes), factor, Vec(offsets[r])), P{});
      if (!kSeesAll) weight[i] = _mm512_maskz_mov_ps(lanes_of(seen[r], i), weight[i].v);
      total = total + weight[i];
    }
    store_weights(weights + r * kTileKeys, weight);
    rows[r] = total.v;
  }
  const __m512 more = reduce_rows(rows, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
  const __m512 totals = _mm512_fmadd_ps(sums, shrunk, more);
  const __m512i mixed = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  _mm512_mask_storeu_ps(reinterpret_cast<float*>(states), kUsedPairs, _mm512_permutex2var_ps(after, mixed, totals));
}

template <bool kSeesAll, typename P, int... kCounts>
constexpr auto softmax_by_count(std::integer_sequence<int, kCounts...>) {
  return std::array{&softmax_rows<kCounts + 1, kSeesAll, P>...};
}

// For `count` rows, each of which sees keys [begins[row], ends[row]) of the tile.
template <typename P>
void softmax_rows(int count, const float* products, P* weights, const int* begins, const int* ends, float scale,
                  RowState* states, float* factors) {
  static constexpr auto kOfSome = softmax_by_count<false, P>(std::make_integer_sequence<int, kRowsAtOnce>());
  static constexpr auto kOfAll = softmax_by_count<true, P>(std::make_integer_sequence<int, kRowsAtOnce>());
  uint64_t seen[kRowsAtOnce];
  bool sees_all = true;
  for (int r = 0; r < count; ++r) {
    seen[r] = first_keys(ends[r]) & ~first_keys(begins[r]);
    sees_all &= seen[r] == first_keys(kTileKeys);
  }
  (sees_all ? kOfAll : kOfSome)[count - 1](products, weights, seen, scale, states, factors);
}

constexpr bool kCanBatchSoftmax = true;

#else

constexpr bool kCanBatchSoftmax = false;
template <typename P>
void softmax_rows(int, const float*, P*, const int*, const int*, float, RowState*, float*) {}

#endif

}  // namespace pagoda::attention
