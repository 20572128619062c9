// What attention has summed up of its query rows so far, and the memory of a thread that holds it.
#pragma once

#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>

#include "attention/paged_attention_tile.h"

namespace pagoda::attention {

// Memory that grows and is kept by its thread.
template <typename T>
class Buffer {
 public:
  T* get(int64_t count) {
    if (count > size_) {
      size_ = round_up(count + count / 4, 64);
      memory_.reset(static_cast<T*>(std::aligned_alloc(64, static_cast<size_t>(size_) * sizeof(T))));
      if (memory_ == nullptr) throw std::bad_alloc();
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  std::unique_ptr<T, Free> memory_;
  int64_t size_ = 0;
};

// Sums of rows: [row][padded_dim] values and a state each. Where nothing has been added up yet, values do not count.
struct Sums {
  float* values;
  RowState* states;

  void clear(int64_t rows, int64_t width) const {
    std::fill(values, values + rows * width, 0.0f);
    forget(rows);
  }
  void forget(int64_t rows) const { std::fill(states, states + rows, RowState{}); }
};

// total += part, for sums over later keys; the order of partitions is always that of their keys.
inline void add_sums(const Sums& total, const Sums& part, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row) {
    RowState &to = total.states[row], &from = part.states[row];
    if (from.sum == 0.0f) continue;
    float* values = total.values + row * width;
    const float* more = part.values + row * width;
    if (to.sum == 0.0f) {
      to = from;
      std::copy(more, more + width, values);
      continue;
    }
    const float top = std::max(to.reference, from.reference);
    const Vec old_factor(power_of_two(to.reference - top)), new_factor(power_of_two(from.reference - top));
    for (int64_t i = 0; i < width; i += kLanes) {
      store(values + i, fma(load(more + i), new_factor, load(values + i) * old_factor));
    }
    alignas(64) float sums[kLanes];
    store(sums, fma(Vec(from.sum), new_factor, Vec(to.sum) * old_factor));
    to = {top, sums[0]};
  }
}

// What a row's values are divided by: the sum of its weights, and the weight of its head's sink, a key without a value.
inline float denominator(const RowState& state, const float* sinks, int64_t head) {
  return sinks == nullptr ? state.sum : state.sum + std::exp2(sinks[head] * kLog2E - state.reference);
}

template <typename T>
void store_row(const float* values, float sum, int64_t size, T* out) {
  const Vec factor(1.0f / sum);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, load(values + i) * factor);
  if (i < size) store(out + i, load(values + i) * factor, static_cast<int>(size - i));
}

}  // namespace pagoda::attention
