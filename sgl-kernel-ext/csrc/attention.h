#pragma once
#include <ATen/core/Tensor.h>

namespace sgl_ext {

// key_scores.cpp; semantics in sgl_kernel_ext/reference/attention.py.
at::Tensor key_scores(
    const at::Tensor& q,
    const at::Tensor& k_pool,
    const at::Tensor& slots,
    double scale,
    bool causal);

}  // namespace sgl_ext
