// The softmax of a few query rows over one tile at once. To the bit what softmax_row makes of each of them alone, where
// nothing but the scale is asked for.
#pragma once

#include "paged_attention_tile.h"

namespace pagoda::attention {

#if defined(__AVX512F__)

constexpr int kRowsAtOnce = 8;
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
    quads[i] = combine(_mm512_shuffle_f32x4(halves[0], halves[1], 0xdd), _mm512_shuffle_f32x4(halves[0], halves[1], 0x88));
  }
  const __m512d low = _mm512_castps_pd(quads[0]), high = _mm512_castps_pd(quads[1]);
  const __m512 even = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), odd = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
  const __m512 pairs = combine(even, odd);
  const __m512 all = combine(pairs, _mm512_permute_ps(pairs, 0xb1));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0), all);
}

constexpr bool kCanBatchSoftmax = true;

// As softmax_row for `count` rows, a tile of products and of weights each. Products are overwritten.
template <typename P>
void softmax_rows(int count, float* products, P* weights, const int* begins, const int* ends, float scale, RowState* states,
                  float* factors) {
  const Vec factor(scale * kLog2E);
  uint64_t seen[kRowsAtOnce];  // a bit for each key
  bool sees_all = true;
  for (int r = 0; r < count; ++r) {
    seen[r] = first_keys(ends[r]) & ~first_keys(begins[r]);
    sees_all &= seen[r] == first_keys(kTileKeys);
  }
  __m512 rows[kRowsAtOnce];
  for (int r = count; r < kRowsAtOnce; ++r) rows[r] = _mm512_setzero_ps();
  for (int r = 0; r < count; ++r) {
    Vec top(-kInfinity);
    for (int i = 0; i < kKeyVectors; ++i) {
      float* at = products + r * kTileKeys + i * kLanes;
      Vec x = load(at) * factor;
      if (!sees_all) x = _mm512_mask_mov_ps(_mm512_set1_ps(-kInfinity), lanes_of(seen[r], i), x.v);
      top = max(top, x);
      store(at, x);
    }
    rows[r] = top.v;
  }
  // States are pairs of maximum and sum.
  const __mmask16 used = first_lanes(count), used_pairs = first_lanes(2 * count);
  const __m512 pairs = _mm512_maskz_loadu_ps(used_pairs, reinterpret_cast<const float*>(states));
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512 before = _mm512_permutexvar_ps(even, pairs);
  const __m512 sums = _mm512_permutexvar_ps(_mm512_add_epi32(even, _mm512_set1_epi32(1)), pairs);
  const __m512 tops = reduce_rows(rows, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
  const __m512 after = _mm512_max_ps(tops, before);
  const __mmask16 has_sum = _mm512_cmp_ps_mask(before, _mm512_set1_ps(-kInfinity), _CMP_NEQ_UQ);
  const __m512 shrunk = _mm512_maskz_mov_ps(has_sum, exp2_of_negative(Vec(before) - Vec(after)).v);
  _mm512_mask_storeu_ps(factors, used, shrunk);
  alignas(64) float maxima[kLanes];
  _mm512_store_ps(maxima, after);
  for (int r = 0; r < count; ++r) {
    Vec total;
    for (int i = 0; i < kKeyVectors; ++i) {
      Vec weight = weight_of(load(products + r * kTileKeys + i * kLanes) - Vec(maxima[r]), P{});
      if (!sees_all) weight = _mm512_maskz_mov_ps(lanes_of(seen[r], i), weight.v);
      total = total + weight;
      store(weights + r * kTileKeys + i * kLanes, weight);
    }
    rows[r] = total.v;
  }
  const __m512 more = reduce_rows(rows, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
  const __m512 totals = _mm512_fmadd_ps(sums, shrunk, more);
  const __m512i mixed = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  _mm512_mask_storeu_ps(reinterpret_cast<float*>(states), used_pairs, _mm512_permutex2var_ps(after, mixed, totals));
}

#else

constexpr bool kCanBatchSoftmax = false;
template <typename P>
void softmax_rows(int, float*, P*, const int*, const int*, float, RowState*, float*) {}

#endif

}  // namespace pagoda::attention
