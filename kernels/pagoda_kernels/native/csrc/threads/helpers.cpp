#include "threads/helpers.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

#include <climits>
#include <cstdlib>
#include <fstream>
#include <new>
#include <string>

namespace pagoda {

namespace {

constexpr int64_t kSpinTicks = 400'000;  // some 150 us: between two matrices of a step a helper stays awake
constexpr uint64_t kClosed = 0xffff;
enum State : uint64_t { kFinishing = 1, kDone = 2, kTakenOver = 3 };

thread_local int helpers_of_thread = 0;

uint64_t epoch_of(uint64_t ticket) { return ticket >> 16; }
int64_t claimed_of(uint64_t ticket) { return static_cast<int64_t>(ticket & kClosed); }

void sleep_on(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// The processors of one core, of which this is one: "0,4" or "0-1" in the kernel's file.
cpu_set_t core_of(int cpu) {
  cpu_set_t core;
  CPU_ZERO(&core);
  CPU_SET(cpu, &core);
  std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
  for (int first, last; file >> first; file.ignore()) {
    last = first;
    if (file.peek() == '-') file.ignore() >> last;
    for (int sibling = first; sibling <= last && sibling < CPU_SETSIZE; ++sibling) CPU_SET(sibling, &core);
  }
  return core;
}

void* allocate(int64_t bytes) {
  void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace

int num_helpers() { return helpers_of_thread; }
void set_num_helpers(int count) { helpers_of_thread = count; }

float* Helpers::Sums::get(int64_t size) {
  if (size > capacity) {
    memory = {static_cast<float*>(allocate(size * 4)), std::free};
    capacity = size;
  }
  return memory.get();
}

Helpers::Helpers(int count)
    : at_(static_cast<size_t>(count)),
      input_(allocate(kInputBytes), std::free),
      shares_(static_cast<size_t>(count) + 1) {
  for (auto& word : words_) word.store(0, std::memory_order_relaxed);
  for (auto& state : states_) state.store(0, std::memory_order_relaxed);
  for (Share& share : shares_) share.ticket.store(kClosed);
  CPU_ZERO(&allowed_);
  sched_getaffinity(0, sizeof(allowed_), &allowed_);
  for (int i = 1; i <= count; ++i) {
    threads_.emplace_back([this, i] { help(i); });
    pthread_setname_np(threads_.back().native_handle(), "pagoda-helper");
  }
}

Helpers::~Helpers() {
  has_ended_.store(true);
  calls_.fetch_add(1);
  wake_all(calls_);
  for (std::thread& thread : threads_) thread.join();
}

// To the kernel, a core that runs only a helper is idle: it may put the caller there, and leave the helper waiting.
void Helpers::leave_core() {
  const int cpu = sched_getcpu();
  if (cpu < 0 || cpu == caller_cpu_) return;
  caller_cpu_ = cpu;
  const auto [place, is_new] = others_.try_emplace(cpu);
  if (is_new) {
    const cpu_set_t core = core_of(cpu);
    CPU_XOR(&place->second, &allowed_, &core);
    CPU_AND(&place->second, &place->second, &allowed_);
  }
  for (std::thread& thread : threads_)
    pthread_setaffinity_np(thread.native_handle(), sizeof(cpu_set_t), &place->second);
}

uint64_t Helpers::run(const Job& job) {
  leave_core();
  const uint64_t epoch = epoch_of(shares_[0].ticket.load(std::memory_order_relaxed)) + 1;
  uint64_t words[kWords];
  std::memcpy(words, &job, sizeof(job));
  for (Share& share : shares_) share.ticket.store(epoch << 16 | kClosed, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_relaxed);
  for (size_t i = shares_.size(); i-- > 0;) shares_[i].ticket.store(epoch << 16);
  if (sleepers_.load() > 0) {
    calls_.fetch_add(1);
    wake_all(calls_);
  }
  float* sums = sums_.get(job.sums_size);
  std::array<bool, kMaxParts> is_own{};
  int64_t num_own = 0;
  const auto begin = static_cast<int64_t>(__rdtsc());
  for (size_t share = 0; share < shares_.size(); ++share) {
    for (int64_t part; (part = claim(share, epoch, job.count)) >= 0; ++num_own) {
      job.compute(job.work, part, sums);
      job.finish(job.work, part, sums);
      is_own[part] = true;
    }
  }
  const int64_t of_part = (static_cast<int64_t>(__rdtsc()) - begin) / (num_own + 1);
  for (int64_t part = 0; part < job.count; ++part) {
    if (!is_own[part]) settle(job, part, 2 * of_part);
  }
  return epoch;
}

// A helper says what it is at before it claims a part, and all parts have been claimed: who is not there now will not
// come.
void Helpers::keep(std::shared_ptr<const void> what, uint64_t epoch) {
  kept_.emplace_back(epoch, std::move(what));
  std::erase_if(kept_, [&](const auto& kept) {
    return std::none_of(at_.begin(), at_.end(), [&](const auto& at) { return at.load() == kept.first; });
  });
}

// A part that no other thread gets, of one share of a job of `count` parts; -1: there is none.
int64_t Helpers::claim(int64_t share, uint64_t epoch, int64_t count) {
  const auto num_shares = static_cast<int64_t>(shares_.size());
  const int64_t begin = count * share / num_shares, size = count * (share + 1) / num_shares - begin;
  std::atomic<uint64_t>& ticket = shares_[share].ticket;
  uint64_t value = ticket.load();
  do {
    if (epoch_of(value) != epoch || claimed_of(value) >= size) return -1;
  } while (!ticket.compare_exchange_weak(value, value + 1));
  return begin + claimed_of(value);
}

// A helper has claimed the part: waits for it as long as it should take, then does it.
void Helpers::settle(const Job& job, int64_t part, int64_t patience) {
  const uint64_t epoch = epoch_of(shares_[0].ticket.load(std::memory_order_relaxed));
  const auto begin = static_cast<int64_t>(__rdtsc());
  for (;;) {
    uint64_t state = states_[part].load(std::memory_order_acquire);
    if (state == (epoch << 2 | kDone)) return;
    const bool is_late = static_cast<int64_t>(__rdtsc()) - begin > patience;
    if (state != (epoch << 2 | kFinishing)) {
      if (is_late && states_[part].compare_exchange_strong(state, epoch << 2 | kTakenOver)) {
        float* sums = sums_.get(job.sums_size);
        job.compute(job.work, part, sums);
        job.finish(job.work, part, sums);
        return;
      }
    } else if (is_late) {
      sched_yield();
    }
    _mm_pause();
  }
}

void Helpers::help(int64_t number) {
  const sched_param none{};
  pthread_setschedparam(pthread_self(), SCHED_IDLE, &none);  // where that is forbidden, as any other thread
  Sums sums;
  uint64_t epoch = 0;
  while ((epoch = wait_for_job(epoch)) != 0) {
    uint64_t words[kWords];
    for (size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (epoch_of(shares_[0].ticket.load(std::memory_order_relaxed)) != epoch) continue;
    Job job;
    std::memcpy(&job, words, sizeof(job));
    float* own = sums.get(job.sums_size);
    const auto num_shares = static_cast<int64_t>(shares_.size());
    std::atomic<uint64_t>& at = at_[static_cast<size_t>(number) - 1];
    at.store(epoch);
    for (int64_t i = 0; i < num_shares; ++i) {
      for (int64_t part; (part = claim((number + i) % num_shares, epoch, job.count)) >= 0;) {
        if (!take_part(part, epoch, job, own)) break;
      }
    }
    at.store(0);
  }
}

// False: the caller has gone on, and the part was taken over. Its outputs may be anything's by now.
bool Helpers::take_part(int64_t part, uint64_t epoch, const Job& job, float* sums) {
  job.compute(job.work, part, sums);
  uint64_t state = states_[part].load();
  if (state >> 2 >= epoch || !states_[part].compare_exchange_strong(state, epoch << 2 | kFinishing)) return false;
  job.finish(job.work, part, sums);
  states_[part].store(epoch << 2 | kDone, std::memory_order_release);
  return true;
}

// The number of a job that is not the last one seen; 0: there will be none. Yields meanwhile: the kernel may have taken
// a helper, which has had next to nothing so far, before a process that is ready, and would leave it the core for a
// time slice.
uint64_t Helpers::wait_for_job(uint64_t last_epoch) {
  const auto is_news = [&](uint64_t ticket) { return epoch_of(ticket) != last_epoch && claimed_of(ticket) != kClosed; };
  auto begin = static_cast<int64_t>(__rdtsc());
  for (;;) {
    const uint64_t ticket = shares_[0].ticket.load();
    if (has_ended_.load(std::memory_order_relaxed)) return 0;
    if (is_news(ticket)) return epoch_of(ticket);
    sched_yield();
    if (static_cast<int64_t>(__rdtsc()) - begin > kSpinTicks) {
      const uint32_t calls = calls_.load();
      sleepers_.fetch_add(1);
      if (!is_news(shares_[0].ticket.load()) && !has_ended_.load()) sleep_on(calls_, calls);
      sleepers_.fetch_sub(1);
      begin = static_cast<int64_t>(__rdtsc());
    }
    _mm_pause();
  }
}

}  // namespace pagoda
