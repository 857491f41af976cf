// What the row-wise ops share: a tensor seen as rows, dtype dispatch, serial or parallel by size.
#pragma once
#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <type_traits>

#include "kernels.h"
#include "parallel.h"
#include "vec.h"

namespace sgl_ext {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// fp32 lanes rounded to what T holds, as store16 rounds.
template <class T>
SGL_INLINE Vec round_to(Vec v) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    SGL_FOR_PARTS {
      const NativeU32 bits = (NativeU32)v.part[i];
      const NativeU32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
      v.part[i] = v.part[i] == v.part[i] ? (NativeF32)rounded : v.part[i];
    }
    return v;
  } else if constexpr (std::is_same_v<T, c10::Half>) {
    T raw[kLanes];
    store16(raw, v);
    return load16(raw);
  } else {
    return v;
  }
}

// Rows along dim 0, `stride` elements apart (a slice of a wider tensor is welcome), each of `width`
// contiguous elements over the other dims.
template <class T>
struct Rows {
  T* data;
  int64_t count, stride, width;

  T* operator[](int64_t row) const { return data + row * stride; }
};

template <class T>
Rows<T> rows_of(const at::Tensor& t, const char* name) {
  TORCH_CHECK_VALUE(t.dim() >= 2 && t.device().is_cpu(), name,
                    " must be a CPU tensor of 2 or more dims");
  int64_t width = 1;
  for (int64_t d = t.dim() - 1; d > 0; --d) {
    TORCH_CHECK_VALUE(t.size(d) == 1 || t.stride(d) == width, name,
                      " must be contiguous but for dim 0, got sizes ", t.sizes(), " strides ",
                      t.strides());
    width *= t.size(d);
  }
  TORCH_CHECK_VALUE(t.scalar_type() == c10::CppTypeToScalarType<T>::value, name, " is ",
                    t.scalar_type(), ", expected ", c10::CppTypeToScalarType<T>::value);
  return {t.data_ptr<T>(), t.size(0), t.stride(0), width};
}

// body(tag) with a value of the C++ type of `t`.
template <class Body>
void dispatch(const at::Tensor& t, const char* name, const Body& body) {
  switch (t.scalar_type()) {
    case at::kBFloat16:
      return body(c10::BFloat16());
    case at::kHalf:
      return body(c10::Half());
    case at::kFloat:
      return body(float());
    default:
      TORCH_CHECK_VALUE(false, name, " is ", t.scalar_type(),
                        ", expected bfloat16, float16 or float32");
  }
}

// body(row) for every row; one thread up to `grain` elements, since waking others costs
// microseconds.
template <class Body>
void for_rows(int64_t count, int64_t width, int64_t grain, const Body& body) {
  const int64_t chunk = std::max<int64_t>(1, grain / std::max<int64_t>(1, width));
  parallel_for(ceil_div(count, chunk), [&](int64_t i) {
    const int64_t end = std::min(count, (i + 1) * chunk);
    for (int64_t row = i * chunk; row < end; ++row) body(row);
  });
}

}  // namespace sgl_ext
