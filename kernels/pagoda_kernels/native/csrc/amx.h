// Tiles of AMX: registers of 16 rows of 64 bytes, and one instruction that multiplies two of them.
#pragma once

#include <cstdint>

#include "vec.h"

namespace pagoda::amx {

#if defined(__AMX_BF16__)

constexpr int kRows = 16;   // of a tile, at most
constexpr int kWords = 16;  // of four bytes in a row of a tile: what one instruction takes of the inner dimension

// Registers: 0 to 3 are sums, of two tiles of rows with two of columns each; 4 and 5 rows of the left matrix, 6 and 7 the
// right one.
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
};
static_assert(sizeof(Shapes) == 64);

// What has been written so far is in memory: to a compiler, the loads of tiles do not read what their addresses point to.
inline void settle(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

// Within: this thread's tiles have shapes. Behind, none: a thread that waits has nothing to save.
class Tiles {
 public:
  explicit Tiles(const Shapes& shapes) {
    settle(&shapes);
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

#endif

}  // namespace pagoda::amx
