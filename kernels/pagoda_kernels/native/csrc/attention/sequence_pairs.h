// Attention of one head of one sequence in bfloat16: products of pairs with sums in float32, and weights of keys that
// are rounded to bfloat16 before values are summed up.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd/packed_tiles.h"
#include "ops.h"
#include "simd/rough.h"

namespace pagoda {

#if defined(__AVX512BF16__)

class PairHead {
 public:
  void attend(const SequenceBatch& batch, const bf16* query, const bf16* key, const bf16* value, bf16* out,
              int64_t length, float slope) {
    const packed::Tiles tiles(length, kHeight);
    const int64_t blocks = (batch.head_dim + 2 * kWords - 1) / (2 * kWords), panels = (length + kPanel - 1) / kPanel;
    const int64_t value_panels = (batch.value_dim + kPanel - 1) / kPanel;
    pack_keys(batch, key, length, blocks, panels);
    pack_values(batch, value, length, panels, value_panels);
    queries_.of(blocks * kHeight * kWords);
    uint32_t* weights = weights_.of(panels * kHeight * kWords);
    float* scores = scores_.of(panels * kHeight * kPanel);
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const int64_t first = tiles.begin(tile);
      const int height = tiles.height_of(tile), rows = tiles.rows(tile);
      const int64_t seen = batch.is_causal ? (first + rows + kPanel - 1) / kPanel : panels;
      pack_queries(batch, query + first * batch.query_stride, rows, height, blocks);
      const Products products(height);
      for (int64_t panel = 0; panel < seen; ++panel) {
        products.run(queries_.data(), keys_.data() + panel * blocks * kWords * kPanel, blocks,
                     scores + panel * height * kPanel);
      }
      for (int r = 0; r < rows; ++r) {
        const int64_t visible = batch.is_causal ? first + r + 1 : length;
        totals_[r] =
            soften(scores + r * kPanel, weights + r * kWords, height, seen, visible, first + r, batch.scale, slope);
      }
      alignas(64) float sums[kHeight * kPanel];
      for (int64_t panel = 0; panel < value_panels; ++panel) {
        products.run(weights, values_.data() + panel * panels * kWords * kPanel, seen, sums);
        const int64_t at = panel * kPanel;
        for (int r = 0; r < rows; ++r) {
          write(sums + r * kPanel, totals_[r], out + (first + r) * batch.out_stride + at,
                std::min<int64_t>(kPanel, batch.value_dim - at));
        }
      }
    }
  }

 private:
  static constexpr int64_t kPanel = packed::kPanel;  // keys, or values of a head, of a product
  static constexpr int64_t kWords = 16;              // pairs that a product takes at a time
  static constexpr int kHeight = packed::kTileRows;  // queries of a product, at most

  // Memory that begins where a line does, kept from one head to the next.
  template <typename T>
  class Buffer {
   public:
    T* of(int64_t size) {
      held_.resize(std::max<size_t>(held_.size(), size + 64 / sizeof(T)));
      return at_ = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(held_.data()) + 63) / 64 * 64);
    }
    T* data() const { return at_; }

   private:
    std::vector<T> held_;
    T* at_ = nullptr;
  };

  // sums [height, kPanel] = x w of `blocks` times kWords pairs; x [blocks, height, kWords], w [blocks, kWords, kPanel].
  class Products {
   public:
#if defined(__AMX_BF16__)
    explicit Products(int height) : registers_(height), height_(height) {}
    void run(const uint32_t* x, const uint32_t* w, int64_t blocks, float* sums) const {
      constexpr int64_t kRow = kWords * 4, kStride = kPanel * 4;
      const amx::Operand left{x, kRow, height_ * kRow}, right{w, kStride, kWords * kStride};
      const auto nothing = [](int) {};
      if (height_ > amx::kRows) {
        amx::multiply<true, true, amx::Passing::kNothing>(left, right, blocks, sums, kStride, false, nothing);
      } else {
        amx::multiply<false, true, amx::Passing::kNothing>(left, right, blocks, sums, kStride, false, nothing);
      }
    }

   private:
    amx::Registers registers_;
#else
    explicit Products(int height) : height_(height) {}
    void run(const uint32_t* x, const uint32_t* w, int64_t blocks, float* sums) const {
      packed::with_height(height_, [&](auto rows) { multiply<decltype(rows)::value>(x, w, blocks, sums); });
    }

   private:
    template <int R>
    static void multiply(const uint32_t* x, const uint32_t* w, int64_t blocks, float* sums) {
      __m512 acc[R][2];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
      for (int64_t block = 0; block < blocks; ++block, x += R * kWords) {
        for (int64_t k = 0; k < kWords; ++k, w += kPanel) {
          const __m512bh left = (__m512bh)_mm512_loadu_si512(w), right = (__m512bh)_mm512_loadu_si512(w + kLanes);
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[r * kWords + k]));
            acc[r][0] = _mm512_dpbf16_ps(acc[r][0], pair, left);
            acc[r][1] = _mm512_dpbf16_ps(acc[r][1], pair, right);
          }
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        _mm512_storeu_ps(sums + r * kPanel, acc[r][0]);
        _mm512_storeu_ps(sums + r * kPanel + kLanes, acc[r][1]);
      }
    }

#endif
    int height_;
  };

  // keys_: [panels, blocks, kWords, kPanel] pairs of a key's neighbours, zeros after the last.
  void pack_keys(const SequenceBatch& batch, const bf16* key, int64_t length, int64_t blocks, int64_t panels) {
    std::fill_n(keys_.of(panels * blocks * kWords * kPanel), panels * blocks * kWords * kPanel, 0);
    const int64_t pairs = batch.head_dim / 2;
    for (int64_t half = 0; half < 2 * panels; ++half) {
      const int64_t from = half * kLanes;
      const int rows = static_cast<int>(std::clamp<int64_t>(length - from, 0, kLanes));
      if (rows == 0) break;
      uint32_t* to = keys_.data() + half / 2 * blocks * kWords * kPanel + half % 2 * kLanes;
      const bf16* rows_of = key + from * batch.key_stride;
      packed::pack_rows(rows_of, batch.key_stride * 2, rows, pairs, to, kPanel, kLanes);
      if (batch.head_dim % 2 == 0) continue;
      for (int r = 0; r < rows; ++r) to[pairs * kPanel + r] = rows_of[r * batch.key_stride + batch.head_dim - 1].bits;
    }
  }

  // values_: [value panels, panels, kWords, kPanel] pairs of keys, zeros after the last.
  void pack_values(const SequenceBatch& batch, const bf16* value, int64_t length, int64_t panels,
                   int64_t value_panels) {
    values_.of(value_panels * panels * kWords * kPanel);
    alignas(64) uint16_t order[2][32];
    for (int i = 0; i < 32; ++i) {
      order[0][i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
      order[1][i] = static_cast<uint16_t>(order[0][i] + 16);
    }
    const __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
    for (int64_t panel = 0; panel < value_panels; ++panel) {
      const int64_t at = panel * kPanel;
      const __mmask32 mask = ~0u >> (32 - std::min<int64_t>(32, batch.value_dim - at));
      uint32_t* to = values_.data() + panel * panels * kWords * kPanel;
      for (int64_t j = 0; j < panels * kPanel; j += 2, to += kPanel) {
        const bf16* from = value + j * batch.value_stride + at;
        const __m512i even = _mm512_maskz_loadu_epi16(j < length ? mask : 0, from);
        const __m512i odd = _mm512_maskz_loadu_epi16(j + 1 < length ? mask : 0, from + batch.value_stride);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, low, odd));
        _mm512_storeu_si512(to + kLanes, _mm512_permutex2var_epi16(even, high, odd));
      }
    }
  }

  // queries_: [blocks, height, kWords] pairs, zeros after the last.
  void pack_queries(const SequenceBatch& batch, const bf16* query, int rows, int height, int64_t blocks) {
    uint32_t* to = queries_.data();
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t at = block * 2 * kWords;
      const __mmask32 mask = ~0u >> (32 - std::min<int64_t>(32, batch.head_dim - at));
      for (int r = 0; r < height; ++r, to += kWords) {
        _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(r < rows ? mask : 0, query + r * batch.query_stride + at));
      }
    }
  }

  // Scores of a query to weights in bfloat16, of the first `visible` keys; zeros after them. scores: [seen, height,
  // kPanel], of which this row; weights: [seen, height, kWords]. Returns the sum of the weights.
  static float soften(float* scores, uint32_t* weights, int64_t height, int64_t seen, int64_t visible, int64_t place,
                      float scale, float slope) {
    constexpr float kHidden = -1e30f, kLog2E = 1.44269504088896341f;
    const int64_t step = height * kPanel;
    float factor = scale * kLog2E;
    if (slope != 0.0f || factor < 0.0f) {
      subtract_distances(scores, step, seen, place, factor, slope * kLog2E);
      factor = 1.0f;
    }
    for (int64_t panel = visible / kPanel; panel < seen; ++panel) {
      float* row = scores + panel * step;
      const int64_t kept = std::max<int64_t>(0, visible - panel * kPanel);
      const __mmask32 hidden = kept == 0 ? ~0u : ~0u << kept;
      _mm512_mask_storeu_ps(row, static_cast<__mmask16>(hidden), Vec(kHidden).v);
      _mm512_mask_storeu_ps(row + kLanes, static_cast<__mmask16>(hidden >> 16), Vec(kHidden).v);
    }
    Vec most(kHidden), more(kHidden);
    for (int64_t panel = 0; panel < seen; ++panel) {
      most = max(most, load(scores + panel * step));
      more = max(more, load(scores + panel * step + kLanes));
    }
    const Vec by(factor), offset(-maximum(max(most, more)) * factor);
    Vec total, rest;
    for (int64_t panel = 0; panel < seen; ++panel) {
      const Vec left = rough_exp2(fma(load(scores + panel * step), by, offset));
      const Vec right = rough_exp2(fma(load(scores + panel * step + kLanes), by, offset));
      total = total + left;
      rest = rest + right;
      _mm512_storeu_si512(weights + panel * height * kWords, (__m512i)_mm512_cvtne2ps_pbh(right.v, left.v));
    }
    return sum(total + rest);
  }

  // Each score times `factor`, less the slope for each token between its key and the query's own, at `place`.
  static void subtract_distances(float* scores, int64_t step, int64_t seen, int64_t place, float factor, float slope) {
    const Vec lanes(_mm512_cvtepi32_ps(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)));
    const Vec by(factor), loss(-slope);
    for (int64_t panel = 0; panel < seen; ++panel) {
      for (int64_t half = 0; half < kPanel; half += kLanes) {
        float* row = scores + panel * step + half;
        const Vec ahead = lanes + Vec(static_cast<float>(panel * kPanel + half - place));
        store(row, fma(max(ahead, Vec() - ahead), loss, load(row) * by));
      }
    }
  }

  static void write(const float* sums, float total, bf16* out, int64_t count) {
    const Vec factor(1.0f / total);
    for (int64_t at = 0; at < count; at += kLanes) {
      const int lanes = static_cast<int>(std::min<int64_t>(kLanes, count - at));
      store(out + at, load(sums + at) * factor, lanes);
    }
  }

  Buffer<uint32_t> keys_, values_, queries_, weights_;
  Buffer<float> scores_;
  float totals_[kHeight];
};

#endif

}  // namespace pagoda
