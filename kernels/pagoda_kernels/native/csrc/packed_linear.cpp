#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "activations.h"
#include "helpers.h"
#include "ops.h"
#include "packed_tiles.h"
#include "parallel.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace {

using namespace packed;

constexpr int64_t kBlockBytes = 384 << 10;  // packed rows of x that stay in L2 while weights pass by
constexpr int64_t kMaxTiles = 32;           // of one block
constexpr int64_t kOwnTiles = 8;            // threads that find so many each do not share blocks
constexpr int64_t kGatedRows = 128;         // fewer wait for weights, which come fastest one panel behind the other

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

// Some tiles of rows.
struct Rows {
  int64_t first_tile = 0, last_tile = 0;
  const uint32_t* packed = nullptr;  // tiles one behind the other, [pairs, height] each
};

// Rows with the items (panels of the weight that are multiplied together) that are still to come.
struct Block : Rows {
  std::atomic<bool> is_packed{false};
  std::atomic<int64_t> next_item{0};
};

template <typename Epilogue>
struct Parts;

// x weight^T, of which an epilogue makes the output.
template <typename Epilogue>
struct Product {
  Input x;
  const bf16* weight;
  Epilogue epilogue;
  Tiles tiles;
  int64_t items = epilogue.items();

  void run(int num_threads, Helpers* helpers = nullptr) const {
    if (helpers != nullptr && tiles.begin(tiles.count) * x.pairs * 4 <= Helpers::kInputBytes && tiles.count <= kMaxTiles) {
      run(*helpers);
      return;
    }
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
  void run(Helpers& helpers) const {
    auto* packed = static_cast<uint32_t*>(helpers.input());
    for (int64_t t = 0; t < tiles.count; ++t) pack_tile(t, packed + tiles.begin(t) * x.pairs);
    const int64_t grain = helpers.grain(items);
    helpers.run(Parts<Epilogue>{*this, {0, tiles.count, packed}, grain}, (items + grain - 1) / grain);
  }

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
    if (tiles.begin(tiles.count) == 1) {
      std::memcpy(to, x.rows, x.pairs * 4);
      return;
    }
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

  // Panel i of an item; behind the last one, the item's output, unless that has to wait.
  template <bool kFinishes = true>
  void multiply(const Rows& block, int64_t item, int i, float* all_sums) const {
    const int64_t first = tiles.begin(block.first_tile), of_panel = (tiles.begin(block.last_tile) - first) * kPanel;
    float* sums = all_sums + i * of_panel;
    const int64_t pairs = x.pairs, count = block.last_tile - block.first_tile;
    const bf16* w = weight + epilogue.panel(item, i) * pairs * 2 * kPanel;
    // While all tiles pass over one stretch of weights, the next one comes into L2, of the next panel at the end.
    const char* ahead = reinterpret_cast<const char*>(w + kPairsInL1 * 2 * kPanel);
    const int64_t depth = count == 1 ? pairs : kPairsInL1, step = 128 / count;
    for (int64_t k = 0; k < pairs; k += depth) {
      const int64_t size = std::min(depth, pairs - k);
      const bool is_last = kFinishes && i + 1 == Epilogue::kPanels && k + size == pairs;
      for (int64_t t = block.first_tile; t < block.last_tile; ++t) {
        const int height = tiles.rows(t);
        const int64_t row = tiles.begin(t), place = row - first;
        if (is_last) epilogue.fetch(row, height, item);
        const uint32_t* a = block.packed ? block.packed + place * pairs + k * height
                                         : reinterpret_cast<const uint32_t*>(x.rows) + k;
        tile_of(height)(a, w + k * 2 * kPanel, size, sums + place * kPanel, k == 0, ahead, step);
        ahead += size * step;
        if (is_last) finish(row, height, item, all_sums + place * kPanel, of_panel);
      }
    }
  }

  // The outputs of a tile. sums: of its first row, a panel's after `of_panel` of another's.
  void finish(int64_t row, int height, int64_t item, const float* sums, int64_t of_panel) const {
    std::array<const float*, Epilogue::kPanels> of_tile;
    for (int i = 0; i < Epilogue::kPanels; ++i) of_tile[i] = sums + i * of_panel;
    epilogue.finish(row, height, item, of_tile);
  }

  friend struct Parts<Epilogue>;
};

// A product of few rows in parts of some items, for Helpers.
template <typename Epilogue>
struct Parts {
  Product<Epilogue> product;
  Rows rows;  // packed where helpers may read it
  int64_t grain;

  int64_t num_rows() const { return product.tiles.begin(rows.last_tile); }
  int64_t sums_of_item() const { return Epilogue::kPanels * num_rows() * kPanel; }
  int64_t sums_size() const { return grain * sums_of_item(); }
  int64_t end(int64_t part) const { return std::min(product.items, (part + 1) * grain); }

  void compute(int64_t part, float* sums) const {
    for (int64_t item = part * grain; item < end(part); ++item, sums += sums_of_item()) {
      for (int i = 0; i < Epilogue::kPanels; ++i) product.template multiply<false>(rows, item, i, sums);
    }
  }
  void finish(int64_t part, const float* sums) const {
    for (int64_t item = part * grain; item < end(part); ++item, sums += sums_of_item()) {
      for (int64_t t = 0; t < rows.last_tile; ++t) {
        const int64_t row = product.tiles.begin(t);
        product.finish(row, product.tiles.rows(t), item, sums + row * kPanel, num_rows() * kPanel);
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
                   int num_threads, Helpers* helpers) {
  if (num_rows == 0) return;
  const Linear<Out> linear{bias, residual, residual_stride, out, num_outputs};
  Product<Linear<Out>>{{x, x_stride, num_inputs / 2}, weight, linear, Tiles(num_rows)}.run(num_threads, helpers);
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
                            int64_t, int, Helpers*);
template void packed_linear(const bf16*, int64_t, const bf16*, const bf16*, const bf16*, int64_t, bf16*, int64_t, int64_t,
                            int64_t, int, Helpers*);

#endif

}  // namespace pagoda
