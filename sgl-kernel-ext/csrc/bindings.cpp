// One module per instruction set (see setup.py). Plain pybind functions: these ops never need
// autograd, and a dispatcher call costs more than some of them.
#include "kernels.h"
#include "ops.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  sgl_ext::bind_attention(m);
  m.def("pack_weight", &sgl_ext::pack_weight);
  m.def("linear", &sgl_ext::linear);
  m.def("rmsnorm", &sgl_ext::rmsnorm);
  m.def("fused_add_rmsnorm", &sgl_ext::fused_add_rmsnorm);
  m.def("silu_and_mul", &sgl_ext::silu_and_mul);
  m.def("argmax_rows", &sgl_ext::argmax_rows);
  m.def("rotary", &sgl_ext::rotary);
  m.def("store_kv", &sgl_ext::store_kv);
  m.def("rope_store_kv", &sgl_ext::rope_store_kv);
  m.def("gather_rows", &sgl_ext::gather_rows);
}
