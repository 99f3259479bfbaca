// Records that Python passes to the kernels of this family that compute a GEMM.
#include "base/bindings.h"

#include <pybind11/pybind11.h>

#include "gemm_comm/pushed_tiles.h"

namespace py = pybind11;

namespace weave {

void bind_gemm_comm(py::module_& m);

void bind_gemm_comm(py::module_& m) {
    py::class_<gpu::TileConfig>(m, "TileConfig")
        .def(py::init([](int32_t tile_columns, int32_t group_pairs, int32_t reducer_ctas) {
                 within("tile_columns", tile_columns, 1, kMostCount);
                 return gpu::TileConfig{tile_columns, group_pairs, reducer_ctas};
             }),
             py::arg("tile_columns"), py::arg("group_pairs"), py::arg("reducer_ctas"),
             "Columns of a tile, pairs of panels in a wave group, and CTAs that compute no tiles.")
        .def_readonly("tile_columns", &gpu::TileConfig::tile_columns)
        .def_readonly("group_pairs", &gpu::TileConfig::group_pairs)
        .def_readonly("reducer_ctas", &gpu::TileConfig::reducer_ctas);
    py::class_<gpu::Matrix>(m, "GemmMatrix")
        .def(py::init([](uintptr_t data, int64_t stride, int64_t k) {
                 within("k", k, 0, kMostRow);
                 expect_address("data", data, k > 0);
                 return gpu::Matrix{reinterpret_cast<const void*>(data), stride, k};
             }),
             py::arg("data"), py::arg("stride"), py::arg("k"),
             "The weight of a GEMM, [hidden, k]: its address, and elements from row to row.")
        .def_property_readonly("data",
                               [](const gpu::Matrix& matrix) { return reinterpret_cast<uintptr_t>(matrix.data); })
        .def_readonly("stride", &gpu::Matrix::stride)
        .def_readonly("k", &gpu::Matrix::k);
}

}  // namespace weave
