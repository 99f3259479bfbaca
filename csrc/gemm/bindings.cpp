// The Python face of the GEMM by itself. Plain C++: everything that needs CUDA's headers is declared in gemm.h.
#ifdef WEAVE_WITH_CUDA
#include "base/bindings.h"

#include "gemm/gemm.h"

namespace py = pybind11;

namespace weave {

void bind_gemm_cuda(py::module_& m) {
    m.def(
        "gemm",
        [](uintptr_t a, uintptr_t weight, uintptr_t out, int64_t rows, int64_t n, int64_t k, int64_t a_stride,
           int64_t weight_stride, int64_t out_stride, DType dtype, int32_t tile_columns, int32_t group_pairs,
           uintptr_t stream, uintptr_t bias) {
            known("dtype", dtype, DType::kFloat16);
            within("rows", rows, 0, kMostCount);
            within("n", n, 0, kMostRow);
            within("k", k, 0, kMostRow);
            within("tile_columns", tile_columns, 1, kMostCount);
            const bool is_any = rows > 0 && n > 0;
            expect_address("a", a, is_any);
            expect_address("weight", weight, is_any);
            expect_address("out", out, is_any);
            const gemm::Problem problem{reinterpret_cast<const void*>(a),
                                        reinterpret_cast<const void*>(weight),
                                        reinterpret_cast<const void*>(bias),
                                        reinterpret_cast<void*>(out),
                                        rows,
                                        n,
                                        k,
                                        a_stride,
                                        weight_stride,
                                        out_stride};
            py::gil_scoped_release release;
            return gemm::run(problem, dtype, tile_columns, group_pairs, reinterpret_cast<void*>(stream));
        },
        py::arg("a"), py::arg("weight"), py::arg("out"), py::arg("rows"), py::arg("n"), py::arg("k"),
        py::arg("a_stride"), py::arg("weight_stride"), py::arg("out_stride"), py::arg("dtype"), py::arg("tile_columns"),
        py::arg("group_pairs"), py::arg("stream"), py::arg("bias") = 0,
        "out[rows, n] = a[rows, k] @ weight[n, k].T + bias[n] (0: none) on Hopper; addresses, strides in elements. A "
        "CUDA "
        "error code.");
    m.def("gemm_unsupported", &gemm::unsupported, py::arg("dtype"), py::arg("n"), py::arg("k"), py::arg("device"),
          "Why the device cannot run the GEMM; empty where it can.");
}

}  // namespace weave
#endif
