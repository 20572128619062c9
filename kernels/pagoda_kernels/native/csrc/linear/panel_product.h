// Products of rows with a matrix in panels of 32 outputs, and who computes them.
#pragma once

#include <array>

#include "linear/epilogues.h"
#include "threads/helpers.h"
#include "linear/row_blocks.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace packed {

template <typename Product>
struct Parts;

// x W^T, of which an epilogue makes the output. A kernel knows how rows and weights lie in memory:
//   static constexpr bool kLeavesVectors                             `add` computes little in vectors
//   int block_words() const                                          that registers take of a packed row at a time
//   int64_t row_words() const                                        of a packed row; those of a tile are together
//   const uint32_t* in_place(int64_t num_rows) const                 the rows, if they need no packing; or null
//   void pack_tile(int64_t first_row, int rows, int height, uint32_t* to) const   zeros after `rows`
//   int64_t num_stretches(int64_t num_tiles) const                   into which the inputs are divided
//   Stretch stretch(int64_t panel, int64_t i, int64_t num_tiles) const
// and a Stretch, made for all tiles of some rows one after the other, has
//   void add(const uint32_t* tile, int height, float* sums, const auto& meanwhile)   of the packed tile; sums [height,
//   32].
//       meanwhile(n) is called n times, if it leaves vectors time
template <typename Kernel, typename Epilogue>
struct PanelProduct {
  static constexpr int kPanels = Epilogue::kPanels;
  // Vectors either make a tile's outputs while its sums are near, or an item's while those of the next one are summed.
  static constexpr bool kIsLate = Kernel::kLeavesVectors;
  static constexpr int kItemsWithSums = kIsLate ? 2 : 1;
  using Unfinished = packed::Unfinished<Epilogue>;
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

  // The sums of an item for some rows, and its outputs of them: in two steps, which different threads may take.
  int64_t sums_of_item(const Rows& block) const { return kPanels * sums_of_panel(block); }
  void compute(const Rows& block, int64_t item, float* sums) const {
    Unfinished nothing;
    for (int i = 0; i < kPanels; ++i) multiply<false>(block, item, i, sums, nothing);
  }
  void finish(const Rows& block, int64_t item, const float* sums) const {
    const int64_t first = tiles.begin(block.first_tile);
    for (int64_t t = block.first_tile; t < block.last_tile; ++t) {
      const int64_t row = tiles.begin(t);
      outputs(row, tiles.rows(t), item, sums + (row - first) * kPanel, sums_of_panel(block)).finish();
    }
  }

  // An item for some rows; its outputs, or what is unfinished of another one.
  void multiply(const Rows& block, int64_t item, float* sums, Unfinished& unfinished) const {
    for (int i = 0; i < kPanels; ++i) multiply<true>(block, item, i, sums, unfinished);
    if constexpr (kIsLate) {
      unfinished.finish();
      const int64_t first = tiles.begin(block.first_tile), last = block.last_tile - 1;
      unfinished = outputs(first, tiles.begin(last) + tiles.rows(last) - first, item, sums, sums_of_panel(block));
    }
  }

 private:
  void run(Helpers& helpers) const {
    auto* packed = static_cast<uint32_t*>(helpers.input());
    for (int64_t t = 0; t < tiles.count; ++t) pack_tile(t, packed + tiles.begin(t) * row_words());
    const int64_t grain = helpers.grain(items);
    helpers.run(Parts<PanelProduct>{*this, {0, tiles.count, packed}, grain}, (items + grain - 1) / grain);
  }

  int64_t sums_of_panel(const Rows& block) const {
    return (tiles.begin(block.last_tile) - tiles.begin(block.first_tile)) * kPanel;
  }

  // Panel i of an item; with the last one, the item's output, unless that has to wait.
  template <bool kFinishes>
  void multiply(const Rows& block, int64_t item, int i, float* all_sums, Unfinished& unfinished) const {
    const int64_t first = tiles.begin(block.first_tile), of_panel = sums_of_panel(block), words = row_words();
    const int64_t num_tiles = block.last_tile - block.first_tile;
    const int64_t stretches = kernel.num_stretches(num_tiles), panel = epilogue.panel(item, i);
    for (int64_t s = 0; s < stretches; ++s) {
      const bool makes_outputs = kFinishes && !kIsLate && i + 1 == kPanels && s + 1 == stretches;
      auto stretch = kernel.stretch(panel, s, num_tiles);
      for (int64_t t = block.first_tile; t < block.last_tile; ++t) {
        const int height = tiles.height_of(t), rows = tiles.rows(t);
        const int64_t row = tiles.begin(t), place = row - first;
        if (makes_outputs) epilogue.fetch(row, rows, item);
        const uint32_t* tile = block.packed ? block.packed + place * words : kernel.in_place(num_rows());
        const int64_t tiles_left = (kPanels - i) * stretches * num_tiles - s * num_tiles - (t - block.first_tile);
        const auto share = static_cast<int>((unfinished.rows + tiles_left - 1) / tiles_left);
        stretch.add(tile, height, all_sums + i * of_panel + place * kPanel,
                    [&](int64_t n) { unfinished.finish(static_cast<int>((share + n - 1) / n)); });
        if (makes_outputs) outputs(row, rows, item, all_sums + place * kPanel, of_panel).finish();
      }
    }
  }

  // The outputs of some rows. sums: of their first one, a panel's after `of_panel` of another's.
  Unfinished outputs(int64_t row, int64_t rows, int64_t item, const float* sums, int64_t of_panel) const {
    Unfinished of_rows{&epilogue, row, item, static_cast<int>(rows)};
    for (int i = 0; i < kPanels; ++i) of_rows.sums[i] = sums + i * of_panel;
    return of_rows;
  }
};

// A product of few rows in parts of some items, for Helpers.
template <typename Product>
struct Parts {
  Product product;
  Rows rows;  // packed where helpers may read it
  int64_t grain;

  int64_t sums_size() const { return grain * product.sums_of_item(rows); }
  int64_t end(int64_t part) const { return std::min(product.items, (part + 1) * grain); }

  void compute(int64_t part, float* sums) const {
    const TileRegisters registers(product.tiles.height, product.block_words());
    for (int64_t item = part * grain; item < end(part); ++item, sums += product.sums_of_item(rows)) {
      product.compute(rows, item, sums);
    }
  }
  void finish(int64_t part, const float* sums) const {
    for (int64_t item = part * grain; item < end(part); ++item, sums += product.sums_of_item(rows)) {
      product.finish(rows, item, sums);
    }
  }
};

}  // namespace packed

#endif

}  // namespace pagoda
