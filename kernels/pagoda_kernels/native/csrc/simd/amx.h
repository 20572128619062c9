// Tiles of AMX: registers of 16 rows of 64 bytes, and one instruction that multiplies two of them.
#pragma once

#include <cstdint>

#include "simd/vec.h"

namespace pagoda::amx {

#if defined(__AMX_BF16__)

constexpr int kRows = 16;          // of a tile, at most
constexpr int kBlock = 2 * kRows;  // rows whose sums are in registers at a time
constexpr int kWords = 16;  // of four bytes in a row of a tile: what one instruction takes of the inner dimension

// Registers: 0 to 3 are sums, of two tiles of rows with two of columns each; 4 and 5 rows of the left matrix, 6 and 7
// the right one.
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int height, int words) {
    rows[tile] = static_cast<uint8_t>(height);
    row_bytes[tile] = static_cast<uint16_t>(words * 4);
  }
  // `height` rows, up to two tiles of them, with `words` of the inner dimension.
  Shapes(int height, int words) {
    const int low = height < kRows ? height : kRows, high = height - low;
    for (int tile = 0; tile < 2; ++tile) set(tile, low, kWords);
    set(4, low, words);
    if (high > 0) {
      for (int tile = 2; tile < 4; ++tile) set(tile, high, kWords);
      set(5, high, words);
    }
    for (int tile = 6; tile < 8; ++tile) set(tile, words, kWords);
  }
  // Registers 0 to 3 are sums of tiles of 16 rows with up to 16 columns, 4 and 5 such rows, 6 and 7 the columns.
  static Shapes of_columns(int count) {
    Shapes shapes(0, 0);
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, kRows, tile == 4 || tile == 5 ? kWords : count);
    return shapes;
  }
};
static_assert(sizeof(Shapes) == 64);

// What has been written so far is in memory: to a compiler, the loads of tiles do not read what their addresses point
// to.
inline void settle(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

// While it lives, this thread's registers have shapes; afterwards, none: a thread that waits has nothing to save.
class Registers {
 public:
  Registers() = default;
  explicit Registers(int64_t height, int words = kWords) { set(height, words); }
  ~Registers() {
    if (height_ != 0) _tile_release();
  }
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;

  // For up to kBlock rows, with up to kWords words of the inner dimension.
  void set(int64_t height, int words = kWords) {
    if (height == height_ && words == words_) return;
    load(height, words, Shapes(static_cast<int>(height), words));
  }
  // For tiles of 16 rows with up to 16 columns.
  void set_columns(int count) {
    if (count == height_ && words_ == kOfColumns) return;
    load(count, kOfColumns, Shapes::of_columns(count));
  }

 private:
  static constexpr int kOfColumns = -1;

  void load(int64_t height, int words, const Shapes& shapes) {
    height_ = height;
    words_ = words;
    settle(&shapes);
    _tile_loadconfig(&shapes);
  }

  int64_t height_ = 0;
  int words_ = 0;
};

// While it lives, vectors take numbers nearer to zero than normal ones for zero, as tiles always do.
class TinyIsZero {
 public:
  TinyIsZero() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | 0x40 /* denormals are zeros */); }
  ~TinyIsZero() { _mm_setcsr(before_); }
  TinyIsZero(const TinyIsZero&) = delete;
  TinyIsZero& operator=(const TinyIsZero&) = delete;

 private:
  const unsigned before_ = _mm_getcsr();
};

// Where a matrix lies, in bytes: [blocks][rows], kWords words a row.
struct Operand {
  const void* at;
  int64_t stride;  // between rows: of the left matrix, or of the right one's words of the inner dimension
  int64_t step;    // between blocks, of kWords of the inner dimension

  const char* block(int64_t i) const { return static_cast<const char*>(at) + i * step; }
};

constexpr int kTurns = 4;  // of what is done meanwhile, in each block of a product

// Intrinsics take a register's number as it is written.
#define PAGODA_LOAD_TILE(number, passes_by, from, stride) \
  if constexpr (passes_by) {                              \
    _tile_stream_loadd(number, from, stride);             \
  } else {                                                \
    _tile_loadd(number, from, stride);                    \
  }

// Whose lines leave L1 first: those that come only once, or from L2 each time.
enum class Passing { kNothing, kLeft, kRight };  // kLeft: what is added to, too

// out = left right, or added to what is there: `height` rows of 16 or 32 columns, `stride` bytes from one to the next.
// The registers have that height. A sum takes what it adds up in one order, whatever the height: pairs of a block by
// themselves, even ones and odd ones, then the block's sum. `between(turn)` is called in each block between products,
// with 0 to kTurns - 1. Left and Right are Operands, or what has their `at`, `stride` and `block`.
template <bool kIsHigh, bool kIsWide, Passing kPassing, typename Left, typename Right, typename Between>
inline void multiply(const Left& left, const Right& right, int64_t blocks, float* out, int64_t stride, bool adds,
                     const Between& between) {
  constexpr bool kLeftPasses = kPassing == Passing::kLeft, kRightPasses = kPassing == Passing::kRight;
  float* high = out + kRows * stride / 4;
  settle(left.at);
  settle(right.at);
  settle(out);
  if (adds) {
    PAGODA_LOAD_TILE(0, kLeftPasses, out, stride);
    if constexpr (kIsWide) PAGODA_LOAD_TILE(1, kLeftPasses, out + kWords, stride);
    if constexpr (kIsHigh) PAGODA_LOAD_TILE(2, kLeftPasses, high, stride);
    if constexpr (kIsHigh && kIsWide) PAGODA_LOAD_TILE(3, kLeftPasses, high + kWords, stride);
  } else {
    _tile_zero(0);
    if constexpr (kIsWide) _tile_zero(1);
    if constexpr (kIsHigh) _tile_zero(2);
    if constexpr (kIsHigh && kIsWide) _tile_zero(3);
  }
  for (int64_t i = 0; i < blocks; ++i) {
    const char *rows = left.block(i), *columns = right.block(i);
    PAGODA_LOAD_TILE(6, kRightPasses, columns, right.stride);
    PAGODA_LOAD_TILE(4, kLeftPasses, rows, left.stride);
    if constexpr (kIsWide) PAGODA_LOAD_TILE(7, kRightPasses, columns + kWords * 4, right.stride);
    between(0);
    _tile_dpbf16ps(0, 4, 6);
    between(1);
    if constexpr (kIsWide) _tile_dpbf16ps(1, 4, 7);
    between(2);
    if constexpr (kIsHigh) {
      PAGODA_LOAD_TILE(5, kLeftPasses, rows + kRows * left.stride, left.stride);
      _tile_dpbf16ps(2, 5, 6);
    }
    between(3);
    if constexpr (kIsHigh && kIsWide) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, stride);
  if constexpr (kIsWide) _tile_stored(1, out + kWords, stride);
  if constexpr (kIsHigh) _tile_stored(2, high, stride);
  if constexpr (kIsHigh && kIsWide) _tile_stored(3, high + kWords, stride);
}

#endif

}  // namespace pagoda::amx
