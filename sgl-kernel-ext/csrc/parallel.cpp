// A decode step runs some 200 short parallel loops, on cores that also serve other processes. OpenMP
// ends each loop with a barrier of the whole team, so one thread that the kernel has not scheduled
// stalls the step. Here the caller starts at once and waits only for workers that took an item;
// one that wakes up late finds nothing to do.
#include "parallel.h"

#include <ATen/Parallel.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace sgl_ext {
namespace {

using Clock = std::chrono::steady_clock;

// A worker looks out for the next loop this long before it sleeps: longer than the gaps between the
// loops of a step, shorter than what lies between two steps.
constexpr auto kSpin = std::chrono::microseconds(80);
constexpr int kPausesPerLook = 32;
constexpr int kLooksPerYield = 64;

thread_local bool in_loop = false;

inline void pause() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#endif
}

class Pool {
 public:
  Pool() : owner_(getpid()) {}

  // False if the caller has to run the loop itself: another thread is in one, or after a fork.
  bool run(int helpers, int64_t count, ParallelBody body, const void* context) {
    std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    if (!lock.owns_lock() || getpid() != owner_) return false;
    for (; workers_ < helpers; ++workers_)
      std::thread([this, index = workers_] { serve(index); }).detach();
    helpers_ = helpers;
    count_ = count;
    body_ = body;
    context_ = context;
    next_.store(0, std::memory_order_relaxed);
    if (++loop_ == 0) ++loop_;  // 0 means closed
    open_.store(loop_);
    if (sleeping_.load() > 0) open_.notify_all();
    take_items();
    // A worker announces itself before it looks whether the loop is open, so either it sees the loop
    // closed or it is seen here.
    open_.store(0);
    for (int look = 1; active_.load() != 0; ++look) {
      pause();
      if (look % kLooksPerYield == 0) sched_yield();
    }
    return true;
  }

 private:
  void take_items() {
    in_loop = true;
    for (int64_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) body_(context_, i);
    in_loop = false;
  }

  void serve(int index) {
    uint32_t served = 0;
    while (true) {
      await(served);
      active_.fetch_add(1);
      if (const uint32_t loop = open_.load(); loop != 0 && loop != served) {
        served = loop;
        if (index < helpers_) take_items();
      }
      active_.fetch_sub(1);
    }
  }

  // Returns once a loop other than `served` is (or was just) open.
  void await(uint32_t served) {
    const auto is_new = [&](uint32_t loop) { return loop != 0 && loop != served; };
    const auto until = Clock::now() + kSpin;
    while (Clock::now() < until) {
      for (int i = 0; i < kPausesPerLook; ++i) {
        if (is_new(open_.load(std::memory_order_acquire))) return;
        pause();
      }
    }
    sleeping_.fetch_add(1);
    for (uint32_t seen = open_.load(); !is_new(seen); seen = open_.load()) open_.wait(seen);
    sleeping_.fetch_sub(1);
  }

  const pid_t owner_;
  std::mutex busy_;
  uint32_t loop_ = 0;
  int workers_ = 0;
  int helpers_ = 0;
  int64_t count_ = 0;
  ParallelBody body_ = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> open_{0};
  alignas(64) std::atomic<int> active_{0};
  alignas(64) std::atomic<int> sleeping_{0};
};

Pool& pool() {
  // Never destroyed: its threads may still run while the process exits.
  static Pool* instance = new Pool();
  return *instance;
}

}  // namespace

void parallel_run(int64_t count, ParallelBody body, const void* context) {
  const int threads = at::get_num_threads();
  const bool alone = count <= 1 || threads <= 1 || in_loop;
  if (alone || !pool().run(threads - 1, count, body, context))
    for (int64_t i = 0; i < count; ++i) body(context, i);
}

}  // namespace sgl_ext
