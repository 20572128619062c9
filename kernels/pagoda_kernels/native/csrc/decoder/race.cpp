#include <vector>

#include "ops.h"
#include "threads/parallel.h"
#include "simd/vec.h"

namespace pagoda {
namespace {

constexpr int64_t kPart = 1024;
// Scores are off by less than half of this, relatively; the exact ones by some units in the last place.
constexpr float kDoubt = 1e-5f;
// The bits of the greatest float below 1.
constexpr int32_t kBelowOne = 0x3f7fffff;

// The finalizer of SplitMix64 (Steele, Lea and Flood 2014) over key and token; its 24 upper bits.
inline int32_t random_bits(uint64_t key, uint64_t token) {
  uint64_t bits = key + (token + 1) * 0x9E3779B97F4A7C15u;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
  return static_cast<int32_t>((bits ^ (bits >> 31)) >> 40);
}

// ln of the normal float > 0 of these bits, relatively right near 1 as well. Cephes' polynomial.
inline float log_of(int32_t bits) {
  // The mantissa within [sqrt(1/2), sqrt(2)).
  const int32_t shifted = bits - 0x3f3504f3;
  const float exponent = static_cast<float>(shifted >> 23);
  const float mantissa = __builtin_bit_cast(float, (shifted & 0x7fffff) + 0x3f3504f3);
  const float f = mantissa - 1.0f, square = f * f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const float tail = p * f * square - 0.5f * square + exponent * -2.12194440e-4f;
  return f + tail + exponent * 0.693359375f;
}

inline float highest_of(const float* x, int count) {
  float highest = 0.0f;
#pragma omp simd reduction(max : highest)
  for (int i = 0; i < count; ++i) highest = highest > x[i] ? highest : x[i];
  return highest;
}

}  // namespace

void race(const float* probs, int64_t stride, const int64_t* keys, int64_t* winners, int64_t num_rows, int64_t size,
          int num_threads) {
  const int64_t parts = (size + kPart - 1) / kPart;
  std::vector<float> best(num_rows * parts);
  std::vector<float> second(num_rows * parts);
  std::vector<int64_t> place(num_rows * parts);
  parallel_for(num_rows * parts, 8, num_threads, [&](int64_t begin, int64_t end) {
    int32_t bits[kPart];
    float scores[kPart];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / parts, first = i % parts * kPart;
      const int count = static_cast<int>(std::min(kPart, size - first));
      const float* from = probs + row * stride + first;
      const uint64_t key = static_cast<uint64_t>(keys[row]);
#pragma omp simd
      for (int j = 0; j < count; ++j) bits[j] = random_bits(key, static_cast<uint64_t>(first + j));
#pragma omp simd
      for (int j = 0; j < count; ++j) {
        const int32_t uniform = __builtin_bit_cast(int32_t, (static_cast<float>(bits[j]) + 0.5f) * 0x1p-24f);
        scores[j] = from[j] / -log_of(uniform < kBelowOne ? uniform : kBelowOne);
      }
      const float highest = highest_of(scores, count);
      int winner = 0;
      while (winner + 1 < count && scores[winner] != highest) ++winner;
      scores[winner] = 0.0f;
      best[i] = highest;
      second[i] = highest_of(scores, count);
      place[i] = first + winner;
    }
  });
  for (int64_t row = 0; row < num_rows; ++row) {
    float first = 0.0f, next = 0.0f;
    int64_t winner = 0;
    for (int64_t i = row * parts; i < (row + 1) * parts; ++i) {
      if (best[i] > first) {
        next = std::max(first, second[i]);
        first = best[i];
        winner = place[i];
      } else {
        next = std::max(next, best[i]);
      }
    }
    winners[row] = first > 0.0f && next < first * (1.0f - kDoubt) ? winner : -1;
  }
}

}  // namespace pagoda
