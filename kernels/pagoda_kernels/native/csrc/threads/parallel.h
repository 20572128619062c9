// Work shared by the threads of OpenMP, which are torch's own: symbols resolve to the runtime that torch has loaded.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace pagoda {

// body(begin, end) over [0, count) in one contiguous part a thread. Parts begin at multiples of `grain`, and fewer
// threads take part where there is less work than a grain for each.
template <typename Body>
inline void parallel_for(int64_t count, int64_t grain, int num_threads, const Body& body) {
  const int64_t grains = (count + grain - 1) / grain;
  const int threads = static_cast<int>(std::min<int64_t>(num_threads, grains));
  if (threads <= 1) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
    const int64_t begin = grains * thread / team * grain;
    const int64_t end = std::min(count, grains * (thread + 1) / team * grain);
    if (begin < end) body(begin, end);
  }
}

}  // namespace pagoda
