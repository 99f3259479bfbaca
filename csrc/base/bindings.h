// Parts of the Python module that live in a file of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace weave {

// Only in builds with CUDA.
void bind_cuda(pybind11::module_& m);

}  // namespace weave
