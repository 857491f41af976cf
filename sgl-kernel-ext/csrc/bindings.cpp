// One module per instruction set (see setup.py). Plain pybind functions: these ops never need
// autograd, and a dispatcher call costs more than some of them. The only file with Python in it.
// Not torch/extension.h: it pulls in the whole C++ frontend and doubles the build time.
#include <torch/csrc/utils/pybind.h>

#include "decoder.h"

namespace py = pybind11;
using namespace sgl_ext;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  // Those that take long let other threads run.
  using Release = py::call_guard<py::gil_scoped_release>;
  m.def("ragged_attention", &ragged_attention, Release());
  m.def("key_scores", &key_scores, Release());
  m.def("pack_kv", &pack_kv, Release());
  m.def("pack_weight", &pack_weight);
  m.def("linear", &linear);
  m.def("rmsnorm", &rmsnorm);
  m.def("fused_add_rmsnorm", &fused_add_rmsnorm);
  m.def("silu_and_mul", &silu_and_mul);
  m.def("argmax_rows", &argmax_rows);
  m.def("rotary", &rotary);
  m.def("store_kv", &store_kv);
  m.def("rope_store_kv", &rope_store_kv);
  m.def("copy_rows", &copy_rows, Release());

  py::class_<PackedLinear>(m, "PackedLinear", py::module_local())
      .def(py::init([](Tensor packed, int64_t n, MaybeTensor bias) {
        return PackedLinear{packed, n, bias};
      }));
  py::class_<DecoderLayer>(m, "DecoderLayer", py::module_local())
      .def(py::init([](Tensor input_norm, Tensor post_norm, PackedLinear qkv, PackedLinear out,
                       PackedLinear gate_up, PackedLinear down, Tensor k_pool, Tensor v_pool) {
        return DecoderLayer{input_norm, post_norm, qkv, out, gate_up, down, k_pool, v_pool};
      }));
  py::class_<DecoderShape>(m, "DecoderShape", py::module_local())
      .def(py::init([](int64_t heads, int64_t kv_heads, int64_t head_dim, double scale, double eps,
                       bool is_neox) {
        return DecoderShape{heads, kv_heads, head_dim, scale, eps, is_neox};
      }));
  py::class_<DecoderRows>(m, "DecoderRows", py::module_local())
      .def(py::init([](Tensor req_to_token, Tensor q_indptr, Tensor req_row, Tensor tail_start,
                       Tensor tail_end, MaybeTensor view_indices, MaybeTensor view_start,
                       MaybeTensor view_len, std::vector<std::vector<KvTensors>> view_pools,
                       MaybeTensor view_pool, MaybeTensor captured) {
        return DecoderRows{req_to_token, q_indptr, req_row,    tail_start, tail_end, view_indices,
                           view_start,   view_len, view_pools, view_pool,  captured};
      }));
  py::class_<Decoder>(m, "Decoder", py::module_local())
      .def(py::init<DecoderShape, std::vector<DecoderLayer>, Tensor, Tensor>())
      .def("forward", &Decoder::forward, Release());
}
