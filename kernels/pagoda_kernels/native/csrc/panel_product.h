// Products of rows with a matrix in panels of 32 outputs, and who computes them.
#pragma once

#include <array>

#include "epilogues.h"
#include "helpers.h"
#include "row_blocks.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace packed {

template <typename Product>
struct Parts;

// x W^T, of which an epilogue makes the output. A kernel knows how rows and weights lie in memory:
//   int block_words() const                                          that registers take of a packed row at a time
//   int64_t row_words() const                                        of a packed row; those of a tile are together
//   const uint32_t* in_place(int64_t num_rows) const                 the rows, if they need no packing; or null
//   void pack_tile(int64_t first_row, int rows, int height, uint32_t* to) const   zeros behind `rows`
//   int64_t num_stretches(int64_t num_tiles) const                   into which the inputs are divided
//   Stretch stretch(int64_t panel, int64_t i, int64_t num_tiles) const
// and a Stretch, made for all tiles of some rows one after the other, has
//   void add(const uint32_t* tile, int height, float* sums)          of the packed tile; sums [height, 32]
template <typename Kernel, typename Epilogue>
struct PanelProduct {
  static constexpr int kPanels = Epilogue::kPanels;
  Kernel kernel;
  Epilogue epilogue;
  Tiles tiles;
  int64_t items = epilogue.items();

  int64_t num_rows() const { return tiles.begin(tiles.count); }  // of all tiles
  int block_words() const { return kernel.block_words(); }
  int64_t row_words() const { return kernel.row_words(); }
  bool reads_packed() const { return kernel.in_place(num_rows()) == nullptr; }
  void pack_tile(int64_t t, uint32_t* to) const {
    kernel.pack_tile(tiles.begin(t), tiles.rows(t), tiles.height_of(t), to);
  }

  void run(int num_threads, Helpers* helpers = nullptr) const {
    if (helpers != nullptr && num_rows() * row_words() * 4 <= Helpers::kInputBytes && tiles.count <= kMaxTiles) {
      run(*helpers);
    } else {
      RowBlocks<PanelProduct>(*this, num_threads).run();
    }
  }

  // An item for some rows, with its output.
  void multiply(const Rows& block, int64_t item, float* sums) const {
    for (int i = 0; i < kPanels; ++i) multiply<true>(block, item, i, sums);
  }

 private:
  void run(Helpers& helpers) const {
    auto* packed = static_cast<uint32_t*>(helpers.input());
    for (int64_t t = 0; t < tiles.count; ++t) pack_tile(t, packed + tiles.begin(t) * row_words());
    const int64_t grain = helpers.grain(items);
    helpers.run(Parts<PanelProduct>{*this, {0, tiles.count, packed}, grain}, (items + grain - 1) / grain);
  }

  // Panel i of an item; behind the last one, the item's output, unless that has to wait.
  template <bool kFinishes>
  void multiply(const Rows& block, int64_t item, int i, float* all_sums) const {
    const int64_t first = tiles.begin(block.first_tile), of_panel = (tiles.begin(block.last_tile) - first) * kPanel;
    const int64_t words = row_words(), num_tiles = block.last_tile - block.first_tile;
    const int64_t stretches = kernel.num_stretches(num_tiles), panel = epilogue.panel(item, i);
    for (int64_t s = 0; s < stretches; ++s) {
      const bool is_last = kFinishes && i + 1 == kPanels && s + 1 == stretches;
      auto stretch = kernel.stretch(panel, s, num_tiles);
      for (int64_t t = block.first_tile; t < block.last_tile; ++t) {
        const int height = tiles.height_of(t), rows = tiles.rows(t);
        const int64_t row = tiles.begin(t), place = row - first;
        if (is_last) epilogue.fetch(row, rows, item);
        const uint32_t* tile = block.packed ? block.packed + place * words : kernel.in_place(num_rows());
        stretch.add(tile, height, all_sums + i * of_panel + place * kPanel);
        if (is_last) finish(row, rows, item, all_sums + place * kPanel, of_panel);
      }
    }
  }

  // The outputs of a tile. sums: of its first row, a panel's after `of_panel` of another's.
  void finish(int64_t row, int rows, int64_t item, const float* sums, int64_t of_panel) const {
    std::array<const float*, kPanels> of_tile;
    for (int i = 0; i < kPanels; ++i) of_tile[i] = sums + i * of_panel;
    epilogue.finish(row, rows, item, of_tile);
  }

  friend struct Parts<PanelProduct>;
};

// A product of few rows in parts of some items, for Helpers.
template <typename Product>
struct Parts {
  Product product;
  Rows rows;  // packed where helpers may read it
  int64_t grain;

  int64_t sums_of_item() const { return Product::kPanels * product.num_rows() * kPanel; }
  int64_t sums_size() const { return grain * sums_of_item(); }
  int64_t end(int64_t part) const { return std::min(product.items, (part + 1) * grain); }

  void compute(int64_t part, float* sums) const {
    const TileRegisters registers(product.tiles.height, product.block_words());
    for (int64_t item = part * grain; item < end(part); ++item, sums += sums_of_item()) {
      for (int i = 0; i < Product::kPanels; ++i) product.template multiply<false>(rows, item, i, sums);
    }
  }
  void finish(int64_t part, const float* sums) const {
    for (int64_t item = part * grain; item < end(part); ++item, sums += sums_of_item()) {
      for (int64_t t = 0; t < rows.last_tile; ++t) {
        const int64_t row = product.tiles.begin(t);
        product.finish(row, product.tiles.rows(t), item, sums + row * kPanel, product.num_rows() * kPanel);
      }
    }
  }
};

}  // namespace packed

#endif

}  // namespace pagoda
