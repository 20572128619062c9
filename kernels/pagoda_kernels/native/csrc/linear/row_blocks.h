// Blocks of rows, packed, that stay in L2 while weights pass by, and the threads that divide the work.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "simd/packed_tiles.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace packed {

#if defined(__AMX_BF16__)
constexpr int64_t kBlockBytes = 1 << 20;  // of an L2 of 2 MiB
constexpr int64_t kMaxTiles = 24;         // of one block
#else
constexpr int64_t kBlockBytes = 384 << 10;
constexpr int64_t kMaxTiles = 32;
#endif
constexpr int64_t kOwnTiles = 8;  // threads that find so many each do not share blocks

// Memory of one thread that callers of the kernel share, one after the other; another one for each use.
template <int kUse = 0>
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

struct Input {
  const bf16* rows;
  int64_t stride, pairs;
};

// Some tiles of rows.
struct Rows {
  int64_t first_tile = 0, last_tile = 0;
  const uint32_t* packed =
      nullptr;  // tiles one after the other, as `pack_tile` has written them; null: where they were
};

// Rows with the items that are still to come.
struct Block : Rows {
  std::atomic<bool> is_packed{false};
  std::atomic<int64_t> next_item{0};
};

// All items of all rows of a product, each once. `Work` has
//   static constexpr int kPanels                                   of sums that an item takes
//   static constexpr int kItemsWithSums                            at a time: one, or also the one before
//   Tiles tiles; int64_t items
//   int block_words() const                                        that registers take of a packed row at a time
//   int64_t row_words() const                                      of a packed row; those of a tile are together
//   bool reads_packed() const                                      or rows where they were, which then are few
//   void pack_tile(int64_t tile, uint32_t* to) const
//   Unfinished                                                     what an item may leave, until `finish()` or the next
//   item void multiply(const Rows&, int64_t item, float* sums, Unfinished&) const
template <typename Work>
class RowBlocks {
 public:
  RowBlocks(const Work& work, int num_threads) : work_(work), tiles_(work.tiles), num_threads_(num_threads) {
    const int64_t most = std::clamp<int64_t>(kBlockBytes / (4 * work.row_words() * kTileRows), 1, kMaxTiles);
    is_shared_ = tiles_.count < std::max<int64_t>(2, std::min(most, kOwnTiles) * num_threads);
    int64_t count = (tiles_.count + most - 1) / most;
    if (!is_shared_) count = (count + num_threads - 1) / num_threads * num_threads;
    blocks_ = std::vector<Block>(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      blocks_[i].first_tile = tiles_.count * i / count;
      blocks_[i].last_tile = tiles_.count * (i + 1) / count;
    }
  }

  void run() {
    if (is_shared_) {
      share();
    } else {
      take_turns();
    }
  }

 private:
  // Few rows: all threads pack them, and divide the items.
  void share() {
    const int64_t rows = tiles_.begin(tiles_.count), items = work_.items, words = work_.row_words();
    const int64_t grain = std::max<int64_t>(1, std::min<int64_t>(items / (4 * num_threads_), 512 / rows));
    const int64_t claims = (items + grain - 1) / grain * static_cast<int64_t>(blocks_.size());
    const int threads = static_cast<int>(std::min<int64_t>(num_threads_, claims));
    uint32_t* packed = work_.reads_packed() ? scratch(rows * words) : nullptr;
    if (packed) {
      for (Block& block : blocks_) block.packed = packed + tiles_.begin(block.first_tile) * words;
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      if (packed) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles_.count; ++t) work_.pack_tile(t, packed + tiles_.begin(t) * words);
      }
      for (Block& block : blocks_) multiply(block, grain);
    }
  }

  // Many rows: each thread packs blocks of its own, which stay in its L2 while all items pass by. One that finds no
  // block left takes items of the others'.
  void take_turns() {
    std::atomic<size_t> next{0};
    const int64_t words = work_.row_words();
#pragma omp parallel num_threads(num_threads_) if (num_threads_ > 1)
    {
      for (size_t i = next++; i < blocks_.size(); i = next++) {
        Block& block = blocks_[i];
        const int64_t first = tiles_.begin(block.first_tile);
        uint32_t* packed = scratch((tiles_.begin(block.last_tile) - first) * words);
        for (int64_t t = block.first_tile; t < block.last_tile; ++t) {
          work_.pack_tile(t, packed + (tiles_.begin(t) - first) * words);
        }
        block.packed = packed;
        block.is_packed.store(true, std::memory_order_release);
        multiply(block, 1);
      }
      for (Block& block : blocks_) {
        while (!block.is_packed.load(std::memory_order_acquire)) std::this_thread::yield();
        multiply(block, 1);
      }
    }
  }

  // The items that are not claimed.
  void multiply(Block& block, int64_t grain) {
    alignas(64) float sums[Work::kItemsWithSums][Work::kPanels * kMaxTiles * kTileRows * kPanel];
    int turn = 0;
    const TileRegisters registers(tiles_.height, work_.block_words());
    typename Work::Unfinished unfinished;
    for (;;) {
      const int64_t begin = block.next_item.fetch_add(grain), end = std::min(work_.items, begin + grain);
      if (begin >= work_.items) break;
      for (int64_t item = begin; item < end; ++item) {
        work_.multiply(block, item, sums[turn], unfinished);
        turn = (turn + 1) % Work::kItemsWithSums;
      }
    }
    unfinished.finish();
  }

  const Work& work_;
  const Tiles tiles_;
  const int num_threads_;
  bool is_shared_;
  std::vector<Block> blocks_;
};

}  // namespace packed

#endif

}  // namespace pagoda
