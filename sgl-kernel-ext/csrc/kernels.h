// The ops; semantics in sgl_kernel_ext/attention.py, packed.py, linear.py and fused.py.
// Tensor.h only: ATen.h and pybind11 headers take longer to compile than the kernels.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace sgl_ext {

using at::Tensor;
using MaybeTensor = std::optional<at::Tensor>;
// Keys and values of a pool, and the number of the codec of each (packed.h).
using KvTensors = std::tuple<Tensor, Tensor, int64_t, int64_t>;

// attention.cpp
Tensor ragged_attention(const Tensor& q, const Tensor& k_pool, const Tensor& v_pool,
                        const Tensor& req_to_token, const Tensor& q_indptr, const Tensor& req_row,
                        const Tensor& tail_start, const Tensor& tail_end, double scale,
                        const MaybeTensor& view_indices, const MaybeTensor& view_start,
                        const MaybeTensor& view_len, const std::vector<KvTensors>& view_pools,
                        const MaybeTensor& view_pool, const MaybeTensor& out,
                        const MaybeTensor& lse);

// packed.cpp
void pack_kv(const Tensor& k, const Tensor& v, const KvTensors& pool, const Tensor& slots);

// key_scores.cpp
Tensor key_scores(const Tensor& q, const Tensor& k_pool, const Tensor& slots, double scale,
                  bool causal);

// linear.cpp
Tensor pack_weight(const Tensor& weight);
Tensor linear(const Tensor& x, const Tensor& packed, int64_t N, const MaybeTensor& bias,
              const MaybeTensor& out);

// fused.cpp
Tensor rmsnorm(const Tensor& x, const Tensor& weight, double eps, const MaybeTensor& out);
void fused_add_rmsnorm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps);
Tensor silu_and_mul(const Tensor& x, const MaybeTensor& out);

// argmax.cpp
Tensor argmax_rows(const Tensor& x);

// rope.cpp
void rotary(const Tensor& positions, const Tensor& q, const Tensor& k, int64_t head_size,
            const Tensor& cos_sin_cache, bool is_neox);
void store_kv(const Tensor& k, const Tensor& v, const Tensor& k_pool, const Tensor& v_pool,
              const Tensor& loc);
void rope_store_kv(const Tensor& positions, const Tensor& q, const Tensor& k, const Tensor& v,
                   int64_t head_size, const Tensor& cos_sin_cache, bool is_neox,
                   const Tensor& k_pool, const Tensor& v_pool, const Tensor& loc);
void copy_rows(const Tensor& source, const Tensor& source_index, const Tensor& out,
               const Tensor& out_index);

}  // namespace sgl_ext
