// Quantized weights on tiles of AMX: rows packed for them, codes as tiles read them, and products of the two.
#pragma once

#include "linear/quantized_rows.h"

namespace pagoda {

#if defined(__AMX_BF16__)

namespace packed {

// Where things are in the words of a packed tile of rows: [parts, blocks, height, words], then up to three numbers for
// each part and row. A block is what one instruction takes; zeros follow a part's last input.
struct BlockLayout {
  int64_t num_inputs, part;
  int inputs_of_word, blocks, words;
  bool has_scales, has_starts, has_sums;  // as in RowPart

  BlockLayout(const QuantizedMatrix& w)
      : num_inputs(w.num_inputs),
        part(part_size(w)),
        inputs_of_word(w.quantizes_inputs ? 4 : 2),
        blocks(static_cast<int>((part / inputs_of_word + amx::kWords - 1) / amx::kWords)),
        words(static_cast<int>((part / inputs_of_word + blocks - 1) / blocks)),
        has_scales(w.quantizes_inputs),
        has_starts(w.quantizes_inputs && w.bits == 8),
        has_sums(w.zeros != nullptr) {}

  int64_t parts() const { return (num_inputs + part - 1) / part; }
  int64_t size(int64_t i) const { return std::min(part, num_inputs - i * part); }
  int64_t part_words() const { return int64_t{blocks} * words; }
  // A multiple of a line, so that no row of a tile lies in two.
  int64_t row_words() const { return (parts() * (part_words() + has_scales + has_starts + has_sums) + 15) / 16 * 16; }

  // Part i of a tile of `height` rows.
  RowPart at(const uint32_t* tile, int height, int64_t i) const {
    const uint32_t* scales = tile + (parts() * part_words() + i) * height;
    const uint32_t* starts = scales + (has_scales ? parts() * height : 0);
    const uint32_t* sums = starts + (has_starts ? parts() * height : 0);
    return {tile + i * part_words() * height, reinterpret_cast<const float*>(scales),
            reinterpret_cast<const int32_t*>(starts), reinterpret_cast<const float*>(sums)};
  }
};

// A tile of rows [height, num_inputs], of which the first `rows` are there, packed.
inline void pack_tile(const bf16* x, int64_t stride, int rows, int height, const BlockLayout& layout, uint32_t* to) {
  alignas(64) int8_t numbers[kMaxPart];
  const __mmask64 block_bytes = first_bytes(layout.words * 4);
  if (rows < height) std::memset(to, 0, static_cast<size_t>(layout.row_words() * height) * 4);
  for (int r = 0; r < rows; ++r, x += stride) {
    for (int64_t i = 0; i < layout.parts(); ++i) {
      const RowPart part = layout.at(to, height, i);
      const int64_t size = layout.size(i);
      const void* from = x + i * layout.part;
      if (layout.has_scales) {
        int32_t sum;
        const_cast<float*>(part.scales)[r] = quantize(x + i * layout.part, size, numbers, &sum);
        if (layout.has_starts) const_cast<int32_t*>(part.starts)[r] = -Codes<8>::kOffset * sum;
        if (layout.has_sums) const_cast<float*>(part.sums)[r] = static_cast<float>(sum);
        from = numbers;
      } else if (layout.has_sums) {
        const_cast<float*>(part.sums)[r] = sum_of(x + i * layout.part, size);
      }
      const int64_t bytes = size / layout.inputs_of_word * 4;
      for (int b = 0; b < layout.blocks; ++b) {
        const int64_t begin = int64_t{b} * layout.words * 4;
        const auto mask = block_bytes & first_bytes(std::max<int64_t>(0, bytes - begin));
        const __m512i block = _mm512_maskz_loadu_epi8(mask, static_cast<const char*>(from) + begin);
        _mm512_mask_storeu_epi8(const_cast<uint32_t*>(part.x) + (b * height + r) * layout.words, block_bytes, block);
      }
    }
  }
}

// Lines of the codes that come next. They come nearer a few at a time, between instructions on tiles: many would have
// to wait for each other.
struct Ahead {
  static constexpr int kTurns = 4;  // in a block
  const uint8_t *at, *end;
  int64_t lines;  // in a turn

  Ahead(const uint8_t* codes, int64_t bytes, int64_t turns)
      : at(codes), end(codes + bytes), lines((bytes + 64 * turns - 1) / (64 * turns)) {}
  void fetch() {
    for (int64_t i = 0; i < lines && at < end; ++i, at += 64)
      _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
  }
};

// The inputs of one part, a block after the other, against a panel of numbers, or of codes as they are: sums are in
// tiles 0 to 3.
template <bool kIsHigh, typename Kind, bool kIsCodes>
void multiply_blocks(const BlockLayout& layout, const uint32_t* x, int height, const uint8_t* w, Ahead& ahead) {
  const int words = layout.words;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kIsHigh) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int b = 0; b < layout.blocks; ++b) {
    ahead.fetch();
    _tile_loadd(6, w, 128);
    _tile_loadd(4, x, words * 4);
    ahead.fetch();
    _tile_loadd(7, w + 64, 128);
    if constexpr (kIsHigh) _tile_loadd(5, x + amx::kRows * words, words * 4);
    ahead.fetch();
    if constexpr (kIsCodes) {
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      if constexpr (kIsHigh) {
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
    } else if constexpr (Kind::kScales) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      if constexpr (kIsHigh) {
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kIsHigh) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    ahead.fetch();
    x += height * words;
    w += words * 128;
  }
}

template <bool kIsHigh>
void store_blocks(float* to) {
  constexpr int kStride = kPanel * 4;
  _tile_stored(0, to, kStride);
  _tile_stored(1, to + amx::kWords, kStride);
  if constexpr (kIsHigh) {
    _tile_stored(2, to + amx::kRows * kPanel, kStride);
    _tile_stored(3, to + amx::kRows * kPanel + amx::kWords, kStride);
  }
}

// As in part_tile, of sums that are there already: sums[r, :] += scales * (products - zeros * sum(x)).
template <typename Kind, bool kIsCodes, bool kHasZeros, bool kIsFirst>
void add_scaled(const float* products, int height, const RowPart& rows, const float* scales, const float* zeros,
                float* sums) {
  const __m512 low = _mm512_loadu_ps(scales), high = _mm512_loadu_ps(scales + kLanes);
  const __m512 low_zeros = kHasZeros ? _mm512_loadu_ps(zeros) : low;
  const __m512 high_zeros = kHasZeros ? _mm512_loadu_ps(zeros + kLanes) : high;
  const auto add = [&](int at, __m512 scale, __m512 zero, int r) __attribute__((always_inline)) {
    __m512 product, factor = scale;
    if constexpr (Kind::kScales) {
      __m512i sum = _mm512_load_si512(products + at);
      if constexpr (kIsCodes) sum = _mm512_add_epi32(sum, _mm512_set1_epi32(rows.starts[r]));
      product = _mm512_cvtepi32_ps(sum);
      factor = _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales[r]));
    } else {
      product = _mm512_load_ps(products + at);
    }
    if constexpr (kHasZeros) product = _mm512_fmadd_ps(zero, _mm512_set1_ps(-rows.sums[r]), product);
    const __m512 before = kIsFirst ? _mm512_setzero_ps() : _mm512_load_ps(sums + at);
    _mm512_store_ps(sums + at, _mm512_fmadd_ps(factor, product, before));
  };
  const auto add_row = [&](int r) __attribute__((always_inline)) {
    add(r * kPanel, low, low_zeros, r);
    add(r * kPanel + kLanes, high, high_zeros, r);
  };
  int r = 0;
  for (; r + 4 <= height; r += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) add_row(r + i);
  }
  for (; r < height; ++r) add_row(r);
}

// Weights of some parts of a panel, as tiles read them, and all that is scaled with them.
struct Blocks {
  const uint8_t* w;  // [parts, words, 32] of four bytes, but for the last part:
  const uint8_t* last_w;
  const float *scales, *zeros;  // of the panel; zeros may be null
  int64_t first, last;          // parts
  int64_t parts_of_group;
};

// sums [height, 32] of a tile of rows: parts [first, last) are added, each scaled by itself. While one is scaled the
// next is multiplied.
template <bool kIsHigh, typename Kind, bool kIsCodes, bool kHasZeros>
void add_blocks(const BlockLayout& layout, const uint32_t* tile, int height, const Blocks& blocks, Ahead& ahead,
                float* sums) {
  alignas(64) float products[kTileRows * kPanel];
  const int64_t bytes = layout.part_words() * 128;
  const auto multiply = [&](int64_t i) {
    const uint8_t* w = i + 1 == blocks.last ? blocks.last_w : blocks.w + (i - blocks.first) * bytes;
    multiply_blocks<kIsHigh, Kind, kIsCodes>(layout, layout.at(tile, height, i).x, height, w, ahead);
  };
  multiply(blocks.first);
  for (int64_t i = blocks.first; i < blocks.last; ++i) {
    store_blocks<kIsHigh>(products);
    if (i + 1 < blocks.last) multiply(i + 1);
    const int64_t at = i / blocks.parts_of_group * kPanel;
    const RowPart rows = layout.at(tile, height, i);
    const auto add =
        i == 0 ? add_scaled<Kind, kIsCodes, kHasZeros, true> : add_scaled<Kind, kIsCodes, kHasZeros, false>;
    add(products, height, rows, blocks.scales + at, blocks.zeros + (kHasZeros ? at : 0), sums);
  }
}

}  // namespace packed

#endif

}  // namespace pagoda
