// Rows of bfloat16 as they meet quantized weights: packed, and taken to eight bits themselves if that is asked for.
#pragma once

#include "simd/packed_tiles.h"
#include "linear/quantized_codes.h"
#include "linear/quantized_tiles.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace packed {

// A mask of the first of 64 bytes.
inline __mmask64 first_bytes(int64_t count) { return count >= 64 ? ~__mmask64{0} : (__mmask64{1} << count) - 1; }

// The inputs of one part of a row in eight bits: x ~ scale * to, by the largest magnitude. `size` is a multiple of 4,
// at most kMaxPart. What is next to nothing becomes 0; of a part with a NaN or an infinity the scale is one.
inline float quantize(const bf16* x, int64_t size, int8_t* to, int32_t* sum) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < size; i += 32) {
    const auto mask = static_cast<__mmask32>((uint64_t{1} << std::min<int64_t>(32, size - i)) - 1);
    most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_maskz_loadu_epi16(mask, x + i), magnitude));
  }
  most = _mm512_max_epu32(_mm512_srli_epi32(most, 16), _mm512_and_si512(most, _mm512_set1_epi32(0xffff)));
  const float largest = to_float(bf16{static_cast<uint16_t>(_mm512_reduce_max_epu32(most))});
  *sum = 0;
  if (largest < 0x1p-100f) {
    std::memset(to, 0, static_cast<size_t>(size));
    return 0.0f;
  }
  const __m512 factor = _mm512_set1_ps(127.0f / largest);
  __m512i total = _mm512_setzero_si512();
  // Lane l of four vectors' packed bytes holds four of each, in their order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int64_t i = 0; i < size; i += 4 * kLanes) {
    const int64_t left = size - i;
    const auto integers = [&](int vector) __attribute__((always_inline)) {
      const auto count = static_cast<int>(std::clamp<int64_t>(left - vector * kLanes, 0, kLanes));
      const Vec numbers = load(x + i + vector * kLanes, count);
      return _mm512_cvtps_epi32(_mm512_mul_ps(numbers.v, factor));  // what is not finite becomes the least one, so -128
    };
    const __m512i low = _mm512_packs_epi32(integers(0), integers(1)),
                  high = _mm512_packs_epi32(integers(2), integers(3));
    const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
    _mm512_mask_storeu_epi8(to + i, first_bytes(left), bytes);
    total = _mm512_dpbusd_epi32(total, _mm512_set1_epi8(1), bytes);
  }
  *sum = _mm512_reduce_add_epi32(total);
  return largest / 127.0f;
}

// Where things are in the words of a packed tile of rows: their inputs, part by part, then three numbers for each part.
struct RowLayout {
  int64_t num_inputs, part, inputs_of_word;
  bool has_scales, has_sums;

  RowLayout(const QuantizedMatrix& w)
      : num_inputs(w.num_inputs),
        part(part_size(w)),
        inputs_of_word(w.quantizes_inputs ? 4 : 2),
        has_scales(w.quantizes_inputs),
        has_sums(w.zeros != nullptr) {}

  int64_t steps() const { return num_inputs / inputs_of_word; }
  int64_t parts() const { return (num_inputs + part - 1) / part; }
  int64_t row_words() const { return steps() + parts() * (2 * has_scales + has_sums); }

  // Part i of a tile of `height` rows.
  RowPart at(const uint32_t* tile, int height, int64_t i) const {
    const uint32_t* inputs = tile + i * part / inputs_of_word * height;
    const uint32_t *scales = tile + (steps() + i) * height, *starts = scales + parts() * height;
    const uint32_t* sums = has_scales ? starts + parts() * height : scales;
    return {inputs, reinterpret_cast<const float*>(scales), reinterpret_cast<const int32_t*>(starts),
            reinterpret_cast<const float*>(sums)};
  }
};

// Sum of a row's inputs of one part.
inline float sum_of(const bf16* x, int64_t size) {
  Vec total;
  for (int64_t i = 0; i < size; i += kLanes) {
    total = total + load(x + i, static_cast<int>(std::min<int64_t>(kLanes, size - i)));
  }
  return sum(total);
}

// A tile of rows [height, num_inputs], of which the first `rows` are there, packed. `offset` is of the codes that they
// will meet.
inline void pack_tile(const bf16* x, int64_t stride, int rows, int height, const RowLayout& layout, int offset,
                      uint32_t* to) {
  alignas(64) int8_t numbers[kTileRows][kMaxPart];
  for (int64_t i = 0; i < layout.parts(); ++i) {
    const bf16* from = x + i * layout.part;
    const int64_t size = std::min(layout.part, layout.num_inputs - i * layout.part),
                  words = size / layout.inputs_of_word;
    const RowPart part = layout.at(to, height, i);
    auto* inputs = const_cast<uint32_t*>(part.x);
    auto *scales = const_cast<float*>(part.scales), *sums = const_cast<float*>(part.sums);
    auto* starts = const_cast<int32_t*>(part.starts);
    for (int r = 0; r < rows; ++r) {
      if (layout.has_scales) {
        int32_t sum;
        scales[r] = quantize(from + r * stride, size, numbers[r], &sum);
        starts[r] = -offset * sum;
        if (layout.has_sums) sums[r] = static_cast<float>(sum);
      } else if (layout.has_sums) {
        sums[r] = sum_of(from + r * stride, size);
      }
    }
    if (layout.has_scales) {
      pack_rows(numbers, kMaxPart, rows, words, inputs, height, height);
    } else {
      pack_rows(from, stride * 2, rows, words, inputs, height, height);
    }
  }
}

}  // namespace packed

#endif

}  // namespace pagoda
