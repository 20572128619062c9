// Helper threads: optional work that the main thread never waits for.
//
// A thread of OpenMP whose core another process takes makes all others wait at the end of every loop. Helpers do not:
// they run at idle priority, on otherwise idle time, and the caller repeats the parts that they have begun and not
// finished. A process that wakes meanwhile has a helper's core at once, instead of the caller's.
#pragma once

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace pagoda {

class Helpers {
 public:
  static constexpr int64_t kMaxParts = 256;        // of one piece of work
  static constexpr int64_t kPartsEach = 16;        // for each thread: what is computed twice is one of them
  static constexpr int64_t kInputBytes = 1 << 20;  // of `input`

  explicit Helpers(int count);
  // Waits for a helper that is still at a part that another thread has done. Only then may what parts read go away.
  ~Helpers();
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

  // How many neighbours of so many items make a part.
  int64_t grain(int64_t items) const {
    return std::max<int64_t>({1, (items + kMaxParts - 1) / kMaxParts, items / (kPartsEach * (count() + 1))});
  }

  int count() const { return static_cast<int>(threads_.size()); }

  // kInputBytes that a late helper may always read, for the inputs of the next `run`.
  void* input() const { return input_.get(); }

  // Does parts [0, count) of the work, count <= kMaxParts. One caller at a time. `Work` can be copied as bytes, and has
  //   int64_t sums_size() const                             how many floats a part needs
  //   void compute(int64_t part, float* sums) const         reads weights, `input`, `kept`; anybody, perhaps too late
  //   void finish(int64_t part, const float* sums) const    makes the output of them; once for each part
  // kept: what has to stay, unlike `input` as it is, until the last late helper has read it.
  template <typename Work>
  void run(const Work& work, int64_t count, std::shared_ptr<const void> kept = nullptr) {
    static_assert(std::is_trivially_copyable_v<Work> && sizeof(Work) <= sizeof(Job::work));
    Job job{[](const void* w, int64_t part, float* sums) { static_cast<const Work*>(w)->compute(part, sums); },
            [](const void* w, int64_t part, const float* sums) { static_cast<const Work*>(w)->finish(part, sums); },
            count,
            work.sums_size(),
            {}};
    std::memcpy(job.work, &work, sizeof(Work));
    const uint64_t epoch = run(job);
    if (kept != nullptr) keep(std::move(kept), epoch);
  }

 private:
  struct Job {
    void (*compute)(const void* work, int64_t part, float* sums);
    void (*finish)(const void* work, int64_t part, const float* sums);
    int64_t count, sums_size;
    alignas(8) unsigned char work[240];
  };
  static constexpr size_t kWords = sizeof(Job) / 8;

  struct Sums {
    float* get(int64_t size);
    std::unique_ptr<float[], void (*)(void*)> memory{nullptr, nullptr};
    int64_t capacity = 0;
  };

  // Each returns, or takes, the number of a job.
  uint64_t run(const Job& job);
  void keep(std::shared_ptr<const void> what, uint64_t epoch);
  void settle(const Job& job, int64_t part, int64_t patience);
  void help(int64_t number);
  void leave_core();
  int64_t claim(int64_t share, uint64_t epoch, int64_t count);
  bool take_part(int64_t part, uint64_t epoch, const Job& job, float* sums);
  uint64_t wait_for_job(uint64_t last_epoch);

  // Parts are divided evenly among the caller and the helpers, neighbours to each: what follows in memory comes nearer
  // while a thread computes. A thread that is done with its share continues with the others'.
  struct alignas(64) Share {
    std::atomic<uint64_t> ticket;  // the number of a job, and in the lowest 16 bits how many parts have been claimed
  };
  alignas(64) std::array<std::atomic<uint64_t>, kWords> words_;  // the job; of use while shares are of it
  // What became of a part that a helper has claimed: the job's number, and in the lowest two bits a State.
  alignas(64) std::array<std::atomic<uint64_t>, kMaxParts> states_;
  alignas(64) std::atomic<uint32_t> calls_{0};
  // What each helper is at: the number of a job, 0 if none.
  std::vector<std::atomic<uint64_t>> at_;
  std::vector<std::pair<uint64_t, std::shared_ptr<const void>>> kept_;  // of jobs that some helper has not left
  std::atomic<int> sleepers_{0};
  std::atomic<bool> has_ended_{false};
  std::unique_ptr<void, void (*)(void*)> input_;
  Sums sums_;                        // the caller's
  std::vector<Share> shares_;        // the first is the caller's, and is offered last
  cpu_set_t allowed_;                // the process's processors
  std::map<int, cpu_set_t> others_;  // those of them on other cores than one
  int caller_cpu_ = -1;
  std::vector<std::thread> threads_;
};

// How many helpers the layers that this thread computes are to have; 0 at first.
int num_helpers();
void set_num_helpers(int count);

}  // namespace pagoda
