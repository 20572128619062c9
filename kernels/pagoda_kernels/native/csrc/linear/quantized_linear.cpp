#include <type_traits>

#include "linear/any_product.h"
#include "threads/parallel.h"
#include "linear/quantized_blocks.h"
#include "linear/quantized_rows.h"

// Products of a part (a group's inputs, or some of them) are summed for all numbers of rows in the same order, or
// exactly, then scaled and added up: what a row gets never depends on its neighbours.
namespace pagoda {

namespace {

constexpr int64_t kMaxRows = 384;  // rows whose sums stay near: 48 KiB

// Rows of x against float32 weights [size, 32].
template <typename T>
void add_floats(const T* x, int64_t x_stride, int64_t rows, const float* w, int64_t size, const float* scales,
                const float* zeros, float* sums) {
  constexpr int kVectors = kTile / kLanes;
  for (int64_t r = 0; r < rows; ++r, x += x_stride, sums += kTile) {
    Vec part[kVectors];
    float x_sum = 0.0f;
    for (int64_t k = 0; k < size; ++k) {
      const float value = to_float(x[k]);
      x_sum += value;
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) part[j] = fma(Vec(value), load(w + k * kTile + j * kLanes), part[j]);
    }
    for (int j = 0; j < kVectors; ++j) {
      if (zeros) part[j] = fma(load(zeros + j * kLanes), Vec(-x_sum), part[j]);
      store(sums + j * kLanes, fma(load(scales + j * kLanes), part[j], load(sums + j * kLanes)));
    }
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

// x W^T in float32, a tile of outputs after the other: right everywhere, and slow.
template <int kBits, typename T, typename Out>
struct Product {
  const T* x;
  int64_t x_stride;
  QuantizedMatrix w;
  const T *bias, *residual;
  int64_t residual_stride;
  Out* out;
  int64_t num_rows;

  void run(int num_threads) const {
    const int64_t slices = (num_rows + kMaxRows - 1) / kMaxRows, tiles = (w.num_outputs + kTile - 1) / kTile;
    const int64_t grain = std::max<int64_t>(1, std::min<int64_t>(tiles / (8 * num_threads), 128 / num_rows));
    const int threads = static_cast<int>(std::min<int64_t>(num_threads, (tiles + grain - 1) / grain));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      alignas(64) float sums[kMaxRows * kTile];
#pragma omp for schedule(dynamic, grain)
      for (int64_t tile = 0; tile < tiles; ++tile) {
        for (int64_t slice = 0; slice < slices; ++slice) {
          const int64_t first = num_rows * slice / slices, rows = num_rows * (slice + 1) / slices - first;
          multiply(tile, first, rows, sums);
          const int64_t column = tile * kTile;
          finish(sums, rows, std::min<int64_t>(kTile, w.num_outputs - column), bias ? bias + column : nullptr,
                 residual ? residual + first * residual_stride + column : nullptr, residual_stride,
                 out + first * w.num_outputs + column, w.num_outputs);
        }
      }
    }
  }

 private:
  // sums [rows, 32] of a tile, of rows from `first` on.
  void multiply(int64_t tile, int64_t first, int64_t rows, float* sums) const {
    alignas(64) float numbers[kMaxPart * kTile];
    std::memset(sums, 0, rows * kTile * sizeof(float));
    for (int64_t k = 0; k < w.num_inputs; k += part_size(w)) {
      const int64_t size = std::min(part_size(w), w.num_inputs - k), at = scales_at(w, tile, k);
      to_floats<kBits>(Codes<kBits>::at(w, tile, k), size / 4, numbers);
      add_floats(x + first * x_stride + k, x_stride, rows, numbers, size, w.scales + at,
                 w.zeros ? w.zeros + at : nullptr, sums);
    }
  }
};

#if defined(__AVX512BF16__)

using namespace packed;

#if defined(__AMX_BF16__)
constexpr int64_t kAheadBytes = 8 << 10;
#else
constexpr int64_t kAheadBytes = 2 << 10;  // on Zen 4 one row reads 31 GB/s, 25 with 8 KiB
#endif

// Rows of bfloat16, or of eight bits, against codes.
template <int kBits, typename Kind>
struct Quantized {
  struct Stretch {
    const RowLayout* layout;
    int64_t part;
    PanelPart panel;
    bool is_direct;
    alignas(64) uint8_t numbers[kMaxPart / 2 * 128];

    template <typename Meanwhile>
    void add(const uint32_t* tile, int height, float* sums, const Meanwhile&) {
      const RowPart rows = layout->at(tile, height, part);
      PartTile tile_of_part = part_tile_of<Kind, Bytes>(height);
      if constexpr (kBits == 4 && Kind::kScales) {
        if (is_direct) tile_of_part = part_tile_of<Kind, Nibbles>(height);
      }
      tile_of_part(rows, panel, sums);
      panel.ahead += panel.steps * panel.ahead_step;
    }
  };
  static constexpr bool kLeavesVectors = false;
  Input x;
  QuantizedMatrix w;
  RowLayout layout{w};

  int block_words() const { return kBlockWords; }
  int64_t row_words() const { return layout.row_words(); }
  const uint32_t* in_place(int64_t) const { return nullptr; }
  void pack_tile(int64_t row, int rows, int height, uint32_t* to) const {
    packed::pack_tile(x.rows + row * x.stride, x.stride, rows, height, layout, Codes<kBits>::kOffset, to);
  }
  int64_t num_stretches(int64_t) const { return layout.parts(); }
  // A stretch is a part. Codes of four bits become bytes once for several tiles; bfloat16 meets them as bfloat16.
  // Meanwhile those that follow come nearer.
  Stretch stretch(int64_t panel, int64_t i, int64_t num_tiles) const {
    const int64_t k = i * layout.part, size = std::min(layout.part, w.num_inputs - k), at = scales_at(w, panel, k);
    const uint8_t* from = Codes<kBits>::at(w, panel, k);
    const int64_t steps = size / layout.inputs_of_word, bytes = size / 4 * Codes<kBits>::kQuadBytes;
    Stretch s;
    s.layout = &layout;
    s.part = i;
    s.is_direct = Kind::kScales && (kBits == 8 || num_tiles == 1);
    if (!Kind::kScales) {
      to_pairs<kBits>(from, size / 4, s.numbers);
    } else if (!s.is_direct) {
      to_bytes(from, size / 4, s.numbers);
    }
    s.panel = {s.is_direct ? from : s.numbers,
               steps,
               w.scales + at,
               w.zeros ? w.zeros + at : nullptr,
               i == 0,
               reinterpret_cast<const char*>(from + (num_tiles == 1 ? kAheadBytes : bytes)),
               bytes / (steps * num_tiles)};
    return s;
  }
};

#if defined(__AMX_BF16__)

constexpr int64_t kStretchBytes = 16 << 10;  // of numbers, which stay in L1 for all tiles
constexpr int64_t kExactRows = 4;            // so few meet codes of 8 bits in vectors
constexpr int64_t kPieces = 8;               // of a part that becomes pairs

// The same on tiles of AMX. Its sums of bfloat16 are in an order of its own, so all rows are summed here; sums of
// integers are exact wherever they are made.
template <int kBits, typename Kind>
struct QuantizedBlocks {
  // Integers meet codes of eight bits as they lie: what that adds to a sum is known beforehand.
  static constexpr bool kIsCodes = kBits == 8 && Kind::kScales;

  // Some parts of a panel. Other codes become numbers, once for all tiles. Those that follow come nearer meanwhile.
  struct Stretch {
    const BlockLayout& layout;
    Blocks blocks;
    Ahead ahead;
    alignas(64) uint8_t numbers[kStretchBytes];

    Stretch(const QuantizedBlocks& kernel, int64_t panel, int64_t first, int64_t last, int64_t num_tiles)
        : Stretch(kernel, panel, first, last, num_tiles,
                  Codes<kBits>::at(kernel.w, panel, first * kernel.layout.part)) {}
    Stretch(const Stretch&) = delete;
    Stretch& operator=(const Stretch&) = delete;

    template <typename Meanwhile>
    void add(const uint32_t* tile, int height, float* sums, const Meanwhile&) {
      const auto run = [&](auto is_high, auto has_zeros) {
        add_blocks<is_high, Kind, kIsCodes, has_zeros>(layout, tile, height, blocks, ahead, sums);
      };
      const bool is_high = height > amx::kRows;
      if (blocks.zeros) {
        is_high ? run(std::true_type{}, std::true_type{}) : run(std::false_type{}, std::true_type{});
      } else {
        is_high ? run(std::true_type{}, std::false_type{}) : run(std::false_type{}, std::false_type{});
      }
    }

   private:
    Stretch(const QuantizedBlocks& kernel, int64_t panel, int64_t first, int64_t last, int64_t num_tiles,
            const uint8_t* codes)
        : layout(kernel.layout),
          ahead(codes + code_bytes(first, last), code_bytes(first, last),
                (last - first) * (kPieces * !Kind::kScales + layout.blocks * Ahead::kTurns * num_tiles)) {
      const QuantizedMatrix& w = kernel.w;
      const int64_t at = scales_at(w, panel, 0), of_part = layout.part_words() * 128;
      // Parts that fill their blocks are read where they are; tiles would read over the end of another one.
      const int64_t full = layout.part_words() * layout.inputs_of_word;
      const auto fills = [&](int64_t i) { return kIsCodes && layout.size(i) == full; };
      const bool all_but_last = fills(first), also_last = fills(last - 1);
      blocks = {all_but_last ? codes : numbers,
                (also_last ? codes : numbers) + (last - 1 - first) * of_part,
                w.scales + at,
                w.zeros ? w.zeros + at : nullptr,
                first,
                last,
                (w.group_size + layout.part - 1) / layout.part};
      if (also_last) return;
      for (int64_t i = all_but_last ? last - 1 : first; i < last; ++i) {
        convert(codes + code_bytes(first, i), layout.size(i) / 4, numbers + (i - first) * of_part);
      }
      amx::settle(numbers);
    }

    int64_t code_bytes(int64_t first, int64_t last) const {
      return (std::min(last * layout.part, layout.num_inputs) - first * layout.part) / 4 * Codes<kBits>::kQuadBytes;
    }

    // A part, with zeros after it. Pairs of bfloat16 take as long to make as to multiply, so lines come nearer here,
    // too.
    void convert(const uint8_t* from, int64_t quads, uint8_t* to) {
      const int64_t used = quads * 4 / layout.inputs_of_word * 128;
      if constexpr (kIsCodes) {
        std::memcpy(to, from, static_cast<size_t>(used));
      } else if constexpr (Kind::kScales) {
        to_numbers<kBits>(from, quads, to);
      } else {
        for (int64_t i = 0; i < kPieces; ++i) {
          const int64_t begin = quads * i / kPieces, end = quads * (i + 1) / kPieces;
          ahead.fetch();
          to_pairs<kBits>(from + begin * Codes<kBits>::kQuadBytes, end - begin, to + begin * 256);
        }
      }
      std::memset(to + used, 0, static_cast<size_t>(layout.part_words() * 128 - used));
    }
  };
  static constexpr bool kLeavesVectors = false;
  Input x;
  QuantizedMatrix w;
  BlockLayout layout{w};

  int block_words() const { return layout.words; }
  int64_t row_words() const { return layout.row_words(); }
  const uint32_t* in_place(int64_t) const { return nullptr; }
  void pack_tile(int64_t row, int rows, int height, uint32_t* to) const {
    packed::pack_tile(x.rows + row * x.stride, x.stride, rows, height, layout, to);
  }
  int64_t depth() const { return kStretchBytes / (layout.part_words() * 128); }
  int64_t num_stretches(int64_t) const { return (layout.parts() + depth() - 1) / depth(); }
  Stretch stretch(int64_t panel, int64_t i, int64_t num_tiles) const {
    return Stretch(*this, panel, i * depth(), std::min((i + 1) * depth(), layout.parts()), num_tiles);
  }
};

#endif

// Calls f with the kernel for a few rows, and with how many rows a tile of it has at most.
template <int kBits, typename F>
void with_kernel(const Input& x, const QuantizedMatrix& w, [[maybe_unused]] int64_t num_rows, const F& f) {
#if defined(__AMX_BF16__)
  if (!w.quantizes_inputs) return f(QuantizedBlocks<kBits, Floats>{x, w}, kTileRows);
  if (num_rows > kExactRows) return f(QuantizedBlocks<kBits, Integers>{x, w}, kTileRows);
#else
  if (!w.quantizes_inputs) return f(Quantized<kBits, Floats>{x, w}, kVectorRows);
#endif
  f(Quantized<kBits, Integers>{x, w}, kVectorRows);
}

template <typename Epilogue>
void run_panels(const Input& x, const QuantizedMatrix& w, const Epilogue& epilogue, int64_t num_rows, int num_threads,
                Helpers* helpers) {
  const auto run = [&](const auto& kernel, int height) {
    using Kernel = std::decay_t<decltype(kernel)>;
    PanelProduct<Kernel, Epilogue>{kernel, epilogue, Tiles(num_rows, height)}.run(num_threads, helpers);
  };
  w.bits == 4 ? with_kernel<4>(x, w, num_rows, run) : with_kernel<8>(x, w, num_rows, run);
}

#endif

}  // namespace

#if defined(__AVX512BF16__)

std::unique_ptr<AnyProduct> quantized_product(const LinearWeights& weights, const bf16* x, bf16* out,
                                              int64_t num_rows) {
  const QuantizedMatrix& w = weights.quantized;
  const Linear<bf16> linear{weights.bias, nullptr, 0, out, w.num_outputs};
  std::unique_ptr<AnyProduct> product;
  const auto make = [&](const auto& kernel, int height) {
    product = any_product(kernel, linear, Tiles(num_rows, height));
  };
  const Input input{x, w.num_inputs, w.num_inputs / 2};
  w.bits == 4 ? with_kernel<4>(input, w, num_rows, make) : with_kernel<8>(input, w, num_rows, make);
  return product;
}

void quantized_gated_linear(const bf16* x, int64_t x_stride, const QuantizedMatrix& w, const bf16* bias,
                            Activation activation, bf16* out, int64_t num_rows, int num_threads) {
  if (num_rows == 0) return;
  with_activation(activation, [&](const auto& act) {
    const Gated<std::decay_t<decltype(act)>> gated{bias, out, w.num_outputs / 2, act};
    run_panels({x, x_stride, w.num_inputs / 2}, w, gated, num_rows, num_threads, nullptr);
  });
}

#endif

void quantized_embedding(const int64_t* ids, const QuantizedMatrix& w, bf16* out, int64_t num_ids, int num_threads) {
  parallel_for(num_ids, 4, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t tile = ids[i] / kTile, within = ids[i] % kTile;
      for (int64_t k = 0; k < w.num_inputs; ++k) {
        const int64_t at = scales_at(w, tile, k) + within;
        const int output = static_cast<int>(within), input = static_cast<int>(k % 4);
        const int code = w.bits == 4 ? Codes<4>::number(Codes<4>::at(w, tile, k - input), output, input)
                                     : Codes<8>::number(Codes<8>::at(w, tile, k - input), output, input);
        const float number = static_cast<float>(code);
        from_float((number - (w.zeros ? w.zeros[at] : 0.0f)) * w.scales[at], out + i * w.num_inputs + k);
      }
    }
  });
}

template <typename T, typename Out>
void quantized_linear(const T* x, int64_t x_stride, const QuantizedMatrix& w, const T* bias, const T* residual,
                      int64_t residual_stride, Out* out, int64_t num_rows, int num_threads,
                      [[maybe_unused]] Helpers* helpers) {
  if (num_rows == 0) return;
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    const Linear<Out> linear{bias, residual, residual_stride, out, w.num_outputs};
    run_panels({x, x_stride, w.num_inputs / 2}, w, linear, num_rows, num_threads, helpers);
    return;
  }
#endif
  if (w.bits == 4) {
    Product<4, T, Out>{x, x_stride, w, bias, residual, residual_stride, out, num_rows}.run(num_threads);
  } else {
    Product<8, T, Out>{x, x_stride, w, bias, residual, residual_stride, out, num_rows}.run(num_threads);
  }
}

template void quantized_linear(const float*, int64_t, const QuantizedMatrix&, const float*, const float*, int64_t,
                               float*, int64_t, int, Helpers*);
template void quantized_linear(const bf16*, int64_t, const QuantizedMatrix&, const bf16*, const bf16*, int64_t, bf16*,
                               int64_t, int, Helpers*);
template void quantized_linear(const bf16*, int64_t, const QuantizedMatrix&, const bf16*, const bf16*, int64_t, float*,
                               int64_t, int, Helpers*);

}  // namespace pagoda
