// A product of some rows with a matrix, however that is held: what work over several matrices is made of.
#pragma once

#include <memory>

#include "linear/linear_weights.h"
#include "linear/panel_product.h"

namespace pagoda {

#if defined(__AVX512BF16__)

// out = x W^T + bias, item by item. Rows are packed first, by `pack` into `packed_words()` words, and `place` says
// where they are; without `needs_packing` both may be left out. They are few enough for one block: at most `kMostRows`.
class AnyProduct {
 public:
  static constexpr int64_t kMostRows = packed::kMaxTiles * packed::kVectorRows;

  virtual ~AnyProduct() = default;
  virtual int64_t items() const = 0;
  virtual int64_t packed_words() const = 0;
  virtual bool needs_packing() const = 0;
  virtual void pack(uint32_t* to) const = 0;
  virtual void place(const uint32_t* packed) = 0;
  virtual int64_t sums_of_item() const = 0;
  // Sums of items [begin, end), one after the other; then their outputs.
  virtual void compute(int64_t begin, int64_t end, float* sums) const = 0;
  virtual void finish(int64_t begin, int64_t end, const float* sums) const = 0;
};

namespace packed {

template <typename Product>
class ProductOf final : public AnyProduct {
 public:
  explicit ProductOf(const Product& product) : product_(product), rows_{0, product.tiles.count, nullptr} {}

  int64_t items() const override { return product_.items; }
  int64_t packed_words() const override { return product_.num_rows() * product_.row_words(); }
  bool needs_packing() const override { return product_.reads_packed(); }
  void pack(uint32_t* to) const override {
    for (int64_t t = 0; t < product_.tiles.count; ++t) {
      product_.pack_tile(t, to + product_.tiles.begin(t) * product_.row_words());
    }
  }
  void place(const uint32_t* packed) override { rows_.packed = packed; }
  int64_t sums_of_item() const override { return product_.sums_of_item(rows_); }
  void compute(int64_t begin, int64_t end, float* sums) const override {
    const TileRegisters registers(product_.tiles.height, product_.block_words());
    for (int64_t item = begin; item < end; ++item, sums += sums_of_item()) product_.compute(rows_, item, sums);
  }
  void finish(int64_t begin, int64_t end, const float* sums) const override {
    for (int64_t item = begin; item < end; ++item, sums += sums_of_item()) product_.finish(rows_, item, sums);
  }

 private:
  Product product_;
  Rows rows_;
};

template <typename Kernel, typename Epilogue>
std::unique_ptr<AnyProduct> any_product(const Kernel& kernel, const Epilogue& epilogue, const Tiles& tiles) {
  using Product = PanelProduct<Kernel, Epilogue>;
  return std::make_unique<ProductOf<Product>>(Product{kernel, epilogue, tiles});
}

}  // namespace packed

// x: [num_rows, num_inputs], 1 <= num_rows <= kMostRows; out: [num_rows, num_outputs].
std::unique_ptr<AnyProduct> any_product(const LinearWeights& weights, const bf16* x, bf16* out, int64_t num_rows);

// Of each way to hold a matrix.
std::unique_ptr<AnyProduct> packed_product(const LinearWeights& weights, const bf16* x, bf16* out, int64_t num_rows);
std::unique_ptr<AnyProduct> compressed_product(const LinearWeights& weights, const bf16* x, bf16* out,
                                               int64_t num_rows);
std::unique_ptr<AnyProduct> quantized_product(const LinearWeights& weights, const bf16* x, bf16* out, int64_t num_rows);

#endif

}  // namespace pagoda
