// The Python face of all_reduce_norm on CPU ranks, and what plans ask of its GPU kernels without a GPU.
#include "base/bindings.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gemm_comm/pushed_tiles.h"
#include "reduction/handle.h"
#include "reduction/layout.h"

namespace py = pybind11;

namespace weave {

void bind_all_reduce_norm(py::module_& m);

namespace {

void bind_shm(py::module_& m) {
    py::enum_<NormKind>(m, "NormKind")
        .value("none", NormKind::kNone)
        .value("rms", NormKind::kRms)
        .value("layer", NormKind::kLayer);
    py::enum_<SumOut>(m, "SumOut")
        .value("none", SumOut::kNone)
        .value("whole", SumOut::kWhole)
        .value("sharded", SumOut::kSharded);
    py::class_<fabric::shm::Layout>(m, "Layout")
        .def(py::init<>())
        .def_readwrite("partial_offset", &fabric::shm::Layout::partial_offset)
        .def_readwrite("partial_bytes", &fabric::shm::Layout::partial_bytes)
        .def_readwrite("output_offset", &fabric::shm::Layout::output_offset);
    py::class_<NormSpec>(m, "NormSpec")
        .def(py::init<>())
        .def_readwrite("kind", &NormSpec::kind)
        .def_readwrite("eps", &NormSpec::eps)
        .def_readwrite("weight_offset", &NormSpec::weight_offset)
        .def_readwrite("cast_before_weight", &NormSpec::cast_before_weight);
    py::class_<AllReduceNormSite>(m, "AllReduceNormSite")
        .def(py::init<>())
        .def_readwrite("tag", &AllReduceNormSite::tag)
        .def_readwrite("hidden", &AllReduceNormSite::hidden)
        .def_readwrite("dtype", &AllReduceNormSite::dtype)
        .def_readwrite("out_dtype", &AllReduceNormSite::out_dtype)
        .def_readwrite("layout", &AllReduceNormSite::layout)
        .def_readwrite("max_tokens", &AllReduceNormSite::max_tokens)
        .def_readwrite("one_shot_max_tokens", &AllReduceNormSite::one_shot_max_tokens)
        .def_readwrite("post", &AllReduceNormSite::post)
        .def_readwrite("norm", &AllReduceNormSite::norm)
        .def_readwrite("sum_out", &AllReduceNormSite::sum_out)
        .def_readwrite("timeout_s", &AllReduceNormSite::timeout_s);
    py::class_<ReductionParameters>(m, "ReductionParameters")
        .def(py::init<uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uint32_t>(),
             py::arg("reduced_bias") = 0, py::arg("post_weight") = 0, py::arg("post_bias") = 0, py::arg("weight") = 0,
             py::arg("bias") = 0, py::arg("scale_value") = 0, py::arg("quant_scale") = 0, py::arg("fp32") = 0)
        .def_readonly("reduced_bias", &ReductionParameters::reduced_bias)
        .def_readonly("post_weight", &ReductionParameters::post_weight)
        .def_readonly("post_bias", &ReductionParameters::post_bias)
        .def_readonly("weight", &ReductionParameters::weight)
        .def_readonly("bias", &ReductionParameters::bias)
        .def_readonly("scale_value", &ReductionParameters::scale_value)
        .def_readonly("quant_scale", &ReductionParameters::quant_scale)
        .def_readonly("fp32", &ReductionParameters::fp32);
    py::class_<AllReduceNormHandle>(m, "AllReduceNorm")
        .def(py::init<std::shared_ptr<GroupHandle>, const AllReduceNormSite&, int32_t, const std::string&>(),
             py::arg("group"), py::arg("site"), py::arg("max_threads"), py::arg("isa") = "")
        .def_property_readonly("status", &AllReduceNormHandle::status)
        .def("enter", &AllReduceNormHandle::enter)
        .def("run", &AllReduceNormHandle::run)
        .def("abandon", [](AllReduceNormHandle& handle) { handle.owner->group.abandon(); })
        .def("enter_and_run", &AllReduceNormHandle::enter_and_run)
        .def_property_readonly("next_parity",
                               [](const AllReduceNormHandle& handle) { return handle.op->next_parity(); });
    m.def(
        "isas",
        [] {
            std::vector<std::string> names;
            for (const RowFunctions* functions : usable_rows())
                names.push_back(functions->isa);
            return names;
        },
        "Instruction sets of the row kernels that this processor runs; the first is used.");
}

void expect_rows(int64_t tokens, int64_t hidden, DType dtype, int32_t world) {
    within("tokens", tokens, 0, kMostCount);
    within("hidden", hidden, 1, kMostRow);
    within("world", world, 1, kMostRanks);
    known("dtype", dtype, DType::kFloat16);
    // Of every buffer here this is the most: packets of rows, finished rows and sums, for all ranks.
    product_of("rows of all ranks", {tokens + world, hidden + 16, 64, world});
}

std::vector<fabric::BufferNeed> gpu_buffers(gpu::GpuKernel kernel, int64_t tokens, int64_t hidden, DType dtype,
                                            gpu::OutKind out_kind, int32_t world) {
    known("kernel", kernel, gpu::GpuKernel::kPosted);
    known("out_kind", out_kind, gpu::OutKind::kFp8);
    expect_rows(tokens, hidden, dtype, world);
    return gpu::buffer_needs(kernel, tokens, hidden, dtype, out_kind, world);
}

std::vector<fabric::BufferNeed> product_buffers(int64_t tokens, int64_t hidden, DType dtype, int32_t world) {
    expect_rows(tokens, hidden, dtype, world);
    return gpu::pushed_tiles_needs(tokens, hidden, dtype, world);
}

int64_t product_staging_bytes(int64_t tokens, int64_t hidden, DType dtype, int32_t world) {
    expect_rows(tokens, hidden, dtype, world);
    return gpu::pushed_tiles_staging_bytes(tokens, hidden, dtype, world);
}

int32_t product_waves(int64_t tokens, int64_t hidden, int32_t tile_columns, int32_t reducer_ctas, int32_t world,
                      int32_t num_sms) {
    expect_rows(tokens, hidden, DType::kFloat32, world);
    within("world", world, 1, fabric::kMaxWorld);
    within("tile_columns", tile_columns, 1, kMostCount);
    within("num_sms", num_sms, 0, kMostCount);
    return gpu::pushed_tiles_waves(tokens, hidden, tile_columns, reducer_ctas, world, num_sms);
}

std::vector<fabric::BufferNeed> shm_buffers(int64_t max_tokens, int64_t hidden, DType dtype, DType out_dtype,
                                            int32_t world) {
    known("out_dtype", out_dtype, DType::kFloat16);
    expect_rows(max_tokens, hidden, dtype, world);
    return AllReduceNorm::buffer_needs(max_tokens, hidden, dtype, out_dtype, world);
}

// What plans ask of the GPU kernels, which need no GPU to answer.
void bind_layout(py::module_& m) {
    m.attr("GPU_ALIGNMENT") = gpu::kBufferAlignment;
    m.attr("SHM_ALIGNMENT") = fabric::shm::kAlignment;
    py::enum_<gpu::GpuKernel>(m, "GpuKernel")
        .value("ll_packet_one_shot", gpu::GpuKernel::kLLPacketOneShot)
        .value("ll_packet_two_shot", gpu::GpuKernel::kLLPacketTwoShot)
        .value("bulk", gpu::GpuKernel::kBulk)
        .value("direct", gpu::GpuKernel::kDirect)
        .value("posted", gpu::GpuKernel::kPosted);
    py::enum_<gpu::OutKind>(m, "OutKind")
        .value("same", gpu::OutKind::kSame)
        .value("float32", gpu::OutKind::kFloat32)
        .value("float8_e4m3fn", gpu::OutKind::kFp8);
    py::enum_<gpu::QuantKind>(m, "QuantKind")
        .value("none", gpu::QuantKind::kNone)
        .value("static", gpu::QuantKind::kStatic)
        .value("per_token", gpu::QuantKind::kPerToken);
    m.def("gpu_buffers", &gpu_buffers, py::arg("kernel"), py::arg("tokens"), py::arg("hidden"), py::arg("dtype"),
          py::arg("out_kind"), py::arg("world"),
          "What calls of up to `tokens` tokens need of a GPU arena, the sum returned unsharded if need be.");
    m.def("product_buffers", &product_buffers, py::arg("tokens"), py::arg("hidden"), py::arg("dtype"), py::arg("world"),
          "What calls of `run_product` of up to `tokens` tokens need of a GPU arena.");
    m.def("product_staging_bytes", &product_staging_bytes, py::arg("tokens"), py::arg("hidden"), py::arg("dtype"),
          py::arg("world"), "Of the staging buffer of such calls.");
    m.def(
        "product_most_tokens",
        [](int32_t world) {
            return gpu::pushed_tiles_most_tokens(static_cast<int32_t>(within("world", world, 1, kMostRanks)));
        },
        py::arg("world"), "Of a call of `run_product`.");
    m.def("product_waves", &product_waves, py::arg("tokens"), py::arg("hidden"), py::arg("tile_columns"),
          py::arg("reducer_ctas"), py::arg("world"), py::arg("num_sms"), "Of the tiles of such a call.");
    m.attr("PRODUCT_MOST_HIDDEN") = gpu::kMostProductHidden;
    m.def("shm_buffers", &shm_buffers, py::arg("max_tokens"), py::arg("hidden"), py::arg("dtype"), py::arg("out_dtype"),
          py::arg("world"), "What a site needs of a shared segment.");
}

}  // namespace

void bind_all_reduce_norm(py::module_& m) {
    bind_shm(m);
    bind_layout(m);
}

}  // namespace weave
