#include "linear/any_product.h"
#include "linear/compressed_weight.h"
#include "linear/packed_pairs.h"
#include "threads/parallel.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace {

using namespace packed;

constexpr int64_t kAheadUnits = 6;         // that come nearer: 9 KiB of codes
constexpr int64_t kWholeRows = 1536;       // so many pass over a matrix often enough to decompress it once for all
constexpr int64_t kWholeBytes = 32 << 20;  // unless it is larger than this, which the calling thread keeps for it

// Compressed weights, which become numbers once for all tiles of some rows.
struct CompressedPairs : PairRows {
#if defined(__AMX_BF16__)
  static constexpr int64_t kMostPairs = kPairsForMany;
  int64_t pairs_at_once() const { return pairs_in_l1(); }
#else
  static constexpr int64_t kMostPairs = 512;  // 64 KiB: vectors read them as quickly out of L2, and begin less often
  int64_t pairs_at_once() const { return kMostPairs; }
#endif

  // Some pairs of a panel. The first tile makes numbers of them; for one tile alone a few at a time.
  struct Stretch {
    const CompressedPairs& kernel;
    int64_t panel, begin, size;  // pairs
    int64_t num_tiles, num_added = 0;
    alignas(64) bf16 weights[kMostPairs * 2 * kPanel];

    Stretch(const CompressedPairs& kernel, int64_t panel, int64_t begin, int64_t size, int64_t num_tiles)
        : kernel(kernel), panel(panel), begin(begin), size(size), num_tiles(num_tiles) {}
    Stretch(const Stretch&) = delete;
    Stretch& operator=(const Stretch&) = delete;

    template <typename Meanwhile>
    void add(const uint32_t* tile, int height, float* sums, const Meanwhile& meanwhile) {
      const uint32_t* x = tile + begin * height;
      if (num_added++ == 0) return add_decompressing(x, height, sums, meanwhile);
      add_decompressed(x, height, sums, meanwhile);
    }

    Unit unit(int64_t i, int64_t ahead = kAheadUnits) const {
      return {kernel.weight, panel, begin / kUnitPairs + i, units_of(kernel.x.pairs), ahead};
    }

#if defined(__AMX_BF16__)
    template <typename Meanwhile>
    void add_decompressed(const uint32_t* x, int height, float* sums, const Meanwhile& meanwhile) {
      packed::tile(x, height, weights, size, sums, begin == 0, reinterpret_cast<const char*>(x), 0, meanwhile);
    }

    template <typename Meanwhile>
    void add_decompressing(const uint32_t* x, int height, float* sums, const Meanwhile& meanwhile) {
      return height > amx::kRows ? add_decompressing<true>(x, height, sums, meanwhile)
                                 : add_decompressing<false>(x, height, sums, meanwhile);
    }

    // Units that follow each other; after the last place comes the first one again.
    struct Ring {
      const bf16* at;
      int64_t stride, mask;
      const char* block(int64_t i) const { return reinterpret_cast<const char*>(at + (i & mask) * kUnitNumbers); }
    };

    // While tiles multiply one unit, the one after the next is decompressed.
    template <bool kIsHigh, typename Meanwhile>
    void add_decompressing(const uint32_t* x, int height, float* sums, const Meanwhile& meanwhile) {
      constexpr int64_t kRow = amx::kWords * 4, kStride = kPanel * 4, kAtOnce = 2;
      const int64_t units = units_of(size);
      const Ring ring{weights, kStride, kernel.pairs_at_once() / kUnitPairs - 1};
      int64_t i = 0;
      for (; i < std::min(kAtOnce, units); ++i) decompress(unit(i), weights + i * kUnitNumbers);
      Unit next = unit(i);
      const auto between = [&](int turn) __attribute__((always_inline)) {
        if (turn == 0) meanwhile(units);
        if (i == units) return;
        bf16* to = weights + (i & ring.mask) * kUnitNumbers;
        for (int group = 2 * turn; group < 2 * turn + 2; ++group) {
          next.ahead.fetch(group * kGroupBytes);
          next.decompress_group(group, to);
        }
        if (turn + 1 == amx::kTurns) {
          next.set_outliers(to);
          amx::settle(weights);
          next = unit(++i);
        }
      };
      const amx::Operand rows{x, kRow, height * kRow};
      amx::multiply<kIsHigh, true, amx::Passing::kLeft>(rows, ring, units, sums, kStride, begin > 0, between);
    }
#else
    // Codes come nearer while tiles multiply: for one tile those some units ahead, for several the next stretch's, a
    // share with each tile.
    int64_t units_ahead() const { return num_tiles == 1 ? kAheadUnits : units_of(size); }
    int64_t step() const { return kUnitBytes / kUnitPairs / num_tiles; }  // for a pair, of each stream

    template <typename Meanwhile>
    void add_decompressed(const uint32_t* x, int height, float* sums, const Meanwhile&) {
      const Streams<const uint8_t> ahead = unit(0, units_ahead()).ahead;
      const int64_t first = (num_added - 1) * size, of_pair = step();
      const auto fetch = [&](int64_t k) __attribute__((always_inline)) { ahead.fetch((first + k) * of_pair); };
      with_height(height, [&](auto rows) { tile<decltype(rows)::value>(x, weights, size, sums, begin == 0, fetch); });
    }

    template <typename Meanwhile>
    void add_decompressing(const uint32_t* x, int height, float* sums, const Meanwhile&) {
      with_height(height, [&](auto rows) { add_decompressing<decltype(rows)::value>(x, sums); });
    }

    bf16* place(int64_t i) {
      const int64_t places = num_tiles == 1 ? 2 : kMostPairs / kUnitPairs;
      return weights + (i & (places - 1)) * kUnitNumbers;
    }

    // While some lines of one unit are multiplied, as many of the next one are decompressed.
    template <int R>
    void add_decompressing(const uint32_t* x, float* sums) {
      constexpr int kGroupPairs = kUnitPairs / kGroups;
      const int64_t units = units_of(size), last = units - 1, of_group = kGroupPairs * step();
      decompress(unit(0), place(0));
      Streams<const uint8_t> ahead = unit(0, units_ahead()).ahead;
      VectorSums<R> of_tile(sums, begin == 0);
      for (int64_t i = 0; i < last; ++i) {
        const Unit next = unit(i + 1);
        const bf16* w = place(i);
        bf16* to = place(i + 1);
        if (num_tiles == 1) ahead = next.ahead;
        for (int group = 0; group < kGroups; ++group) {
          ahead.fetch(group * of_group);
          next.decompress_group(group, to);
#pragma GCC unroll 2
          for (int k = 0; k < kGroupPairs; ++k, x += R, w += 2 * kPanel) of_tile.add(x, w);
        }
        ahead.at += kGroups * of_group;
        next.set_outliers(to);
      }
      const bf16* w = place(last);
      for (int64_t k = last * kUnitPairs; k < size; ++k, x += R, w += 2 * kPanel) of_tile.add(x, w);
      of_tile.store(sums);
    }
#endif
  };
  CompressedMatrix weight;

  int64_t depth(int64_t num_tiles) const { return num_tiles == 1 ? x.pairs : pairs_at_once(); }
  int64_t num_stretches(int64_t num_tiles) const { return (x.pairs + depth(num_tiles) - 1) / depth(num_tiles); }
  Stretch stretch(int64_t panel, int64_t i, int64_t num_tiles) const {
    const int64_t begin = i * depth(num_tiles);
    return Stretch(*this, panel, begin, std::min(depth(num_tiles), x.pairs - begin), num_tiles);
  }
};

// The packed weight, where that is faster; else null.
const bf16* decompressed(const CompressedMatrix& weight, int64_t num_rows, int64_t num_outputs, int64_t num_inputs,
                         int num_threads) {
  const int64_t panels = (num_outputs + kPanel - 1) / kPanel, units = units_of(num_inputs / 2);
  const int64_t bytes = panels * units * kUnitNumbers * 2;
  if (num_rows < kWholeRows || bytes > kWholeBytes || num_inputs % (2 * kUnitPairs) != 0) return nullptr;
  bf16* to = reinterpret_cast<bf16*>(scratch<1>(bytes / 4));
  parallel_for(panels, 1, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * units; i < end * units; ++i) {
      decompress(Unit(weight, i / units, i % units, units, kAheadUnits), to + i * kUnitNumbers);
    }
  });
  return to;
}

}  // namespace

int64_t compressed_units(int64_t num_outputs, int64_t num_inputs) {
  return (num_outputs + kPanel - 1) / kPanel * units_of(num_inputs / 2);
}

int64_t compressed_code_bytes(int64_t num_outputs, int64_t num_inputs) {
  return compressed_units(num_outputs, num_inputs) * kStreams * kUnitBytes;
}

bool compress_weight(const bf16* weight, uint8_t* codes, uint32_t* words, uint32_t* outliers, int64_t capacity,
                     int64_t num_outputs, int64_t num_inputs, int num_threads) {
  const int64_t pairs = num_inputs / 2, units = units_of(pairs), panels = (num_outputs + kPanel - 1) / kPanel;
  std::vector<std::vector<uint32_t>> of_panels(static_cast<size_t>(panels));
  parallel_for(panels, 4, num_threads, [&](int64_t begin, int64_t end) {
    std::vector<bf16> lines(static_cast<size_t>(units * kUnitNumbers), bf16{0});
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t row = panel * kPanel;
      pack_weight(weight + row * num_inputs, lines.data(), std::min<int64_t>(kPanel, num_outputs - row), num_inputs, 1);
      auto& found = of_panels[static_cast<size_t>(panel)];
      for (int64_t u = 0; u < units; ++u) {
        const int64_t unit = panel * units + u;
        const auto first = static_cast<uint32_t>(found.size());
        words[unit] = compress(lines.data() + u * kUnitNumbers, pairs - u * kUnitPairs, num_outputs - row,
                               {codes, panel, u, units}, found) |
                      first;
      }
    }
  });
  int64_t count = 0;
  for (int64_t panel = 0; panel < panels; ++panel) {
    const auto& found = of_panels[static_cast<size_t>(panel)];
    const auto size = static_cast<int64_t>(found.size());
    if (count + size > std::min<int64_t>(capacity, kOutlierMask)) return false;
    for (int64_t u = 0; u < units; ++u) words[panel * units + u] += static_cast<uint32_t>(count);
    std::copy(found.begin(), found.end(), outliers + count);
    count += size;
  }
  words[panels * units] = static_cast<uint32_t>(count);
  return true;
}

void compressed_embedding(const int64_t* ids, const CompressedMatrix& weight, bf16* out, int64_t num_ids,
                          int64_t num_inputs, int num_threads) {
  const int64_t pairs = num_inputs / 2, units = units_of(pairs);
  parallel_for(num_ids, 8, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = ids[i] / kPanel * units, half = ids[i] % kPanel / kLanes, lane = ids[i] % kLanes * 2;
      bf16* to = out + i * num_inputs;
      for (int64_t k = 0; k < pairs; ++k) {
        // Both numbers of a pair at once, in the halves of a word.
        const int64_t unit = k / kUnitPairs, line = k % kUnitPairs * 2 + half;
        const Streams<const uint8_t> of_unit(weight.codes, ids[i] / kPanel, unit, units);
        const int group = static_cast<int>(line / kGroupLines), in_group = static_cast<int>(line % kGroupLines);
        uint32_t words[kStreams];
        for (int j = 0; j < kStreams; ++j) std::memcpy(&words[j], of_unit.words(j, group) + 2 * lane, 4);
        const auto select = [](uint32_t mask, uint32_t word) { return word & (mask << 16 | mask); };
        const uint32_t code = in_group < kStreams ? select(kOwnBits, words[in_group])
                                                  : select(0x0780, words[0] >> 4) | select(0x0078, words[1] >> 8) |
                                                        select(0x8000, words[2] << 4) | select(0x0007, words[2] >> 12);
        const uint32_t least = weight.units[first + unit] >> kExponentShift << kFraction;
        const uint32_t numbers = code + (least << 16 | least);
        std::memcpy(to + 2 * k, &numbers, 4);
      }
      for (int64_t u = 0; u < units; ++u) {
        const uint32_t end_of_unit = weight.units[first + u + 1] & kOutlierMask;
        for (uint32_t o = weight.units[first + u] & kOutlierMask; o < end_of_unit; ++o) {
          const int64_t place = weight.outliers[o] >> 16, line = place / kLineNumbers,
                        number = place % kLineNumbers - lane;
          if (line % 2 != half || (number != 0 && number != 1)) continue;
          to[(u * kUnitPairs + line / 2) * 2 + number].bits = static_cast<uint16_t>(weight.outliers[o]);
        }
      }
    }
  });
}

template <typename Out>
void compressed_linear(const bf16* x, int64_t x_stride, const CompressedMatrix& weight, const bf16* bias,
                       const bf16* residual, int64_t residual_stride, Out* out, int64_t num_rows, int64_t num_outputs,
                       int64_t num_inputs, int num_threads, Helpers* helpers) {
  if (num_rows == 0) return;
  if (const bf16* packed = decompressed(weight, num_rows, num_outputs, num_inputs, num_threads)) {
    return packed_linear<Out>(x, x_stride, packed, bias, residual, residual_stride, out, num_rows, num_outputs,
                              num_inputs, num_threads, nullptr);  // these are too many for helpers
  }
  const Linear<Out> linear{bias, residual, residual_stride, out, num_outputs};
  const CompressedPairs pairs{{{x, x_stride, num_inputs / 2}, num_rows}, weight};
  PanelProduct<CompressedPairs, Linear<Out>>{pairs, linear, Tiles(num_rows)}.run(num_threads, helpers);
}

void compressed_gated_linear(const bf16* x, int64_t x_stride, const CompressedMatrix& weight, const bf16* bias,
                             Activation activation, bf16* out, int64_t num_rows, int64_t size, int64_t num_inputs,
                             int num_threads) {
  if (num_rows == 0) return;
  if (const bf16* packed = decompressed(weight, num_rows, 2 * size, num_inputs, num_threads)) {
    return packed_gated_linear(x, x_stride, packed, bias, activation, out, num_rows, size, num_inputs, num_threads);
  }
  with_activation(activation, [&](const auto& act) {
    const Gated<std::decay_t<decltype(act)>> gated{bias, out, size, act};
    const CompressedPairs pairs{{{x, x_stride, num_inputs / 2}, num_rows}, weight};
    PanelProduct<CompressedPairs, std::decay_t<decltype(gated)>>{pairs, gated, Tiles(num_rows)}.run(num_threads);
  });
}

std::unique_ptr<AnyProduct> compressed_product(const LinearWeights& weights, const bf16* x, bf16* out,
                                               int64_t num_rows) {
  const Linear<bf16> linear{weights.bias, nullptr, 0, out, weights.num_outputs};
  const CompressedPairs pairs{{{x, weights.num_inputs, weights.num_inputs / 2}, num_rows}, weights.compressed};
  return any_product(pairs, linear, Tiles(num_rows));
}

template void compressed_linear(const bf16*, int64_t, const CompressedMatrix&, const bf16*, const bf16*, int64_t,
                                float*, int64_t, int64_t, int64_t, int, Helpers*);
template void compressed_linear(const bf16*, int64_t, const CompressedMatrix&, const bf16*, const bf16*, int64_t, bf16*,
                                int64_t, int64_t, int64_t, int, Helpers*);

#endif

}  // namespace pagoda
