// The Python face of all_reduce_norm on GPUs. Plain C++: everything that needs CUDA's headers is declared in gpu.h.
#ifdef WEAVE_WITH_CUDA
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "base/bindings.h"
#include "base/timeout.h"
#include "fabric/peer.h"
#include "gemm_comm/pushed_tiles.h"
#include "reduction/gpu.h"
#include "reduction/layout.h"
#include "reduction/parameters.h"

namespace py = pybind11;

namespace weave {

void bind_all_reduce_norm_cuda(py::module_& m);

namespace {

using fabric::PeerGroup;

// What is constant over the calls of a site.
struct GpuSite {
    uint32_t tag = 0;
    int64_t hidden = 0;
    DType dtype = DType::kBFloat16;
    gpu::OutKind out_kind = gpu::OutKind::kSame;
    gpu::QuantKind quant = gpu::QuantKind::kNone;
    NormSpec post;
    NormSpec norm;
    bool sum_whole = false;
    float scale = 1;
    double timeout_s = 120;
    int32_t channel = 0;
    bool multicast = false;  // else its kernels reach peers one by one, also where the arenas are mapped by multicast
    // The buffers of the channel, in every arena. One of -1 bytes goes to the arena's end, as far as launches check it.
    int64_t mailbox_offset = 0;
    int64_t mailbox_bytes = 0;  // of one
    int64_t staging_offset = 0;
    int64_t staging_bytes = -1;
    int64_t output_offset = 0;
    int64_t output_bytes = -1;
};

// A site bound to the arenas of its group.
class GpuAllReduceNorm {
  public:
    GpuAllReduceNorm(std::shared_ptr<PeerGroup> group, const GpuSite& site)
        : group_(given("group", group)), dtype_(known("dtype", site.dtype, DType::kFloat16)) {
        known("out_kind", site.out_kind, gpu::OutKind::kFp8);
        known("quant", site.quant, gpu::QuantKind::kPerToken);
        known("the first norm", site.post.kind, NormKind::kLayer);
        known("the norm", site.norm.kind, NormKind::kLayer);
        within("mailbox_bytes", site.mailbox_bytes, 0, kMostBytes);
        if (site.hidden < 8 || site.hidden > kMostRow || site.hidden % 8 != 0)
            throw std::invalid_argument("rows of " + std::to_string(site.hidden) +
                                        " elements: expected a multiple of 8");
        call_.group = group_->view(site.channel, nanoseconds_of(site.timeout_s));
        if (!site.multicast)
            call_.group.multicast = nullptr;
        else if (call_.group.multicast == nullptr)
            throw std::invalid_argument("the arenas of the group are not mapped by multicast");
        call_.buffers = {site.mailbox_offset, site.mailbox_bytes, site.staging_offset,
                         site.staging_bytes,  site.output_offset, site.output_bytes};
        fit("mailboxes", site.mailbox_offset, fabric::kNumMailboxes * site.mailbox_bytes);
        if (site.mailbox_bytes % 16 != 0)
            throw std::invalid_argument("mailboxes of " + std::to_string(site.mailbox_bytes) +
                                        " bytes: expected a multiple of 16");
        call_.buffers.staging_bytes = fit("staging", site.staging_offset, site.staging_bytes);
        call_.buffers.output_bytes = fit("output", site.output_offset, site.output_bytes);
        call_.hidden = static_cast<int32_t>(site.hidden);
        call_.site = site.tag;
        call_.out_kind = site.out_kind;
        call_.quant = site.quant;
        call_.sum_whole = site.sum_whole ? 1 : 0;
        call_.scale = site.scale;
        call_.post.spec = site.post;
        call_.norm.spec = site.norm;
    }

    // Enqueues the call; a CUDA error code, 0 for success. What changes from call to call are plain numbers: building a
    // struct from Python would cost more than the call.
    int run(int64_t tokens, int32_t kernel, int32_t num_ctas, uintptr_t stream, uintptr_t partial,
            int64_t partial_offset, uintptr_t residual, const ReductionParameters& parameters, uintptr_t normalized,
            uintptr_t sum, uintptr_t row_scale) const {
        gpu::Call call = call_of(tokens, residual, parameters, normalized, sum);
        call.partial = reinterpret_cast<const void*>(partial);
        call.partial_offset = partial_offset;
        call.row_scale = reinterpret_cast<void*>(row_scale);
        gpu::Launch launch{};
        launch.kernel = known("kernel", static_cast<gpu::GpuKernel>(kernel), gpu::GpuKernel::kPosted);
        within("num_ctas", num_ctas, 0, kMostCount);
        expect_address("partial", partial, call.tokens > 0 && launch.kernel != gpu::GpuKernel::kDirect);
        launch.dtype = dtype_;
        launch.num_ctas = num_ctas;
        launch.stream = reinterpret_cast<void*>(stream);
        // A launch blocks where the queue is full, which may be because a kernel waits for a peer: the watchdog,
        // another thread of this interpreter, must get to run then.
        py::gil_scoped_release release;
        return gpu::run(call, launch);
    }

    // The same, of the GEMM `a` [tokens, k] times `matrix` [hidden, k]^T in place of partial rows.
    int run_product(int64_t tokens, const gpu::TileConfig& tiles, uintptr_t stream, uintptr_t a, int64_t a_stride,
                    const gpu::Matrix& matrix, uintptr_t residual, const ReductionParameters& parameters,
                    uintptr_t normalized, uintptr_t sum) const {
        const gpu::Call call = call_of(tokens, residual, parameters, normalized, sum);
        expect_address("a", a, tokens > 0 && matrix.k > 0);
        py::gil_scoped_release release;
        return gpu::run_pushed_tiles(call, {reinterpret_cast<const void*>(a), a_stride, matrix}, tiles,
                                     gpu::NormalizedRows::kReplicated, dtype_, reinterpret_cast<void*>(stream));
    }

  private:
    gpu::Call call_of(int64_t tokens, uintptr_t residual, const ReductionParameters& parameters, uintptr_t normalized,
                      uintptr_t sum) const {
        gpu::Call call = call_;
        call.tokens = static_cast<int32_t>(within("tokens", tokens, 0, kMostCount));
        call.residual = reinterpret_cast<const void*>(residual);
        gpu::set_parameters(call, parameters);
        call.normalized = reinterpret_cast<void*>(normalized);
        call.sum = reinterpret_cast<void*>(sum);
        return call;
    }

    // The bytes of a buffer that a site may use. One that no kernel of the site needs is left at offset 0.
    int64_t fit(const char* name, int64_t offset, int64_t num_bytes) const {
        const int64_t header = static_cast<int64_t>(fabric::kHeaderBytes), all = group_->num_bytes();
        if (offset == 0 && num_bytes <= 0) return 0;
        within(name, offset, 0, all);
        if (num_bytes < 0) num_bytes = all - offset;
        if (offset >= header && num_bytes <= all - offset && offset % gpu::kBufferAlignment == 0) return num_bytes;
        throw std::invalid_argument(
            std::string(name) + " of " + std::to_string(num_bytes) + " bytes at " + std::to_string(offset) +
            ": expected a multiple of " + std::to_string(gpu::kBufferAlignment) + " after the header of " +
            std::to_string(header) + " bytes, in an arena of " + std::to_string(all) + " bytes");
    }

    std::shared_ptr<PeerGroup> group_;
    DType dtype_;
    gpu::Call call_{};
};

}  // namespace

void bind_all_reduce_norm_cuda(py::module_& m) {
    py::class_<GpuSite>(m, "GpuSite")
        .def(py::init<>())
        .def_readwrite("tag", &GpuSite::tag)
        .def_readwrite("hidden", &GpuSite::hidden)
        .def_readwrite("dtype", &GpuSite::dtype)
        .def_readwrite("out_kind", &GpuSite::out_kind)
        .def_readwrite("quant", &GpuSite::quant)
        .def_readwrite("post", &GpuSite::post)
        .def_readwrite("norm", &GpuSite::norm)
        .def_readwrite("sum_whole", &GpuSite::sum_whole)
        .def_readwrite("scale", &GpuSite::scale)
        .def_readwrite("timeout_s", &GpuSite::timeout_s)
        .def_readwrite("channel", &GpuSite::channel)
        .def_readwrite("multicast", &GpuSite::multicast)
        .def_readwrite("mailbox_offset", &GpuSite::mailbox_offset)
        .def_readwrite("mailbox_bytes", &GpuSite::mailbox_bytes)
        .def_readwrite("staging_offset", &GpuSite::staging_offset)
        .def_readwrite("staging_bytes", &GpuSite::staging_bytes)
        .def_readwrite("output_offset", &GpuSite::output_offset)
        .def_readwrite("output_bytes", &GpuSite::output_bytes);
    py::class_<GpuAllReduceNorm>(m, "GpuAllReduceNorm")
        .def(py::init<std::shared_ptr<PeerGroup>, const GpuSite&>(), py::arg("group"), py::arg("site"))
        .def("run", &GpuAllReduceNorm::run)
        .def("run_product", &GpuAllReduceNorm::run_product);
    m.def("unsupported", &gpu::unsupported, py::arg("kernel"), py::arg("dtype"), py::arg("hidden"), py::arg("world"),
          py::arg("fp8"), py::arg("device"), "Why the device cannot run the kernel for such rows; empty where it can.");
    m.def("product_unsupported", &gpu::pushed_tiles_unsupported, py::arg("dtype"), py::arg("hidden"), py::arg("k"),
          py::arg("world"), py::arg("device"), "Why the device cannot run `run_product`; empty where it can.");
}

}  // namespace weave
#endif
