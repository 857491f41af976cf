#pragma once
// Not torch/extension.h: it pulls in the whole C++ frontend and doubles the build time.
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

namespace sgl_ext {
void bind_attention(pybind11::module_& m);  // attention.cpp
}  // namespace sgl_ext
