#include <type_traits>

#include "epilogues.h"
#include "helpers.h"
#include "parallel.h"
#include "quantized_tiles.h"
#include "row_blocks.h"

// Products of a part (a group's inputs, or some of them) are summed for all numbers of rows in the same order, an input
// after the other, then scaled and added up: what a row gets never depends on its neighbours.
namespace pagoda {

namespace {

constexpr int64_t kMaxRows = 192;  // rows whose sums stay near: 48 KiB

inline int64_t tiles_of(const QuantizedMatrix& w) { return (w.num_outputs + kTile - 1) / kTile; }

// Rows of x against float32 weights [size, 64].
template <typename T>
void add_floats(const T* x, int64_t x_stride, int64_t rows, const float* w, int64_t size, const float* scales,
                const float* zeros, float* sums) {
  constexpr int kVectors = kTile / kLanes;
  for (int64_t r = 0; r < rows; ++r, x += x_stride, sums += kTile) {
    Vec part[kVectors];
    for (int64_t k = 0; k < size; ++k) {
      const Vec value(to_float(x[k]));
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) part[j] = fma(value, load(w + k * kTile + j * kLanes), part[j]);
    }
    add_part<kVectors>(part, scales, zeros, zeros ? sum_of(x, size) : 0.0f, sums);
  }
}

// out[row, begin .. begin + size) = sums + bias + residual
template <typename T, typename Out>
void finish(const float* sums, int64_t rows, int64_t size, const T* bias, const T* residual, int64_t residual_stride,
            Out* out, int64_t out_stride) {
  for (int64_t at = 0; at < size; at += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, size - at));
    const Vec offset = bias ? load(bias + at, n) : Vec();
    for (int64_t r = 0; r < rows; ++r) {
      Vec total = load(sums + r * kTile + at) + offset;
      if (residual) total = total + load(residual + r * residual_stride + at, n);
      store(out + r * out_stride + at, total, n);
    }
  }
}

// Sizes of the parts of a matrix, and where they are.
template <typename T>
int64_t part_size(const QuantizedMatrix& w) {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
  if (std::is_same_v<T, bf16> && w.num_groups == 1) return w.num_inputs;
#endif
  return std::min(w.group_size, kMaxPart);
}
inline int64_t scales_at(const QuantizedMatrix& w, int64_t tile, int64_t k) {
  return (tile * w.num_groups + k / w.group_size) * kTile;
}
template <int kBits>
const uint8_t* codes_at(const QuantizedMatrix& w, int64_t tile, int64_t k) {
  return w.codes + (tile * w.num_inputs + k) / 2 * Codes<kBits>::kPairBytes;
}

// sums [rows, 64] of a tile; of bfloat16 with one group, few rows.
template <int kBits, typename T>
void multiply(const QuantizedMatrix& w, int64_t tile, const T* x, int64_t x_stride, int64_t rows, float* sums) {
  static const Codes<kBits> codes;
  const int64_t part = part_size<T>(w);
  alignas(64) float numbers[kMaxPart * kTile];
  std::memset(sums, 0, rows * kTile * sizeof(float));
  for (int64_t k = 0; k < w.num_inputs; k += part) {
    const int64_t size = std::min(part, w.num_inputs - k), at = scales_at(w, tile, k);
    const float *scales = w.scales + at, *zeros = w.zeros ? w.zeros + at : nullptr;
    const uint8_t* from = codes_at<kBits>(w, tile, k);
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
    if constexpr (std::is_same_v<T, bf16>) {
      add(codes, from, x + k, x_stride, rows, size, scales, zeros, numbers, sums);
      continue;
    }
#endif
    to_floats(codes, from, size / 2, numbers);
    add_floats(x + k, x_stride, rows, numbers, size, scales, zeros, sums);
  }
}

// x W^T, a tile of outputs after the other.
template <int kBits, typename T, typename Out>
struct Product {
  const T* x;
  int64_t x_stride;
  QuantizedMatrix w;
  const T *bias, *residual;
  int64_t residual_stride;
  Out* out;
  int64_t num_rows;

  int64_t tiles() const { return tiles_of(w); }

  // sums [rows, 64] of rows from `first` on.
  void multiply(int64_t tile, int64_t first, int64_t rows, float* sums) const {
    pagoda::multiply<kBits>(w, tile, x + first * x_stride, x_stride, rows, sums);
  }

  void finish(int64_t tile, int64_t first, int64_t rows, const float* sums) const {
    const int64_t column = tile * kTile;
    pagoda::finish(sums, rows, std::min<int64_t>(kTile, w.num_outputs - column), bias ? bias + column : nullptr,
                   residual ? residual + first * residual_stride + column : nullptr, residual_stride,
                   out + first * w.num_outputs + column, w.num_outputs);
  }

  void run(int num_threads) const {
    const int64_t slices = (num_rows + kMaxRows - 1) / kMaxRows;
    const int64_t grain = std::max<int64_t>(1, std::min<int64_t>(tiles() / (8 * num_threads), 64 / num_rows));
    const int threads = static_cast<int>(std::min<int64_t>(num_threads, (tiles() + grain - 1) / grain));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      alignas(64) float sums[kMaxRows * kTile];
#pragma omp for schedule(dynamic, grain)
      for (int64_t tile = 0; tile < tiles(); ++tile) {
        for (int64_t slice = 0; slice < slices; ++slice) {
          const int64_t first = num_rows * slice / slices, rows = num_rows * (slice + 1) / slices - first;
          multiply(tile, first, rows, sums);
          finish(tile, first, rows, sums);
        }
      }
    }
  }
};

// A product of few rows in parts of some tiles, for Helpers.
template <typename Whole>
struct Parts {
  Whole product;  // x is where helpers may read it
  int64_t grain;

  int64_t sums_size() const { return grain * product.num_rows * kTile; }
  int64_t end(int64_t part) const { return std::min(product.tiles(), (part + 1) * grain); }

  void compute(int64_t part, float* sums) const {
    for (int64_t tile = part * grain; tile < end(part); ++tile, sums += product.num_rows * kTile) {
      product.multiply(tile, 0, product.num_rows, sums);
    }
  }
  void finish(int64_t part, const float* sums) const {
    for (int64_t tile = part * grain; tile < end(part); ++tile, sums += product.num_rows * kTile) {
      product.finish(tile, 0, product.num_rows, sums);
    }
  }
};

template <int kBits, typename T, typename Out>
void run(Product<kBits, T, Out> product, int num_threads, Helpers* helpers) {
  const int64_t rows = product.num_rows, inputs = product.w.num_inputs, tiles = product.tiles();
  if (helpers == nullptr || rows > kMaxRows || rows * inputs * static_cast<int64_t>(sizeof(T)) > Helpers::kInputBytes) {
    product.run(num_threads);
    return;
  }
  T* x = static_cast<T*>(helpers->input());
  for (int64_t row = 0; row < rows; ++row) std::copy_n(product.x + row * product.x_stride, inputs, x + row * inputs);
  product.x = x;
  product.x_stride = inputs;
  const int64_t grain = helpers->grain(tiles);
  helpers->run(Parts<Product<kBits, T, Out>>{product, grain}, (tiles + grain - 1) / grain);
}

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

using packed::Input;
using packed::kPanel;
using packed::Rows;
using packed::Tiles;

// Many rows of bfloat16, where each output has one scale: blocks of them, packed, against half a tile after the other, as
// numbers in the nearest cache.
template <int kBits, typename Epilogue>
struct ManyRows {
  static constexpr int kOfItem = Epilogue::kPanels;  // tiles of the weight, of two panels each
  static constexpr int kPanels = 2 * kOfItem;
  Input x;
  QuantizedMatrix w;
  Epilogue epilogue;
  Tiles tiles;
  int64_t items = (epilogue.items() + 1) / 2;

  // Behind the inputs of a tile's rows are their sums, where there are zero points.
  int64_t row_words() const { return x.pairs + (w.zeros ? 1 : 0); }
  bool reads_packed() const { return true; }

  void pack_tile(int64_t t, uint32_t* to) const {
    const int height = tiles.rows(t);
    const bf16* from = x.rows + tiles.begin(t) * x.stride;
    packed::pack_rows(from, x.stride, height, x.pairs, to, height, height);
    auto* sums = reinterpret_cast<float*>(to + x.pairs * height);
    for (int r = 0; w.zeros && r < height; ++r) sums[r] = sum_of(from + r * x.stride, w.num_inputs);
  }

  void multiply(const Rows& block, int64_t item, float* sums) const {
    const int64_t of_panel = rows_of(block) * kPanel;
    for (int i = 0; i < kOfItem; ++i) {
      const int64_t tile = epilogue.panel(2 * item, i) / 2;
      multiply_panel<0>(block, tile, sums + 2 * i * of_panel);
      multiply_panel<1>(block, tile, sums + (2 * i + 1) * of_panel);
    }
    for (int half = 0; half < 2 && 2 * item + half < epilogue.items(); ++half) {
      for (int64_t t = block.first_tile; t < block.last_tile; ++t) {
        std::array<const float*, kOfItem> of_tile;
        const int64_t place = (tiles.begin(t) - tiles.begin(block.first_tile)) * kPanel;
        for (int i = 0; i < kOfItem; ++i) of_tile[i] = sums + (2 * i + half) * of_panel + place;
        epilogue.finish(tiles.begin(t), tiles.rows(t), 2 * item + half, of_tile);
      }
    }
  }

 private:
  int64_t rows_of(const Rows& block) const { return tiles.begin(block.last_tile) - tiles.begin(block.first_tile); }

  // sums [rows, 32] of half a tile of weights.
  template <int kHalf>
  void multiply_panel(const Rows& block, int64_t tile, float* sums) const {
    static const Codes<kBits> codes;
    alignas(64) bf16 numbers[2 * packed::kPairsInL1 * kPanel];
    const int64_t count = block.last_tile - block.first_tile, column = tile * kTile + kHalf * kPanel;
    for (int64_t k = 0; k < x.pairs; k += packed::kPairsInL1) {
      const int64_t size = std::min(packed::kPairsInL1, x.pairs - k);
      const uint8_t* from = codes_at<kBits>(w, tile, 2 * k);
      to_panel<kHalf>(codes, from, size, numbers);
      // Meanwhile the codes that follow come nearer.
      const char* ahead = reinterpret_cast<const char*>(from + size * Codes<kBits>::kPairBytes);
      const int64_t step = Codes<kBits>::kPairBytes / count;
      for (int64_t t = block.first_tile; t < block.last_tile; ++t, ahead += size * step) {
        const int height = tiles.rows(t);
        const int64_t place = tiles.begin(t) - tiles.begin(block.first_tile);
        const uint32_t* rows = block.packed + place * row_words();
        float* of_tile = sums + place * kPanel;
        packed::tile_of(height)(rows + k * height, numbers, size, of_tile, k == 0, ahead, step);
        if (k + size < x.pairs) continue;
        const auto* x_sums = reinterpret_cast<const float*>(rows + x.pairs * height);
        packed::scale(of_tile, height, w.scales + column, w.zeros ? w.zeros + column : nullptr, x_sums);
      }
    }
  }
};

template <typename Epilogue>
void run_many(const Input& x, const QuantizedMatrix& w, const Epilogue& epilogue, int64_t num_rows, int num_threads) {
  if (w.bits == 4) {
    packed::RowBlocks(ManyRows<4, Epilogue>{x, w, epilogue, Tiles(num_rows)}, num_threads).run();
  } else {
    packed::RowBlocks(ManyRows<8, Epilogue>{x, w, epilogue, Tiles(num_rows)}, num_threads).run();
  }
}

#endif

}  // namespace

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

bool can_gate(const QuantizedMatrix& w) { return w.num_groups == 1 && w.num_outputs / 2 % kTile == 0; }

void quantized_gated_linear(const bf16* x, int64_t x_stride, const QuantizedMatrix& w, const bf16* bias,
                            Activation activation, bf16* out, int64_t num_rows, int num_threads) {
  if (num_rows == 0) return;
  with_activation(activation, [&](const auto& act) {
    const packed::Gated<std::decay_t<decltype(act)>> gated{bias, out, w.num_outputs / 2, act};
    run_many({x, x_stride, w.num_inputs / 2}, w, gated, num_rows, num_threads);
  });
}

#endif

void quantized_embedding(const int64_t* ids, const QuantizedMatrix& w, bf16* out, int64_t num_ids, int num_threads) {
  parallel_for(num_ids, 4, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t tile = ids[i] / kTile, within = ids[i] % kTile;
      for (int64_t k = 0; k < w.num_inputs; ++k) {
        const int64_t at = scales_at(w, tile, k) + within;
        const uint8_t* pair = w.bits == 4 ? codes_at<4>(w, tile, k / 2 * 2) : codes_at<8>(w, tile, k / 2 * 2);
        const float number = static_cast<float>(number_of(pair, w.bits, static_cast<int>(within), static_cast<int>(k % 2)));
        from_float((number - (w.zeros ? w.zeros[at] : 0.0f)) * w.scales[at], out + i * w.num_inputs + k);
      }
    }
  });
}

template <typename T, typename Out>
void quantized_linear(const T* x, int64_t x_stride, const QuantizedMatrix& w, const T* bias, const T* residual,
                      int64_t residual_stride, Out* out, int64_t num_rows, int num_threads, Helpers* helpers) {
  if (num_rows == 0) return;
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
  if constexpr (std::is_same_v<T, bf16>) {
    if (num_rows > kBlockRows && w.num_groups == 1) {
      const packed::Linear<Out> linear{bias, residual, residual_stride, out, w.num_outputs};
      run_many({x, x_stride, w.num_inputs / 2}, w, linear, num_rows, num_threads);
      return;
    }
  }
#endif
  if (w.bits == 4) {
    run(Product<4, T, Out>{x, x_stride, w, bias, residual, residual_stride, out, num_rows}, num_threads, helpers);
  } else {
    run(Product<8, T, Out>{x, x_stride, w, bias, residual, residual_stride, out, num_rows}, num_threads, helpers);
  }
}

template void quantized_linear(const float*, int64_t, const QuantizedMatrix&, const float*, const float*, int64_t, float*,
                               int64_t, int, Helpers*);
template void quantized_linear(const bf16*, int64_t, const QuantizedMatrix&, const bf16*, const bf16*, int64_t, bf16*,
                               int64_t, int, Helpers*);
template void quantized_linear(const bf16*, int64_t, const QuantizedMatrix&, const bf16*, const bf16*, int64_t, float*,
                               int64_t, int, Helpers*);

}  // namespace pagoda
