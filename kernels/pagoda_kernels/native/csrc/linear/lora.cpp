#include "linear/lora.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "threads/parallel.h"

namespace pagoda {
namespace {

constexpr int64_t kRowsOfTask = 64, kRanksOfTask = 8, kPanelsOfTask = 4;
constexpr int64_t kWorkOfThread = 1 << 15;  // products that are worth a thread
constexpr int kPanelVectors = static_cast<int>(kLoraPanel) / kLanes;

// One piece of a part's work for some rows of a group.
struct Task {
  const LoraPart* part;
  const int64_t* rows;
  int64_t num_rows;
  float* shrunk;       // of the first row: [num_rows, rank]
  int64_t begin, end;  // ranks, or panels
  int64_t work;        // products
};

// Each thread does neighbours that are as much work as the others'.
template <typename Body>
void share(const std::vector<Task>& tasks, int num_threads, const Body& body) {
  std::vector<int64_t> begins;  // work before each task
  int64_t total = 0;
  for (const Task& task : tasks) {
    begins.push_back(total);
    total += task.work;
  }
  const auto threads = static_cast<int>(std::clamp<int64_t>(total / kWorkOfThread, 1, num_threads));
  parallel_for(threads, 1, threads, [&](int64_t first, int64_t last) {
    const int64_t from = total * first / threads, to = total * last / threads;
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (begins[i] >= from && begins[i] < to) body(tasks[i]);
    }
  });
}

// to[r][k] = a[k] x[r], rounded to T. Sums of a row and a rank are made alike in every block.
template <int R, int K, typename T>
void shrink(const T* const* x, const T* a, int64_t size, float* to, int64_t rank) {
  const int64_t whole = size / kLanes * kLanes;
  const int rest = static_cast<int>(size - whole);
  Vec sums[R][K];
  const auto add = [&](const auto& get) __attribute__((always_inline)) {
    Vec rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = get(x[r]);
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) {
      const Vec column = get(a + k * size);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r][k] = fma(rows[r], column, sums[r][k]);
    }
  };
  for (int64_t i = 0; i < whole; i += kLanes)
    add([&](const T* p) __attribute__((always_inline)) { return load(p + i); });
  if (rest) add([&](const T* p) __attribute__((always_inline)) { return load(p + whole, rest); });
  for (int r = 0; r < R; ++r) {
    for (int k = 0; k < K; ++k) {
      T rounded;
      from_float(sum(sums[r][k]), &rounded);
      to[r * rank + k] = to_float(rounded);
    }
  }
}

template <int R, typename T>
void shrink_rows(const T* const* x, const Task& task, int64_t size, float* to) {
  constexpr int kWide = R == 1 ? 8 : 4;
  const int64_t rank = task.part->rank;
  const T* a = static_cast<const T*>(task.part->a);
  int64_t k = task.begin;
  for (; k + kWide <= task.end; k += kWide) shrink<R, kWide>(x, a + k * size, size, to + k, rank);
  for (; k < task.end; ++k) shrink<R, 1>(x, a + k * size, size, to + k, rank);
}

template <typename T>
void shrink_task(const Task& task, const T* x, int64_t x_stride, int64_t size) {
  const int64_t rank = task.part->rank;
  int64_t row = 0;
  for (; row + 2 <= task.num_rows; row += 2) {
    const T* rows[] = {x + task.rows[row] * x_stride, x + task.rows[row + 1] * x_stride};
    shrink_rows<2>(rows, task, size, task.shrunk + row * rank);
  }
  if (row < task.num_rows) {
    const T* rows[] = {x + task.rows[row] * x_stride};
    shrink_rows<1>(rows, task, size, task.shrunk + row * rank);
  }
}

// Some vectors of a panel for some rows: out[r] += sum over ranks of shrunk[r][k] * b[k].
template <int R, int V, typename T, typename Out>
void expand(const float* const* shrunk, const T* b, int64_t rank, Out* const* out, int64_t size) {
  Vec sums[R][V];
  for (int64_t k = 0; k < rank; ++k, b += kLoraPanel) {
    Vec factors[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) factors[r] = Vec(shrunk[r][k]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const Vec column = load(b + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r][v] = fma(factors[r], column, sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V && v * kLanes < size; ++v) {
      Out* to = out[r] + v * kLanes;
      if ((v + 1) * kLanes <= size) {
        store(to, load(to) + sums[r][v]);
      } else {
        const int rest = static_cast<int>(size - v * kLanes);
        store(to, load(to, rest) + sums[r][v], rest);
      }
    }
  }
}

template <int R, typename T, typename Out>
void expand_rows(const Task& task, int64_t row, Out* out, int64_t out_stride, int64_t panel) {
  constexpr int kVectors = std::max(1, std::min(kPanelVectors, 8 / R));  // sums stay in registers
  const LoraPart& part = *task.part;
  const T* b = static_cast<const T*>(part.b) + panel * part.rank * kLoraPanel;
  const float* shrunk[R];
  for (int r = 0; r < R; ++r) shrunk[r] = task.shrunk + (row + r) * part.rank;
  const int64_t end = std::min(part.num_rows, (panel + 1) * kLoraPanel);
  for (int64_t first = panel * kLoraPanel; first < end; first += kVectors * kLanes) {
    Out* to[R];
    for (int r = 0; r < R; ++r) to[r] = out + task.rows[row + r] * out_stride + part.row_start + first;
    expand<R, kVectors>(shrunk, b + (first - panel * kLoraPanel), part.rank, to, end - first);
  }
}

template <typename T, typename Out>
void expand_task(const Task& task, Out* out, int64_t out_stride) {
  for (int64_t panel = task.begin; panel < task.end; ++panel) {
    int64_t row = 0;
    for (; row + 4 <= task.num_rows; row += 4) expand_rows<4, T>(task, row, out, out_stride, panel);
    for (; row < task.num_rows; ++row) expand_rows<1, T>(task, row, out, out_stride, panel);
  }
}

}  // namespace

template <typename T, typename Out>
void add_lora(const T* x, int64_t x_stride, int64_t num_inputs, Out* out, int64_t out_stride, const LoraRows& rows,
              const LoraTable& table, int num_threads) {
  int64_t num_shrunk = 0;
  for (int64_t group = 0; group < rows.num_groups; ++group) {
    for (int64_t part = 0; part < table.num_parts; ++part) {
      num_shrunk += (rows.starts[group + 1] - rows.starts[group]) * table.at(group, part).rank;
    }
  }
  if (num_shrunk == 0) return;
  const std::unique_ptr<float[]> shrunk(new float[num_shrunk]);
  std::vector<Task> shrinks, expands;
  float* place = shrunk.get();
  for (int64_t group = 0; group < rows.num_groups; ++group) {
    const int64_t begin = rows.starts[group], end = rows.starts[group + 1];
    if (begin == end) continue;
    for (int64_t i = 0; i < table.num_parts; ++i) {
      const LoraPart& part = table.at(group, i);
      if (part.rank == 0) continue;
      const int64_t panels = (part.num_rows + kLoraPanel - 1) / kLoraPanel;
      for (int64_t row = begin; row < end; row += kRowsOfTask) {
        const int64_t count = std::min(kRowsOfTask, end - row);
        for (int64_t k = 0; k < part.rank; k += kRanksOfTask) {
          const int64_t last = std::min(part.rank, k + kRanksOfTask);
          shrinks.push_back({&part, rows.rows + row, count, place, k, last, count * (last - k) * num_inputs});
        }
        for (int64_t p = 0; p < panels; p += kPanelsOfTask) {
          const int64_t last = std::min(panels, p + kPanelsOfTask), work = count * (last - p) * kLoraPanel * part.rank;
          expands.push_back({&part, rows.rows + row, count, place, p, last, work});
        }
        place += count * part.rank;
      }
    }
  }
  share(shrinks, num_threads, [&](const Task& task) { shrink_task(task, x, x_stride, num_inputs); });
  share(expands, num_threads, [&](const Task& task) { expand_task<T>(task, out, out_stride); });
}

template void add_lora(const float*, int64_t, int64_t, float*, int64_t, const LoraRows&, const LoraTable&, int);
template void add_lora(const bf16*, int64_t, int64_t, bf16*, int64_t, const LoraRows&, const LoraTable&, int);
template void add_lora(const bf16*, int64_t, int64_t, float*, int64_t, const LoraRows&, const LoraTable&, int);

}  // namespace pagoda
