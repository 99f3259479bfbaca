// The Python face of the GPU fabric. Plain C++: everything that needs CUDA's headers is behind gpu.h and peer.h.
#ifdef WEAVE_WITH_CUDA
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>

#include "all_reduce_norm/gpu.h"
#include "base/bindings.h"
#include "fabric/peer.h"

namespace py = pybind11;

namespace weave {
namespace {

using fabric::PeerGroup;
using fabric::Regions;

// What is constant over the calls of a site.
struct GpuSite {
    uint32_t tag = 0;
    int64_t hidden = 0;
    DType dtype = DType::kBFloat16;
    gpu::OutKind out_kind = gpu::OutKind::kSame;
    gpu::QuantKind quant = gpu::QuantKind::kNone;
    NormForm post;
    NormForm norm;
    bool sum_whole = false;
    float scale = 1;
    double timeout_s = 120;
};

// A site bound to the arenas of its group.
class GpuAllReduceNorm {
  public:
    GpuAllReduceNorm(std::shared_ptr<PeerGroup> group, const GpuSite& site)
        : group_(std::move(group)), dtype_(site.dtype) {
        if (site.hidden < 8 || site.hidden % 8 != 0)
            throw std::invalid_argument("rows of " + std::to_string(site.hidden) +
                                        " elements: expected a multiple of 8");
        for (int32_t rank = 0; rank < group_->world(); ++rank)
            call_.base[rank] = reinterpret_cast<char*>(group_->base(rank));
        call_.multicast = reinterpret_cast<char*>(group_->multicast());
        call_.record = group_->device_record();
        call_.regions = group_->regions();
        call_.world = group_->world();
        call_.rank = group_->rank();
        call_.hidden = static_cast<int32_t>(site.hidden);
        call_.timeout_ns = static_cast<uint64_t>(std::llround(site.timeout_s * 1e9));
        call_.tag = site.tag;
        call_.out_kind = site.out_kind;
        call_.quant = site.quant;
        call_.sum_whole = site.sum_whole ? 1 : 0;
        call_.scale = site.scale;
        call_.post.form = site.post;
        call_.norm.form = site.norm;
    }

    // Enqueues the call; a CUDA error code, 0 for success. Plain numbers, not a struct: building one from Python would
    // cost more than the call. Bit i of `fp32_parameters`: parameter i of (reduced_bias, post_weight, post_bias,
    // weight, bias, scale_value, quant_scale) is fp32.
    int run(int64_t tokens, int32_t form, int32_t num_ctas, uintptr_t stream, uintptr_t partial, int64_t partial_offset,
            uintptr_t residual, uintptr_t reduced_bias, uintptr_t post_weight, uintptr_t post_bias, uintptr_t weight,
            uintptr_t bias, uintptr_t scale_value, uintptr_t quant_scale, uint32_t fp32_parameters, uintptr_t normed,
            uintptr_t sum, uintptr_t row_scale) const {
        auto parameter = [&](uintptr_t pointer, int bit) {
            return gpu::Parameter{reinterpret_cast<const void*>(pointer),
                                  static_cast<int32_t>(fp32_parameters >> bit & 1)};
        };
        gpu::Call call = call_;
        call.tokens = static_cast<int32_t>(tokens);
        call.partial = reinterpret_cast<const void*>(partial);
        call.partial_offset = partial_offset;
        call.residual = reinterpret_cast<const void*>(residual);
        call.reduced_bias = parameter(reduced_bias, 0);
        call.post.weight = parameter(post_weight, 1);
        call.post.bias = parameter(post_bias, 2);
        call.norm.weight = parameter(weight, 3);
        call.norm.bias = parameter(bias, 4);
        call.scale_value = parameter(scale_value, 5);
        call.quant_scale = parameter(quant_scale, 6);
        call.normed = reinterpret_cast<void*>(normed);
        call.sum = reinterpret_cast<void*>(sum);
        call.row_scale = reinterpret_cast<void*>(row_scale);
        gpu::Launch launch{};
        launch.form = static_cast<gpu::Form>(form);
        launch.dtype = dtype_;
        launch.num_ctas = num_ctas;
        launch.stream = reinterpret_cast<void*>(stream);
        // A launch blocks where the queue is full, which may be because a kernel waits for a peer: the watchdog,
        // another thread of this interpreter, must get to run then.
        py::gil_scoped_release release;
        return gpu::run(call, launch);
    }

  private:
    std::shared_ptr<PeerGroup> group_;
    DType dtype_;
    gpu::Call call_{};
};

}  // namespace

void bind_cuda(py::module_& m) {
    py::enum_<gpu::Form>(m, "GpuForm")
        .value("mail_one_shot", gpu::Form::kMailOneShot)
        .value("mail_two_shot", gpu::Form::kMailTwoShot)
        .value("bulk", gpu::Form::kBulk)
        .value("direct", gpu::Form::kDirect);
    py::enum_<gpu::OutKind>(m, "OutKind")
        .value("same", gpu::OutKind::kSame)
        .value("float32", gpu::OutKind::kFloat32)
        .value("float8_e4m3fn", gpu::OutKind::kFp8);
    py::enum_<gpu::QuantKind>(m, "QuantKind")
        .value("none", gpu::QuantKind::kNone)
        .value("static", gpu::QuantKind::kStatic)
        .value("per_token", gpu::QuantKind::kPerToken);
    py::class_<Regions>(m, "Regions")
        .def(py::init([](int64_t mailbox_bytes, int64_t staging_bytes, int64_t output_bytes) {
                 return Regions{mailbox_bytes, staging_bytes, output_bytes};
             }),
             py::arg("mailbox_bytes"), py::arg("staging_bytes"), py::arg("output_bytes"))
        .def_readonly("mailbox_bytes", &Regions::mailbox_bytes)
        .def_readonly("staging_bytes", &Regions::staging_bytes)
        .def_readonly("output_bytes", &Regions::output_bytes)
        .def_property_readonly("output_offset", &Regions::output)
        .def_property_readonly("total_bytes", &Regions::total);
    py::class_<PeerGroup, std::shared_ptr<PeerGroup>>(m, "PeerGroup")
        .def(py::init<std::vector<uint64_t>, uint64_t, int32_t, int32_t, const Regions&>(), py::arg("bases"),
             py::arg("multicast"), py::arg("rank"), py::arg("device"), py::arg("regions"),
             py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("status", &PeerGroup::status)
        .def("acknowledge", &PeerGroup::acknowledge)
        .def("abort", &PeerGroup::abort, py::arg("code"));
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
        .def_readwrite("timeout_s", &GpuSite::timeout_s);
    py::class_<GpuAllReduceNorm>(m, "GpuAllReduceNorm")
        .def(py::init<std::shared_ptr<PeerGroup>, const GpuSite&>(), py::arg("group"), py::arg("site"))
        .def("run", &GpuAllReduceNorm::run);
    m.def("unsupported", &gpu::unsupported, py::arg("form"), py::arg("dtype"), py::arg("hidden"), py::arg("world"),
          py::arg("fp8"), py::arg("device"), "Why the device cannot run the form for such rows; empty where it can.");
    m.def("cuda_error_text", &fabric::error_text, py::arg("code"));
}

}  // namespace weave
#endif
