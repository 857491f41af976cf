// Same ops in the same order as the Python loop in sgl_kernel_ext/decoder.py, so the same bits; what
// it saves is some 250 calls from Python, as long as the kernels of a small batch.
#include "decoder.h"

#include <ATen/ops/index_select.h>

namespace sgl_ext {

std::tuple<Tensor, std::vector<Tensor>> Decoder::forward(
    Tensor hidden, const Tensor& positions, const Tensor& slots, const DecoderRows& rows) const {
  const auto& [heads, kv_heads, dim, scale, eps, is_neox] = shape_;
  const int64_t q_size = heads * dim, kv_size = kv_heads * dim;
  std::vector<Tensor> captured;
  const Tensor residual = hidden;
  Tensor normed = rmsnorm(hidden, layers_.front().input_norm, eps, std::nullopt);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const DecoderLayer& layer = layers_[i];
    if (i > 0) {
      fused_add_rmsnorm(hidden, residual, layer.input_norm, eps);
      normed = hidden;
    }
    const Tensor qkv = layer.qkv(normed);
    const Tensor q = qkv.narrow(1, 0, q_size), k = qkv.narrow(1, q_size, kv_size);
    const Tensor v = qkv.narrow(1, q_size + kv_size, kv_size);
    rope_store_kv(positions, q, k, v, dim, rope_cache_, is_neox, layer.k_pool, layer.v_pool, slots);
    const Tensor queries = q.view({-1, heads, dim});
    if (rows.captured) captured.push_back(at::index_select(queries, 0, *rows.captured));
    MaybeTensor start, length;
    if (rows.view_indices) {
      start = rows.view_start->select(0, i);
      length = rows.view_len->select(0, i);
    }
    const Tensor attended = ragged_attention(
        queries, layer.k_pool, layer.v_pool, rows.req_to_token, rows.q_indptr, rows.req_row,
        rows.tail_start, rows.tail_end, scale, rows.view_indices, start, length,
        rows.view_pools.empty() ? std::vector<KvTensors>() : rows.view_pools[i], rows.view_pool,
        std::nullopt, std::nullopt);
    hidden = layer.out(attended.view({-1, q_size}));
    fused_add_rmsnorm(hidden, residual, layer.post_norm, eps);
    hidden = layer.down(silu_and_mul(layer.gate_up(hidden), std::nullopt));
  }
  fused_add_rmsnorm(hidden, residual, final_norm_, eps);
  return {hidden, std::move(captured)};
}

}  // namespace sgl_ext
