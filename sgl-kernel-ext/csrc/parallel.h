// A dynamic parallel-for on a small pool of its own; see parallel.cpp.
#pragma once
#include <ATen/Parallel.h>

#include <cstdint>

namespace sgl_ext {

using ParallelBody = void (*)(const void* context, int64_t i);

void parallel_run(int64_t count, ParallelBody body, const void* context);

// Calls body(i) once for every i in [0, count), any thread, any order. `body` must not throw.
template <class Body>
static inline void parallel_for(int64_t count, const Body& body) {
  parallel_run(
      count, [](const void* context, int64_t i) { (*static_cast<const Body*>(context))(i); },
      &body);
}

}  // namespace sgl_ext
