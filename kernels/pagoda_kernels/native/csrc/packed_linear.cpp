#include <atomic>
#include <cstdlib>
#include <memory>
#include <utility>

#include "ops.h"
#include "parallel.h"
#include "vec.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace {

constexpr int kPanel = 2 * kLanes;          // output features of a panel: two vectors
constexpr int kTileRows = 14;               // rows of x in registers: 28 accumulators, 2 vectors of weights, 1 of x
constexpr int64_t kPairsInL1 = 128;         // pairs of inputs whose weights (16 KiB a panel) stay in L1 for all tiles
constexpr int64_t kBlockBytes = 384 << 10;  // packed rows of x that stay in L2 while weights pass by
constexpr int64_t kMaxTiles = 32;           // of one block
constexpr int64_t kSliceBytes = 4 << 20;    // packed rows of x at a time: the scratch of a call is no larger

// One tile: sums[r, :] += x[r, begin..end) W^T, a pair of inputs after the other, whatever the number of rows.
// x: [pairs, R] pairs; w: [pairs, 32] pairs; both at `begin`. Meanwhile the lines from `ahead` come nearer.
template <int R>
void tile(const uint32_t* x, const bf16* w, int64_t pairs, float* sums, bool is_first, const char* ahead, int64_t step) {
  __m512 acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    acc[r][0] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * kPanel);
    acc[r][1] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * kPanel + kLanes);
  }
  for (int64_t k = 0; k < pairs; ++k) {
    const __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + kPanel);
    w += 2 * kPanel;
    _mm_prefetch(ahead, _MM_HINT_T1);
    _mm_prefetch(ahead + 64, _MM_HINT_T1);
    ahead += step;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[r]));
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], pair, w0);
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], pair, w1);
    }
    x += R;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    _mm512_store_ps(sums + r * kPanel, acc[r][0]);
    _mm512_store_ps(sums + r * kPanel + kLanes, acc[r][1]);
  }
}

using Tile = void (*)(const uint32_t*, const bf16*, int64_t, float*, bool, const char*, int64_t);

template <int... R>
constexpr Tile tile_of(int rows, std::integer_sequence<int, R...>) {
  constexpr Tile tiles[] = {tile<R + 1>...};
  return tiles[rows - 1];
}

inline Tile tile_of(int rows) { return tile_of(rows, std::make_integer_sequence<int, kTileRows>{}); }

// Rows divided into tiles of nearly equal height, so that no tile leaves registers idle.
struct Tiles {
  int64_t count, height, num_higher;
  explicit Tiles(int64_t rows)
      : count((rows + kTileRows - 1) / kTileRows), height(rows / count), num_higher(rows % count) {}
  int64_t begin(int64_t tile) const { return tile * height + std::min(tile, num_higher); }
  int rows(int64_t tile) const { return static_cast<int>(height + (tile < num_higher)); }
};

// x [rows, pairs] to [pairs, width], rows <= width <= 16, in squares of 16 by 16; what is behind the last row is zero.
void pack_rows(const bf16* x, int64_t stride, int rows, int64_t pairs, uint32_t* to, int64_t to_stride, int width) {
  const __mmask16 mask = first_lanes(width);
  for (int64_t k = 0; k < pairs; k += 16) {
    const int count = static_cast<int>(std::min<int64_t>(16, pairs - k));
    __m512i a[16], b[16];
    for (int r = 0; r < 16; ++r) {
      a[r] = r < rows ? _mm512_maskz_loadu_epi32(first_lanes(count), x + r * stride + 2 * k) : _mm512_setzero_si512();
    }
    // Transposed within pairs of rows, then of pairs, then of the four 128-bit lanes.
    for (int r = 0; r < 16; r += 2) {
      b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
      b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    for (int r = 0; r < 16; r += 4) {
      a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
      a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
      a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
      a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    // a[4 q + i]: rows 4 q .. 4 q + 3 of columns i, 4 + i, 8 + i, 12 + i, one in each 128-bit lane.
    for (int i = 0; i < 4; ++i) {
      const __m512i low = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), high = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
      const __m512i low2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
      const __m512i high2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
      b[i] = _mm512_shuffle_i32x4(low, low2, 0x88);
      b[8 + i] = _mm512_shuffle_i32x4(low, low2, 0xdd);
      b[4 + i] = _mm512_shuffle_i32x4(high, high2, 0x88);
      b[12 + i] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
    for (int i = 0; i < count; ++i) _mm512_mask_storeu_epi32(to + (k + i) * to_stride, mask, b[i]);
  }
}

// Memory of one thread that callers of the kernel share, one behind the other.
uint32_t* scratch(int64_t size) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local int64_t capacity = 0;
  if (size > capacity) {
    memory.reset(std::aligned_alloc(64, (size * 4 + 63) / 64 * 64));
    if (!memory) throw std::bad_alloc();
    capacity = size;
  }
  return static_cast<uint32_t*>(memory.get());
}

// out[row, begin .. begin + size) = sums + bias + residual
template <typename Out>
void finish(const float* sums, int rows, int size, const bf16* bias, const bf16* residual, int64_t residual_stride, Out* out,
            int64_t out_stride) {
  for (int half = 0; half < 2; ++half) {
    const int n = std::min(kLanes, size - half * kLanes), at = half * kLanes;
    if (n <= 0) return;
    const Vec offset = bias ? load(bias + at, n) : Vec();
    for (int r = 0; r < rows; ++r) {
      Vec sum(_mm512_load_ps(sums + r * kPanel + at));
      if (bias) sum = sum + offset;
      if (residual) sum = sum + load(residual + r * residual_stride + at, n);
      store(out + r * out_stride + at, sum, n);
    }
  }
}

}  // namespace

void pack_weight(const bf16* weight, bf16* out, int64_t num_outputs, int64_t num_inputs, int num_threads) {
  const int64_t pairs = num_inputs / 2, panels = (num_outputs + kPanel - 1) / kPanel;
  parallel_for(panels, 4, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t half = 2 * begin; half < 2 * end; ++half) {
      const int64_t row = half * kLanes;
      const int rows = static_cast<int>(std::clamp<int64_t>(num_outputs - row, 0, kLanes));
      uint32_t* to = reinterpret_cast<uint32_t*>(out + half / 2 * pairs * 2 * kPanel) + half % 2 * kLanes;
      pack_rows(weight + row * num_inputs, num_inputs, rows, pairs, to, kPanel, kLanes);
    }
  });
}

void packed_embedding(const int64_t* ids, const bf16* weight, bf16* out, int64_t num_ids, int64_t num_inputs,
                      int num_threads) {
  const int64_t pairs = num_inputs / 2;
  parallel_for(num_ids, 8, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const bf16* from = weight + ids[i] / kPanel * pairs * 2 * kPanel + ids[i] % kPanel * 2;
      for (int64_t k = 0; k < pairs; ++k) std::memcpy(out + i * num_inputs + 2 * k, from + k * 2 * kPanel, 4);
    }
  });
}

template <typename Out>
void packed_linear(const bf16* x, int64_t x_stride, const bf16* weight, const bf16* bias, const bf16* residual,
                   int64_t residual_stride, Out* out, int64_t num_rows, int64_t num_outputs, int64_t num_inputs,
                   int num_threads) {
  const int64_t pairs = num_inputs / 2, panels = (num_outputs + kPanel - 1) / kPanel, panel_size = pairs * 2 * kPanel;
  const int64_t slice_rows = std::max<int64_t>(kTileRows, kSliceBytes / (4 * pairs) / kTileRows * kTileRows);
  for (int64_t first = 0; first < num_rows; first += slice_rows) {
    const int64_t rows = std::min(slice_rows, num_rows - first);
    const bf16* from = x + first * x_stride;
    const Tiles tiles(rows);
    const int64_t block = std::clamp<int64_t>(kBlockBytes / (4 * pairs * kTileRows), 1, kMaxTiles);
    const int64_t blocks = (tiles.count + block - 1) / block, items = blocks * panels;
    const bool is_packed = rows > 1;
    uint32_t* packed = is_packed ? scratch(rows * pairs) : nullptr;
    std::atomic<int64_t> next{0};
    const int64_t grain = std::max<int64_t>(1, std::min<int64_t>(panels / (4 * num_threads), 512 / rows));
    auto work = [&] {
      alignas(64) float sums[kMaxTiles * kTileRows * kPanel];
      for (;;) {
        const int64_t begin = next.fetch_add(grain), end = std::min(items, begin + grain);
        if (begin >= items) return;
        for (int64_t item = begin; item < end; ++item) {
          const int64_t panel = item % panels, first_tile = item / panels * block;
          const int64_t last_tile = std::min(tiles.count, first_tile + block);
          const int64_t count = last_tile - first_tile;
          const bf16* w = weight + panel * panel_size;
          // While all tiles pass over one stretch of weights, the next one comes into L2, of the next panel at the end.
          const char* ahead = reinterpret_cast<const char*>(w + kPairsInL1 * 2 * kPanel);
          const int64_t depth = count == 1 ? pairs : kPairsInL1, step = 128 / count;
          for (int64_t k = 0; k < pairs; k += depth) {
            const int64_t size = std::min(depth, pairs - k);
            for (int64_t t = first_tile; t < last_tile; ++t) {
              const int height = tiles.rows(t);
              const uint32_t* a = is_packed ? packed + tiles.begin(t) * pairs + k * height
                                            : reinterpret_cast<const uint32_t*>(from) + k;
              tile_of(height)(a, w + k * 2 * kPanel, size, sums + (tiles.begin(t) - tiles.begin(first_tile)) * kPanel,
                              k == 0, ahead, step);
              ahead += size * step;
            }
          }
          const int64_t row = first + tiles.begin(first_tile), column = panel * kPanel;
          const int height = static_cast<int>(tiles.begin(last_tile - 1) + tiles.rows(last_tile - 1) - tiles.begin(first_tile));
          finish(sums, height, static_cast<int>(std::min<int64_t>(kPanel, num_outputs - column)),
                 bias ? bias + column : nullptr, residual ? residual + row * residual_stride + column : nullptr,
                 residual_stride, out + row * num_outputs + column, num_outputs);
        }
      }
    };
    const int threads = static_cast<int>(std::min<int64_t>(num_threads, (items + grain - 1) / grain));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      if (is_packed) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles.count; ++t) {
          const int height = tiles.rows(t);
          uint32_t* to = packed + tiles.begin(t) * pairs;
          pack_rows(from + tiles.begin(t) * x_stride, x_stride, height, pairs, to, height, height);
        }
      }
      work();
    }
  }
}

template void packed_linear(const bf16*, int64_t, const bf16*, const bf16*, const bf16*, int64_t, float*, int64_t, int64_t,
                            int64_t, int);
template void packed_linear(const bf16*, int64_t, const bf16*, const bf16*, const bf16*, int64_t, bf16*, int64_t, int64_t,
                            int64_t, int);

#endif

}  // namespace pagoda
