#include "ops.h"
#include "threads/parallel.h"
#include "simd/vec.h"

namespace pagoda {
namespace {

// One head to codes and the scale at the row's end; the rows of pagoda_kernels/attention/quantized_cache.py, bit for
// bit.
template <typename T>
void store_row(const T* from, int64_t size, int8_t* row, int64_t width) {
  const int64_t whole = size / kLanes * kLanes;
  const int rest = static_cast<int>(size - whole);
  Vec top;
  bool has_nan = false;
  const auto look = [&](Vec x) {
    top = max(max(x, Vec() - x), top);
    has_nan = has_nan || std::isnan(sum(x * Vec()));
  };
  for (int64_t i = 0; i < whole; i += kLanes) look(load(from + i));
  if (rest) look(load(from + whole, rest));
  // x * 0 is NaN for infinities too: their scale is one or the other, and the codes are 0 as with PyTorch's NaN.
  float scale = maximum(top) / 127.0f;
  if (has_nan && !std::isinf(scale)) scale = std::nanf("");
  std::memset(row + size, 0, width - size);
  std::memcpy(row + width - sizeof(float), &scale, sizeof(float));
  if (has_nan || scale == 0.0f) {
    std::memset(row, 0, size);
    return;
  }
  alignas(64) float codes[kLanes];
  for (int64_t i = 0; i < size; i += kLanes) {
    const int count = i < whole ? kLanes : rest;
    const Vec x = i < whole ? load(from + i) : load(from + i, rest);
    store(codes, max(min(round_even(x / Vec(scale)), Vec(127.0f)), Vec(-127.0f)));
    for (int j = 0; j < count; ++j) row[i + j] = static_cast<int8_t>(codes[j]);
  }
}

}  // namespace

template <typename T>
void store_int8(const T* key, const T* value, const int64_t* slot_mapping, int8_t* k_cache, int8_t* v_cache,
                const Int8Rows& rows, int num_threads) {
  const int64_t grain = std::max<int64_t>(1, 4096 / std::max<int64_t>(rows.num_kv_heads * rows.head_dim, 1));
  parallel_for(rows.num_tokens, grain, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      if (slot_mapping[token] < 0) continue;
      for (int64_t head = 0; head < rows.num_kv_heads; ++head) {
        const int64_t to = (slot_mapping[token] * rows.num_kv_heads + head) * rows.width;
        store_row(key + token * rows.key_stride + head * rows.head_dim, rows.head_dim, k_cache + to, rows.width);
        store_row(value + token * rows.value_stride + head * rows.head_dim, rows.head_dim, v_cache + to, rows.width);
      }
    }
  });
}

template void store_int8(const float*, const float*, const int64_t*, int8_t*, int8_t*, const Int8Rows&, int);
template void store_int8(const bf16*, const bf16*, const int64_t*, int8_t*, int8_t*, const Int8Rows&, int);

}  // namespace pagoda
