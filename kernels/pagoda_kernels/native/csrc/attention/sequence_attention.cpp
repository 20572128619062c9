// Attention of whole sequences that lie one after the other, without a cache: encoders.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "attention/sequence_pairs.h"
#include "ops.h"
#include "simd/vec.h"

namespace pagoda {
namespace {

constexpr int kRows = kLanes == 16 ? 8 : 6;  // rows of a product whose sums are in registers
constexpr int kPanel = 2 * kLanes;           // columns of them
constexpr int64_t kBlock = 48;               // queries whose scores are held at a time, a multiple of kRows

inline int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// c [R, kPanel] = a [R, depth] b [depth, kPanel]; rows of a and c lie apart, b is a panel.
template <int R>
inline void product(const float* a, int64_t a_stride, const float* b, int64_t depth, float* c, int64_t c_stride) {
  Vec low[R], high[R];
  for (int64_t k = 0; k < depth; ++k) {
    const Vec left = load(b + k * kPanel), right = load(b + k * kPanel + kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec factor(a[r * a_stride + k]);
      low[r] = fma(factor, left, low[r]);
      high[r] = fma(factor, right, high[r]);
    }
  }
  for (int r = 0; r < R; ++r) {
    store(c + r * c_stride, low[r]);
    store(c + r * c_stride + kLanes, high[r]);
  }
}

// The same of any number of rows and panels. Each panel stays in the first cache while all rows are multiplied with it.
void products(const float* a, int64_t a_stride, int64_t rows, const float* b, int64_t depth, int64_t panels, float* c,
              int64_t c_stride) {
  for (int64_t panel = 0; panel < panels; ++panel) {
    const float* factors = b + panel * depth * kPanel;
    float* to = c + panel * kPanel;
    int64_t row = 0;
    for (; row + kRows <= rows; row += kRows) {
      product<kRows>(a + row * a_stride, a_stride, factors, depth, to + row * c_stride, c_stride);
    }
    for (; row + 2 <= rows; row += 2) {
      product<2>(a + row * a_stride, a_stride, factors, depth, to + row * c_stride, c_stride);
    }
    if (row < rows) product<1>(a + row * a_stride, a_stride, factors, depth, to + row * c_stride, c_stride);
  }
}

// One head of one sequence, in float32; what a thread computes with is made once.
class Head {
 public:
  template <typename T>
  void attend(const SequenceBatch& batch, const T* query, const T* key, const T* value, T* out, int64_t length,
              float slope) {
    const int64_t width = batch.head_dim, value_width = round_up(batch.value_dim, kPanel);
    const int64_t padded = round_up(length, kPanel);
    keys_.assign(padded * width, 0.0f);
    for (int64_t j = 0; j < length; ++j) {
      float* to = keys_.data() + j / kPanel * width * kPanel + j % kPanel;
      const T* from = key + j * batch.key_stride;
      for (int64_t d = 0; d < width; ++d) to[d * kPanel] = to_float(from[d]);
    }
    values_.assign(value_width * length, 0.0f);
    for (int64_t j = 0; j < length; ++j) {
      const T* from = value + j * batch.value_stride;
      for (int64_t d = 0; d < batch.value_dim; ++d) {
        values_[(d / kPanel * length + j) * kPanel + d % kPanel] = to_float(from[d]);
      }
    }
    queries_.resize(kBlock * width);
    scores_.resize(kBlock * padded);
    sums_.resize(kBlock * value_width);
    for (int64_t first = 0; first < length; first += kBlock) {
      const int64_t rows = std::min(kBlock, length - first);
      const int64_t seen = batch.is_causal ? first + rows : length;  // keys that some query of the block sees
      for (int64_t r = 0; r < rows; ++r) {
        const T* from = query + (first + r) * batch.query_stride;
        for (int64_t d = 0; d < width; ++d) queries_[r * width + d] = to_float(from[d]) * batch.scale;
      }
      const int64_t panels = (seen + kPanel - 1) / kPanel;
      products(queries_.data(), width, rows, keys_.data(), width, panels, scores_.data(), padded);
      for (int64_t r = 0; r < rows; ++r) {
        float* scores = scores_.data() + r * padded;
        const int64_t visible = batch.is_causal ? first + r + 1 : length;
        if (slope != 0.0f) subtract_distances(scores, visible, first + r, slope);
        soften(scores, visible, seen, r);
      }
      // Panels of values have all `length` keys; those after `seen` are left out.
      for (int64_t panel = 0; panel < value_width / kPanel; ++panel) {
        products(scores_.data(), padded, rows, values_.data() + panel * length * kPanel, seen, 1,
                 sums_.data() + panel * kPanel, value_width);
      }
      for (int64_t r = 0; r < rows; ++r) write(batch, r, value_width, out + (first + r) * batch.out_stride);
    }
  }

 private:
  // Each score less the slope for each token between its key and the query's own, at `place`.
  static void subtract_distances(float* scores, int64_t visible, int64_t place, float slope) {
    alignas(64) float numbers[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = static_cast<float>(lane);
    const Vec lanes = load(numbers), factor(-slope);
    const int64_t whole = visible / kLanes * kLanes;
    for (int64_t j = 0; j < whole; j += kLanes) {
      const Vec ahead = lanes + Vec(static_cast<float>(j - place));
      store(scores + j, fma(max(ahead, Vec() - ahead), factor, load(scores + j)));
    }
    for (int64_t j = whole; j < visible; ++j) scores[j] -= slope * static_cast<float>(std::abs(j - place));
  }

  // Scores of the first `visible` keys become weights, up to `seen` zeros; their sum is kept.
  void soften(float* scores, int64_t visible, int64_t seen, int64_t row) {
    const int64_t whole = visible / kLanes * kLanes;
    float most = -INFINITY;
    Vec largest(-INFINITY);
    for (int64_t j = 0; j < whole; j += kLanes) largest = max(largest, load(scores + j));
    if (whole) most = maximum(largest);
    for (int64_t j = whole; j < visible; ++j) most = std::max(most, scores[j]);
    Vec sums;
    float total = 0.0f;
    const Vec offset(most);
    for (int64_t j = 0; j < whole; j += kLanes) {
      const Vec weight = exp(load(scores + j) - offset);
      store(scores + j, weight);
      sums = sums + weight;
    }
    for (int64_t j = whole; j < visible; ++j) total += scores[j] = std::exp(scores[j] - most);
    for (int64_t j = visible; j < seen; ++j) scores[j] = 0.0f;
    totals_[row] = total + sum(sums);
  }

  template <typename T>
  void write(const SequenceBatch& batch, int64_t row, int64_t value_width, T* out) const {
    const float* from = sums_.data() + row * value_width;
    const Vec factor(1.0f / totals_[row]);
    const int64_t whole = batch.value_dim / kLanes * kLanes;
    for (int64_t d = 0; d < whole; d += kLanes) store(out + d, load(from + d) * factor);
    const int rest = static_cast<int>(batch.value_dim - whole);
    if (rest) store(out + whole, load(from + whole, rest) * factor, rest);
  }

  std::vector<float> keys_, values_, queries_, scores_, sums_;
  float totals_[kBlock];
};

#if defined(__AVX512BF16__)
template <typename T>
using HeadOf = std::conditional_t<std::is_same_v<T, bf16>, PairHead, Head>;
#else
template <typename T>
using HeadOf = Head;
#endif

}  // namespace

template <typename T>
void sequence_attention(const SequenceBatch& batch, const T* query, const T* key, const T* value, T* out,
                        int num_threads) {
  const int64_t num_items = batch.num_seqs * batch.num_heads;
  const int64_t group = batch.num_heads / batch.num_kv_heads;
#pragma omp parallel num_threads(num_threads)
  {
    HeadOf<T> computed;
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < num_items; ++item) {
      const int64_t seq = item / batch.num_heads, head = item % batch.num_heads;
      const int64_t first = batch.starts[seq], length = batch.starts[seq + 1] - first;
      if (length == 0) continue;
      const int64_t kv_head = head / group;
      computed.attend(batch, query + first * batch.query_stride + head * batch.query_head_stride,
                      key + first * batch.key_stride + kv_head * batch.key_head_stride,
                      value + first * batch.value_stride + kv_head * batch.value_head_stride,
                      out + first * batch.out_stride + head * batch.value_dim, length,
                      batch.slopes == nullptr ? 0.0f : batch.slopes[head]);
    }
  }
}

template void sequence_attention(const SequenceBatch&, const float*, const float*, const float*, float*, int);
template void sequence_attention(const SequenceBatch&, const bf16*, const bf16*, const bf16*, bf16*, int);

}  // namespace pagoda
