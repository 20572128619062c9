#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "activations.h"
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
constexpr int64_t kOwnTiles = 8;            // threads that find so many each do not share blocks
constexpr int64_t kGatedRows = 128;         // fewer wait for weights, which come fastest one panel behind the other

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

// What becomes of a tile's sums: out = sums + bias + residual. Lines of `out` and `residual` lie far apart: they come while
// sums are made (`fetch`), and are written once.
template <typename Out>
struct Linear {
  static constexpr int kPanels = 1;  // that an item takes
  const bf16 *bias, *residual;
  int64_t residual_stride;
  Out* out;
  int64_t num_outputs;

  int64_t items() const { return (num_outputs + kPanel - 1) / kPanel; }
  int64_t panel(int64_t item, int) const { return item; }
  void fetch(int64_t row, int rows, int64_t item) const {
    const Out* to = out + row * num_outputs + item * kPanel;
    for (int r = 0; r < rows; ++r) __builtin_prefetch(to + r * num_outputs, 1);
  }
  void finish(int64_t row, int rows, int64_t item, const std::array<const float*, kPanels>& sums) const {
    const int64_t column = item * kPanel;
    const int size = static_cast<int>(std::min<int64_t>(kPanel, num_outputs - column));
    const int low = std::min(kLanes, size), high = size - low;
    const Vec low_offset = bias ? load(bias + column, low) : Vec();
    const Vec high_offset = bias ? load(bias + column + low, high) : Vec();
    for (int r = 0; r < rows; ++r) {
      Vec a(_mm512_load_ps(sums[0] + r * kPanel)), b(_mm512_load_ps(sums[0] + r * kPanel + kLanes));
      if (bias) {
        a = a + low_offset;
        b = b + high_offset;
      }
      if (residual) {
        const bf16* more = residual + (row + r) * residual_stride + column;
        a = a + load(more, low);
        b = b + load(more + low, high);
      }
      Out* to = out + (row + r) * num_outputs + column;
      store(to, a, low);
      store(to + low, b, high);
    }
  }
};

// out = activation(gate) * up of two halves of the outputs, each rounded to bfloat16 as Linear would have written it.
template <typename Act>
struct Gated {
  static constexpr int kPanels = 2;
  const bf16* bias;
  bf16* out;
  int64_t size;  // a multiple of kPanel
  Act act;

  int64_t items() const { return size / kPanel; }
  int64_t panel(int64_t item, int half) const { return item + half * items(); }
  void fetch(int64_t row, int rows, int64_t item) const {
    for (int r = 0; r < rows; ++r) __builtin_prefetch(out + (row + r) * size + item * kPanel, 1);
  }
  void finish(int64_t row, int rows, int64_t item, const std::array<const float*, kPanels>& sums) const {
    for (int lanes = 0; lanes < kPanel; lanes += kLanes) {
      const int64_t column = item * kPanel + lanes;
      const auto value = [&](int half, int r) {
        Vec sum(_mm512_load_ps(sums[half] + r * kPanel + lanes));
        if (bias) sum = sum + load(bias + half * size + column);
        bf16 rounded[kLanes];
        store(rounded, sum);
        return load(rounded);
      };
      for (int r = 0; r < rows; ++r) store(out + (row + r) * size + column, act(value(0, r)) * value(1, r));
    }
  }
};

struct Input {
  const bf16* rows;
  int64_t stride, pairs;
};

// Some tiles of rows, and which items (panels of the weight that are multiplied together) are still to come.
struct Block {
  int64_t first_tile, last_tile;
  const uint32_t* packed = nullptr;  // tiles one behind the other, [pairs, height] each
  std::atomic<bool> is_packed{false};
  std::atomic<int64_t> next_item{0};
};

// x weight^T, of which an epilogue makes the output.
template <typename Epilogue>
struct Product {
  Input x;
  const bf16* weight;
  Epilogue epilogue;
  Tiles tiles;
  int64_t items = epilogue.items();

  void run(int num_threads) const {
    const int64_t most = std::clamp<int64_t>(kBlockBytes / (4 * x.pairs * kTileRows), 1, kMaxTiles);
    const bool is_shared = tiles.count < std::max<int64_t>(2, std::min(most, kOwnTiles) * num_threads);
    int64_t count = (tiles.count + most - 1) / most;
    if (!is_shared) count = (count + num_threads - 1) / num_threads * num_threads;
    std::vector<Block> blocks(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      blocks[i].first_tile = tiles.count * i / count;
      blocks[i].last_tile = tiles.count * (i + 1) / count;
    }
    if (is_shared) {
      share(blocks, num_threads);
    } else {
      take_turns(blocks, num_threads);
    }
  }

 private:
  // Few rows: all threads pack them, and divide the items.
  void share(std::vector<Block>& blocks, int num_threads) const {
    const int64_t rows = tiles.begin(tiles.count);
    const int64_t grain = std::max<int64_t>(1, std::min<int64_t>(items / (4 * num_threads), 512 / rows));
    const int64_t claims = (items + grain - 1) / grain * static_cast<int64_t>(blocks.size());
    const int threads = static_cast<int>(std::min<int64_t>(num_threads, claims));
    uint32_t* packed = rows > 1 ? scratch(rows * x.pairs) : nullptr;
    for (Block& block : blocks) block.packed = packed + tiles.begin(block.first_tile) * x.pairs;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      if (packed) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles.count; ++t) pack_tile(t, packed + tiles.begin(t) * x.pairs);
      }
      for (Block& block : blocks) multiply(block, grain);
    }
  }

  // Many rows: each thread packs blocks of its own, which stay in its L2 while all items pass by. One that finds no block
  // left takes items of the others'.
  void take_turns(std::vector<Block>& blocks, int num_threads) const {
    std::atomic<size_t> next{0};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
      for (size_t i = next++; i < blocks.size(); i = next++) {
        Block& block = blocks[i];
        const int64_t first = tiles.begin(block.first_tile);
        uint32_t* packed = scratch((tiles.begin(block.last_tile) - first) * x.pairs);
        for (int64_t t = block.first_tile; t < block.last_tile; ++t) {
          pack_tile(t, packed + (tiles.begin(t) - first) * x.pairs);
        }
        block.packed = packed;
        block.is_packed.store(true, std::memory_order_release);
        multiply(block, 1);
      }
      for (Block& block : blocks) {
        while (!block.is_packed.load(std::memory_order_acquire)) std::this_thread::yield();
        multiply(block, 1);
      }
    }
  }

  void pack_tile(int64_t t, uint32_t* to) const {
    const int height = tiles.rows(t);
    pack_rows(x.rows + tiles.begin(t) * x.stride, x.stride, height, x.pairs, to, height, height);
  }

  // The items that nobody has claimed.
  void multiply(Block& block, int64_t grain) const {
    alignas(64) float sums[Epilogue::kPanels * kMaxTiles * kTileRows * kPanel];
    for (;;) {
      const int64_t begin = block.next_item.fetch_add(grain), end = std::min(items, begin + grain);
      if (begin >= items) return;
      for (int64_t item = begin; item < end; ++item) {
        for (int i = 0; i < Epilogue::kPanels; ++i) multiply(block, item, i, sums);
      }
    }
  }

  // Panel i of an item; behind the last one, the item's output.
  void multiply(const Block& block, int64_t item, int i, float* all_sums) const {
    constexpr int64_t kSize = kMaxTiles * kTileRows * kPanel;
    float* sums = all_sums + i * kSize;
    const int64_t pairs = x.pairs, first = tiles.begin(block.first_tile), count = block.last_tile - block.first_tile;
    const bf16* w = weight + epilogue.panel(item, i) * pairs * 2 * kPanel;
    // While all tiles pass over one stretch of weights, the next one comes into L2, of the next panel at the end.
    const char* ahead = reinterpret_cast<const char*>(w + kPairsInL1 * 2 * kPanel);
    const int64_t depth = count == 1 ? pairs : kPairsInL1, step = 128 / count;
    for (int64_t k = 0; k < pairs; k += depth) {
      const int64_t size = std::min(depth, pairs - k);
      const bool is_last = i + 1 == Epilogue::kPanels && k + size == pairs;
      for (int64_t t = block.first_tile; t < block.last_tile; ++t) {
        const int height = tiles.rows(t);
        const int64_t row = tiles.begin(t), place = row - first;
        if (is_last) epilogue.fetch(row, height, item);
        const uint32_t* a = block.packed ? block.packed + place * pairs + k * height
                                         : reinterpret_cast<const uint32_t*>(x.rows) + k;
        tile_of(height)(a, w + k * 2 * kPanel, size, sums + place * kPanel, k == 0, ahead, step);
        ahead += size * step;
        if (is_last) {
          std::array<const float*, Epilogue::kPanels> of_tile;
          for (int j = 0; j < Epilogue::kPanels; ++j) of_tile[j] = all_sums + j * kSize + place * kPanel;
          epilogue.finish(row, height, item, of_tile);
        }
      }
    }
  }
};

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
  if (num_rows == 0) return;
  const Linear<Out> linear{bias, residual, residual_stride, out, num_outputs};
  Product<Linear<Out>>{{x, x_stride, num_inputs / 2}, weight, linear, Tiles(num_rows)}.run(num_threads);
}

bool should_gate(int64_t num_rows, int64_t size) { return num_rows >= kGatedRows && size % kPanel == 0; }

void packed_gated_linear(const bf16* x, int64_t x_stride, const bf16* weight, const bf16* bias, Activation activation,
                         bf16* out, int64_t num_rows, int64_t size, int64_t num_inputs, int num_threads) {
  if (num_rows == 0) return;
  with_activation(activation, [&](const auto& act) {
    const Gated<std::decay_t<decltype(act)>> gated{bias, out, size, act};
    Product<decltype(gated)>{{x, x_stride, num_inputs / 2}, weight, gated, Tiles(num_rows)}.run(num_threads);
  });
}

template void packed_linear(const bf16*, int64_t, const bf16*, const bf16*, const bf16*, int64_t, float*, int64_t, int64_t,
                            int64_t, int);
template void packed_linear(const bf16*, int64_t, const bf16*, const bf16*, const bf16*, int64_t, bf16*, int64_t, int64_t,
                            int64_t, int);

#endif

}  // namespace pagoda
