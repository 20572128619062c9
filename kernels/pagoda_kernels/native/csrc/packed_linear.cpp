#include "epilogues.h"
#include "helpers.h"
#include "ops.h"
#include "parallel.h"
#include "row_blocks.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace {

using namespace packed;

constexpr int64_t kGatedRows = 128;  // fewer wait for weights, which come fastest one panel behind the other

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

  static constexpr int kPanels = Epilogue::kPanels;
  int64_t row_words() const { return x.pairs; }
  bool reads_packed() const { return tiles.begin(tiles.count) > 1; }

  void run(int num_threads, Helpers* helpers = nullptr) const {
    if (helpers != nullptr && tiles.begin(tiles.count) * x.pairs * 4 <= Helpers::kInputBytes && tiles.count <= kMaxTiles) {
      run(*helpers);
    } else {
      RowBlocks<Product>(*this, num_threads).run();
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

  void multiply(const Rows& block, int64_t item, float* sums) const {
    for (int i = 0; i < kPanels; ++i) multiply(block, item, i, sums);
  }

 private:
  void run(Helpers& helpers) const {
    auto* packed = static_cast<uint32_t*>(helpers.input());
    for (int64_t t = 0; t < tiles.count; ++t) pack_tile(t, packed + tiles.begin(t) * x.pairs);
    const int64_t grain = helpers.grain(items);
    helpers.run(Parts<Epilogue>{*this, {0, tiles.count, packed}, grain}, (items + grain - 1) / grain);
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
