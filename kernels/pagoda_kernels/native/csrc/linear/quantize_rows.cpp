// Rows of floats to small integers with scales, straight into the tiles that products read.
#include <algorithm>
#include <limits>

#include "linear/quantized_codes.h"
#include "threads/parallel.h"

namespace pagoda {

namespace {

// Inputs of a tile's outputs that are quantized before they are put in their places: they stay in the nearest cache.
constexpr int64_t kStretch = 256;
// What the end of four bits may stand for, of the largest value of a group; SHARES in quantized_matrix.py.
constexpr float kShares[] = {1.0f, 0.93f, 0.86f};

template <typename T>
Vec lanes(const T* x, int64_t i, int64_t size) {
  return i + kLanes <= size ? load(x + i) : load(x + i, static_cast<int>(size - i));
}

template <int kBits>
Vec nearest(Vec x) {
  constexpr float kOffset = Codes<kBits>::kOffset;
  return min(max(round_even(x), Vec(-kOffset)), Vec(kOffset - 1.0f));
}

// A sum of float32 in float64.
struct WideSum {
#if defined(__AVX512F__)
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
  void add(Vec x) {
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(x.v)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1)));
  }
  double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
#else
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  void add(Vec x) {
    low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(x.v)));
    high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(x.v, 1)));
  }
  double total() const {
    double sums[4];
    _mm256_storeu_pd(sums, _mm256_add_pd(low, high));
    return sums[0] + sums[1] + sums[2] + sums[3];
  }
#endif
};

// The squared errors of values that become whole multiples of a scale, each as float32.
template <typename T>
double squared_errors(const T* x, int64_t size, float scale) {
  WideSum sum;
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec value = lanes(x, i, size);
    const Vec error = fma(nearest<4>(value / Vec(scale)), Vec(scale), Vec(0.0f) - value);
    sum.add(error * error);
  }
  return sum.total();
}

// Of a group, which has values besides 0.
template <int kBits, typename T>
float scale_of(const T* x, int64_t size) {
  Vec most, least;  // 0 is between them, or follows the last value
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec value = lanes(x, i, size);
    most = max(value, most);
    least = max(Vec(0.0f) - value, least);
  }
  const float above = maximum(most), below = maximum(least);
  if (above == 0.0f && below == 0.0f) return 1.0f;
  if constexpr (kBits == 8) return std::max(above, below) / 127.0f;
  const float scale = (below >= above ? -below : above) / -8.0f;
  float best = scale;
  double fewest = std::numeric_limits<double>::infinity();
  for (const float share : kShares) {
    const double errors = squared_errors(x, size, scale * share);
    if (errors < fewest) {
      fewest = errors;
      best = scale * share;
    }
  }
  return best;
}

// Codes of `size` inputs, a byte each.
template <int kBits, typename T>
void to_codes(const T* x, int64_t size, float inverse, uint8_t* out) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec number = nearest<kBits>(lanes(x, i, size) * Vec(inverse));
#if defined(__AVX512F__)
    const __m512i code = _mm512_add_epi32(_mm512_cvtps_epi32(number.v), _mm512_set1_epi32(Codes<kBits>::kOffset));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtepi32_epi8(code));
#else
    int32_t whole[kLanes];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(whole), _mm256_cvtps_epi32(number.v));
    for (int j = 0; j < kLanes; ++j) out[i + j] = static_cast<uint8_t>(whole[j] + Codes<kBits>::kOffset);
#endif
  }
}

// Puts the codes of outputs `first` to `last` of a tile where they belong; the others of a quad stay.
template <int kBits>
void put(const uint32_t (*codes)[kStretch / 4], int first, int last, int64_t quads, uint32_t* to) {
  for (int64_t q = 0; q < quads; ++q, to += Codes<kBits>::kQuadBytes / 4) {
    for (int row = first; row < last; ++row) {
      if constexpr (kBits == 8) {
        to[row] = codes[row][q];
      } else {
        uint32_t& word = to[row % 16];
        const int shift = row / 16 * 4;
        word = (word & ~(0x0f0f0f0fu << shift)) | codes[row][q] << shift;
      }
    }
  }
}

// Outputs `first` to `last` of a tile; x is the row of the first one.
template <int kBits, typename T>
void quantize_tile(const T* x, int64_t stride, const WritableMatrix& w, int64_t tile, int first, int last) {
  alignas(64) uint32_t codes[kTile][kStretch / 4];
  float inverses[kTile];
  for (int64_t group = 0; group < w.num_groups; ++group) {
    const int64_t begin = group * w.group_size, end = std::min(begin + w.group_size, w.num_inputs);
    for (int row = first; row < last; ++row) {
      const float scale = scale_of<kBits>(x + (row - first) * stride + begin, end - begin);
      w.scales[(tile * w.num_groups + group) * kTile + row] = scale;
      inverses[row] = 1.0f / scale;
    }
    for (int64_t k = begin; k < end; k += kStretch) {
      const int64_t size = std::min(kStretch, end - k);
      for (int row = first; row < last; ++row) {
        to_codes<kBits>(x + (row - first) * stride + k, size, inverses[row], reinterpret_cast<uint8_t*>(codes[row]));
      }
      uint8_t* to = w.codes + (tile * w.num_inputs + k) / 4 * Codes<kBits>::kQuadBytes;
      put<kBits>(codes, first, last, size / 4, reinterpret_cast<uint32_t*>(to));
    }
  }
}

}  // namespace

template <typename T>
void quantize_rows(const T* x, int64_t x_stride, int64_t num_rows, int64_t first_row, const WritableMatrix& weight,
                   int num_threads) {
  if (num_rows == 0) return;
  const int64_t first_tile = first_row / kTile, last_row = first_row + num_rows;
  const int64_t num_tiles = (last_row + kTile - 1) / kTile - first_tile;
  parallel_for(num_tiles, 1, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t tile = first_tile + begin; tile < first_tile + end; ++tile) {
      const int64_t row = std::max(first_row, tile * kTile);
      const int first = static_cast<int>(row - tile * kTile);
      const int last = static_cast<int>(std::min<int64_t>(last_row - tile * kTile, kTile));
      const T* from = x + (row - first_row) * x_stride;
      if (weight.bits == 8) {
        quantize_tile<8>(from, x_stride, weight, tile, first, last);
      } else {
        quantize_tile<4>(from, x_stride, weight, tile, first, last);
      }
    }
  });
}

template void quantize_rows(const float*, int64_t, int64_t, int64_t, const WritableMatrix&, int);
template void quantize_rows(const bf16*, int64_t, int64_t, int64_t, const WritableMatrix&, int);

}  // namespace pagoda
