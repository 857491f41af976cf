// The decoder layers of a Llama-like model in one call.
#pragma once
#include "kernels.h"

namespace sgl_ext {

// A linear layer as pack_weight left it.
struct PackedLinear {
  Tensor packed;
  int64_t n;
  MaybeTensor bias;

  Tensor operator()(const Tensor& x) const { return linear(x, packed, n, bias, std::nullopt); }
};

struct DecoderLayer {
  Tensor input_norm, post_norm;
  PackedLinear qkv, out, gate_up, down;
  Tensor k_pool, v_pool;
};

struct DecoderShape {
  int64_t heads, kv_heads, head_dim;
  double scale, eps;
  bool is_neox;
};

// Which rows a pass has and what they attend to: the arguments of ragged_attention that the layers
// share. Views come for all layers: view_start and view_len are [layers, groups, heads], view_pools
// a list for each layer, or empty.
struct DecoderRows {
  Tensor req_to_token, q_indptr, req_row, tail_start, tail_end;
  MaybeTensor view_indices, view_start, view_len;
  std::vector<std::vector<KvTensors>> view_pools;
  MaybeTensor view_pool;
  MaybeTensor captured;
};

class Decoder {
 public:
  Decoder(DecoderShape shape, std::vector<DecoderLayer> layers, Tensor final_norm, Tensor rope_cache)
      : shape_(shape), layers_(std::move(layers)), final_norm_(final_norm), rope_cache_(rope_cache) {}

  // Hidden states after the final norm, and the queries of the rows `captured` of every layer.
  // `hidden` is overwritten.
  std::tuple<Tensor, std::vector<Tensor>> forward(
      Tensor hidden, const Tensor& positions, const Tensor& slots, const DecoderRows& rows) const;

 private:
  DecoderShape shape_;
  std::vector<DecoderLayer> layers_;
  Tensor final_norm_, rope_cache_;
};

}  // namespace sgl_ext
