#include "ops.h"
#include "parallel.h"
#include "vec.h"

namespace pagoda {
namespace {

// A head as float32, normed with `weight` unless that is null.
template <typename T>
inline void read_head(const T* from, float* to, int size, const T* weight, float eps, float weight_offset) {
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

template <typename T>
inline void write_head(const float* from, T* to, int size) {
  const int whole = size / kLanes * kLanes, rest = size - whole;
  for (int i = 0; i < whole; i += kLanes) store(to + i, load(from + i));
  if (rest) store(to + whole, load(from + whole, rest), rest);
}

}  // namespace

template <typename T>
void rope_store(T* qkv, int64_t qkv_stride, const T* q_weight, const T* k_weight, float eps, float weight_offset,
                const float* cos, const float* sin, int half, bool is_interleaved, const int64_t* slot_mapping,
                T* k_cache, T* v_cache, const CacheLayout& layout, int64_t num_tokens, int num_heads, int num_kv_heads,
                int head_dim, int num_threads) {
  const int64_t width = static_cast<int64_t>(num_heads + 2 * num_kv_heads) * head_dim;
  const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(width, 1));
  parallel_for(num_tokens, grain, num_threads, [&](int64_t begin, int64_t end) {
    float head[kMaxHeadDim];
    for (int64_t token = begin; token < end; ++token) {
      T* row = qkv + token * qkv_stride;
      const float* c = cos + token * half;
      const float* s = sin + token * half;
      const auto read = [&](const T* from, const T* weight) {
        read_head(from, head, head_dim, weight, eps, weight_offset);
        if (is_interleaved) {
          rotate_neighbours(head, c, s, half);
        } else {
          rotate_halves(head, c, s, half);
        }
      };
      for (int h = 0; h < num_heads; ++h) {
        read(row + h * head_dim, q_weight);
        write_head(head, row + h * head_dim, head_dim);
      }
      const int64_t slot = slot_mapping[token];
      if (slot < 0) continue;
      const int64_t block = slot / layout.block_size, offset = slot % layout.block_size;
      T* k_to = k_cache + block * layout.k_strides[0] + offset * layout.k_strides[1];
      T* v_to = v_cache + block * layout.v_strides[0] + offset * layout.v_strides[1];
      const T* key = row + static_cast<int64_t>(num_heads) * head_dim;
      const T* value = key + static_cast<int64_t>(num_kv_heads) * head_dim;
      for (int h = 0; h < num_kv_heads; ++h) {
        read(key + h * head_dim, k_weight);
        write_head(head, k_to + h * layout.k_strides[2], head_dim);
        std::memcpy(v_to + h * layout.v_strides[2], value + h * head_dim, head_dim * sizeof(T));
      }
    }
  });
}

template void rope_store(float*, int64_t, const float*, const float*, float, float, const float*, const float*, int,
                         bool, const int64_t*, float*, float*, const CacheLayout&, int64_t, int, int, int, int);
template void rope_store(bf16*, int64_t, const bf16*, const bf16*, float, float, const float*, const float*, int, bool,
                         const int64_t*, bf16*, bf16*, const CacheLayout&, int64_t, int, int, int, int);

}  // namespace pagoda
