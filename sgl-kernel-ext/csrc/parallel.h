// A dynamic parallel-for on torch's own OpenMP threads.
#pragma once
#include <ATen/Parallel.h>
#include <omp.h>

#include <atomic>
#include <cstdint>

namespace sgl_ext {

// Calls body(i) once for every i in [0, count), any thread, any order. `body` must not throw.
template <class Body>
static inline void parallel_for(int64_t count, const Body& body) {
  const int threads = at::get_num_threads();
  if (count <= 1 || threads <= 1 || omp_in_parallel()) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{0};
  // Always the whole team: libgomp ends and restarts threads when a team changes its size.
#pragma omp parallel num_threads(threads)
  for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
       i = next.fetch_add(1, std::memory_order_relaxed)) {
    body(i);
  }
}

}  // namespace sgl_ext
