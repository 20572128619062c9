#include "ops.h"
#include "threads/parallel.h"
#include "simd/vec.h"

namespace pagoda {
namespace {

// A head as float32, normed with `weight` unless that is null. `from` may be `to`.
template <typename S, typename T>
inline void read_head(const S* from, float* to, int size, const T* weight, float eps, float weight_offset) {
  const int whole = size / kLanes * kLanes, rest = size - whole;
  Vec squares;
  for (int i = 0; i < whole; i += kLanes) {
    const Vec v = load(from + i);
    squares = fma(v, v, squares);
    store(to + i, v);
  }
  if (rest) {
    const Vec v = load(from + whole, rest);
    squares = fma(v, v, squares);
    store(to + whole, v, rest);
  }
  if (weight == nullptr) return;
  const Vec scale(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
  const Vec offset(weight_offset);
  for (int i = 0; i < whole; i += kLanes) store(to + i, load(to + i) * scale * (load(weight + i) + offset));
  if (rest) store(to + whole, load(to + whole, rest) * scale * (load(weight + whole, rest) + offset), rest);
}

inline void rotate_halves(float* x, const float* cos, const float* sin, int half) {
  const int whole = half / kLanes * kLanes, rest = half - whole;
  for (int i = 0; i < whole; i += kLanes) {
    const Vec first = load(x + i), second = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, first * c - second * s);
    store(x + half + i, second * c + first * s);
  }
  if (rest) {
    const Vec first = load(x + whole, rest), second = load(x + half + whole, rest);
    const Vec c = load(cos + whole, rest), s = load(sin + whole, rest);
    store(x + whole, first * c - second * s, rest);
    store(x + half + whole, second * c + first * s, rest);
  }
}

inline void rotate_neighbours(float* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; ++i) {
    const float first = x[2 * i], second = x[2 * i + 1];
    x[2 * i] = first * cos[i] - second * sin[i];
    x[2 * i + 1] = second * cos[i] + first * sin[i];
  }
}

template <typename T, int kVectors>
inline void norm_vectors(Vec* x, const T* weight, float eps, float weight_offset) {
  Vec squares;
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) squares = fma(x[i], x[i], squares);
  const Vec scale(1.0f / std::sqrt(sum(squares) / static_cast<float>(kVectors * kLanes) + eps)), offset(weight_offset);
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) x[i] = x[i] * scale * (load(weight + i * kLanes) + offset);
}

// A head of 2 * kHalf vectors, read, normed, rotated by halves and written in registers: the same numbers.
template <typename T, int kHalf, bool kIsLast>
inline void rotate_head(const T* from, T* to, const T* weight, float eps, float weight_offset, const float* cos,
                        const float* sin) {
  constexpr int kVectors = 2 * kHalf;
  Vec x[kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) x[i] = load(from + i * kLanes);
  if (!kIsLast && weight != nullptr) norm_vectors<T, kVectors>(x, weight, eps, weight_offset);
#pragma GCC unroll 8
  for (int i = 0; i < kHalf; ++i) {
    const Vec first = x[i], second = x[kHalf + i], c = load(cos + i * kLanes), s = load(sin + i * kLanes);
    x[i] = first * c - second * s;
    x[kHalf + i] = second * c + first * s;
  }
  if (kIsLast) norm_vectors<T, kVectors>(x, weight, eps, weight_offset);
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) store(to + i * kLanes, x[i]);
}

template <typename T>
using RotateHead = void (*)(const T*, T*, const T*, float, float, const float*, const float*);

// Of whole heads rotated by halves; null: there is none for this size. kIsLast: norms follow the rotation.
template <typename T, bool kIsLast>
inline RotateHead<T> rotate_head_of(int head_dim, int half, bool is_interleaved) {
  if (is_interleaved || 2 * half != head_dim) return nullptr;
  if (half == 2 * kLanes) return rotate_head<T, 2, kIsLast>;
  if (half == 4 * kLanes) return rotate_head<T, 4, kIsLast>;
  if (half == 8 * kLanes) return rotate_head<T, 8, kIsLast>;
  return nullptr;
}

template <typename T>
inline void write_head(const float* from, T* to, int size) {
  const int whole = size / kLanes * kLanes, rest = size - whole;
  for (int i = 0; i < whole; i += kLanes) store(to + i, load(from + i));
  if (rest) store(to + whole, load(from + whole, rest), rest);
}

}  // namespace

template <typename T>
void rope_store(T* qkv, int64_t qkv_stride, const HeadNorms<T>& norms, const float* cos, const float* sin, int half,
                bool is_interleaved, const int64_t* slot_mapping, T* k_cache, T* v_cache, const CacheLayout& layout,
                int64_t num_tokens, int num_heads, int num_kv_heads, int head_dim, int num_threads) {
  const int64_t width = static_cast<int64_t>(num_heads + 2 * num_kv_heads) * head_dim;
  const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(width, 1));
  const bool has_whole_values = layout.v_strides[2] == head_dim;  // the heads of a token side by side
  const bool is_last = norms.is_last && norms.q_weight != nullptr;
  const RotateHead<T> in_registers = is_last ? rotate_head_of<T, true>(head_dim, half, is_interleaved)
                                             : rotate_head_of<T, false>(head_dim, half, is_interleaved);
  parallel_for(num_tokens, grain, num_threads, [&](int64_t begin, int64_t end) {
    float head[kMaxHeadDim];
    for (int64_t token = begin; token < end; ++token) {
      T* row = qkv + token * qkv_stride;
      const float* c = cos + token * half;
      const float* s = sin + token * half;
      const auto rotate = [&](const T* from, T* to, const T* weight) {
        if (in_registers != nullptr) return in_registers(from, to, weight, norms.eps, norms.weight_offset, c, s);
        read_head(from, head, head_dim, is_last ? nullptr : weight, norms.eps, norms.weight_offset);
        if (is_interleaved) {
          rotate_neighbours(head, c, s, half);
        } else {
          rotate_halves(head, c, s, half);
        }
        if (is_last) read_head(head, head, head_dim, weight, norms.eps, norms.weight_offset);
        write_head(head, to, head_dim);
      };
      for (int h = 0; h < num_heads; ++h) rotate(row + h * head_dim, row + h * head_dim, norms.q_weight);
      const int64_t slot = slot_mapping[token];
      if (slot < 0) continue;
      const int64_t block = slot / layout.block_size, offset = slot % layout.block_size;
      T* k_to = k_cache + block * layout.k_strides[0] + offset * layout.k_strides[1];
      T* v_to = v_cache + block * layout.v_strides[0] + offset * layout.v_strides[1];
      const T* key = row + static_cast<int64_t>(num_heads) * head_dim;
      const T* value = key + static_cast<int64_t>(num_kv_heads) * head_dim;
      for (int h = 0; h < num_kv_heads; ++h) {
        rotate(key + h * head_dim, k_to + h * layout.k_strides[2], norms.k_weight);
        if (!has_whole_values) std::memcpy(v_to + h * layout.v_strides[2], value + h * head_dim, head_dim * sizeof(T));
      }
      if (has_whole_values) std::memcpy(v_to, value, static_cast<size_t>(num_kv_heads) * head_dim * sizeof(T));
    }
  });
}

template void rope_store(float*, int64_t, const HeadNorms<float>&, const float*, const float*, int, bool,
                         const int64_t*, float*, float*, const CacheLayout&, int64_t, int, int, int, int);
template void rope_store(bf16*, int64_t, const HeadNorms<bf16>&, const float*, const float*, int, bool, const int64_t*,
                         bf16*, bf16*, const CacheLayout&, int64_t, int, int, int, int);

}  // namespace pagoda
