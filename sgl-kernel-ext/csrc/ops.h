#pragma once
#include <torch/extension.h>

namespace sgl_ext {
void bind_attention(pybind11::module_& m);  // attention.cpp
void bind_linear(pybind11::module_& m);     // linear.cpp
void bind_fused(pybind11::module_& m);      // fused.cpp
}  // namespace sgl_ext
