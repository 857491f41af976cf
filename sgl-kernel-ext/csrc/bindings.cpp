// One module per instruction set (see setup.py). Plain pybind functions: these ops never need
// autograd, and a dispatcher call costs more than some of them.
#include "ops.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  sgl_ext::bind_attention(m);
  sgl_ext::bind_linear(m);
  sgl_ext::bind_fused(m);
}
