#include "quantized_codes.h"
#include "helpers.h"
#include "parallel.h"

// Products of a part (a group's inputs, or some of them) are summed for all numbers of rows in the same order, an input
// after the other, then scaled and added up: what a row gets never depends on its neighbours.
namespace pagoda {

namespace {

constexpr int64_t kMaxRows = 192;  // rows whose sums stay near: 48 KiB

// Sum of a row's inputs of one part, for the zero points.
template <typename T>
inline float sum_of(const T* x, int64_t size) {
  Vec total;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) total = total + load(x + i);
  if (i < size) total = total + load(x + i, static_cast<int>(size - i));
  return sum(total);
}

// sums [64] += scales * (part - zeros * x_sum)
template <int kVectors>
inline void add_part(const Vec (&part)[kVectors], const float* scales, const float* zeros, float x_sum, float* sums) {
  for (int j = 0; j < kVectors; ++j) {
    Vec p = part[j];
    if (zeros) p = fma(load(zeros + j * kLanes), Vec(-x_sum), p);
    store(sums + j * kLanes, fma(load(scales + j * kLanes), p, load(sums + j * kLanes)));
  }
}

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

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

constexpr int kBlockRows = 6;  // 24 accumulators, 4 vectors of weights, 1 of x

// Weights of a part that are numbers already, [pairs, 64, 2].
struct Numbers {
  static constexpr int64_t kPairBytes = 256;
  void operator()(const uint8_t* from, __m512i (&w)[4]) const {
    for (int j = 0; j < 4; ++j) w[j] = _mm512_load_si512(from + 64 * j);
  }
};

// R rows of x against one part of a tile. Meanwhile kLines lines a pair from `ahead` come nearer.
template <int R, int kLines, typename Source>
void block(const Source& source, const uint8_t* w_from, const uint8_t* ahead, const bf16* x, int64_t x_stride,
           int64_t pairs, const float* scales, const float* zeros, float* sums) {
  __m512 part[R][4];
  const char* rows[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < 4; ++j) part[r][j] = _mm512_setzero_ps();
    rows[r] = reinterpret_cast<const char*>(x + r * x_stride);
  }
  for (int64_t k = 0; k < pairs; ++k) {
    __m512i w[4];
    source(w_from, w);
#pragma GCC unroll 2
    for (int line = 0; line < kLines; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
    w_from += Source::kPairBytes;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      int32_t bits;
      std::memcpy(&bits, rows[r] + 4 * k, sizeof(bits));
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(bits);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) part[r][j] = _mm512_dpbf16_ps(part[r][j], pair, (__m512bh)w[j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Vec all[4] = {part[r][0], part[r][1], part[r][2], part[r][3]};
    add_part<4>(all, scales, zeros, zeros ? sum_of(x + r * x_stride, 2 * pairs) : 0.0f, sums + r * kTile);
  }
}

template <int kLines, typename Source>
void block_of(int64_t rows, const Source& source, const uint8_t* w, const uint8_t* ahead, const bf16* x,
              int64_t x_stride, int64_t pairs, const float* scales, const float* zeros, float* sums) {
  switch (rows) {
    case 1: return block<1, kLines>(source, w, ahead, x, x_stride, pairs, scales, zeros, sums);
    case 2: return block<2, kLines>(source, w, ahead, x, x_stride, pairs, scales, zeros, sums);
    case 3: return block<3, kLines>(source, w, ahead, x, x_stride, pairs, scales, zeros, sums);
    case 4: return block<4, kLines>(source, w, ahead, x, x_stride, pairs, scales, zeros, sums);
    case 5: return block<5, kLines>(source, w, ahead, x, x_stride, pairs, scales, zeros, sums);
    default: return block<6, kLines>(source, w, ahead, x, x_stride, pairs, scales, zeros, sums);
  }
}

// A few rows take the codes to numbers in registers; for more they go through the nearest cache, and the codes of the
// next part come nearer while this one is computed with.
template <int kBits>
void add(const Codes<kBits>& codes, const uint8_t* w, const bf16* x, int64_t x_stride, int64_t rows, int64_t size,
         const float* scales, const float* zeros, float* numbers, float* sums) {
  constexpr int kLines = Codes<kBits>::kPairBytes / 64;
  const int64_t pairs = size / 2;
  if (rows <= kBlockRows) {
    block_of<kLines>(rows, codes, w, w + 2048, x, x_stride, pairs, scales, zeros, sums);
    return;
  }
  auto* to = reinterpret_cast<uint8_t*>(numbers);
  for (int64_t k = 0; k < pairs; ++k, w += Codes<kBits>::kPairBytes) {
    __m512i v[4];
    codes(w, v);
    for (int j = 0; j < 4; ++j) _mm512_store_si512(to + k * Numbers::kPairBytes + 64 * j, v[j]);
  }
  const int64_t count = (rows + kBlockRows - 1) / kBlockRows;
  for (int64_t b = 0; b < count; ++b) {
    const int64_t begin = rows * b / count, height = rows * (b + 1) / count - begin;
    const bf16* from = x + begin * x_stride;
    float* total = sums + begin * kTile;
    if (b < kLines) {
      block_of<1>(height, Numbers(), to, w + b * pairs * 64, from, x_stride, pairs, scales, zeros, total);
    } else {
      block_of<0>(height, Numbers(), to, w, from, x_stride, pairs, scales, zeros, total);
    }
  }
}

#else

template <int kBits>
void add(const Codes<kBits>& codes, const uint8_t* w, const bf16* x, int64_t x_stride, int64_t rows, int64_t size,
         const float* scales, const float* zeros, float* numbers, float* sums) {
  to_floats(codes, w, size / 2, numbers);
  add_floats(x, x_stride, rows, numbers, size, scales, zeros, sums);
}

#endif

template <int kBits>
void add(const Codes<kBits>& codes, const uint8_t* w, const float* x, int64_t x_stride, int64_t rows, int64_t size,
         const float* scales, const float* zeros, float* numbers, float* sums) {
  to_floats(codes, w, size / 2, numbers);
  add_floats(x, x_stride, rows, numbers, size, scales, zeros, sums);
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

  int64_t tiles() const { return (w.num_outputs + kTile - 1) / kTile; }

  // sums [rows, 64] of rows from `first` on.
  void multiply(int64_t tile, int64_t first, int64_t rows, float* numbers, float* sums) const {
    static const Codes<kBits> codes;
    const int64_t tile_bytes = w.num_inputs / 2 * Codes<kBits>::kPairBytes;
    const int64_t part = w.group_size <= kMaxPart ? w.group_size : kMaxPart;
    std::memset(sums, 0, rows * kTile * sizeof(float));
    for (int64_t k = 0; k < w.num_inputs; k += part) {
      const int64_t at = (tile * w.num_groups + k / w.group_size) * kTile;
      add<kBits>(codes, w.codes + tile * tile_bytes + k / 2 * Codes<kBits>::kPairBytes, x + first * x_stride + k, x_stride,
                 rows, std::min(part, w.num_inputs - k), w.scales + at, w.zeros ? w.zeros + at : nullptr, numbers, sums);
    }
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
      alignas(64) float numbers[kMaxPart * kTile];
#pragma omp for schedule(dynamic, grain)
      for (int64_t tile = 0; tile < tiles(); ++tile) {
        for (int64_t slice = 0; slice < slices; ++slice) {
          const int64_t first = num_rows * slice / slices, rows = num_rows * (slice + 1) / slices - first;
          multiply(tile, first, rows, numbers, sums);
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
    alignas(64) float numbers[kMaxPart * kTile];
    for (int64_t tile = part * grain; tile < end(part); ++tile, sums += product.num_rows * kTile) {
      product.multiply(tile, 0, product.num_rows, numbers, sums);
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

}  // namespace

template <typename T, typename Out>
void quantized_linear(const T* x, int64_t x_stride, const QuantizedMatrix& w, const T* bias, const T* residual,
                      int64_t residual_stride, Out* out, int64_t num_rows, int num_threads, Helpers* helpers) {
  if (num_rows == 0) return;
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
