// The Python face of the native code. Pointers and sizes come in as integers: nothing here knows torch.
#include "base/bindings.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>

#include "all_reduce_norm/layout.h"
#include "all_reduce_norm/shm.h"
#include "base/process.h"
#include "fabric/arena.h"
#include "fabric/shm.h"

namespace py = pybind11;

namespace weave {
namespace {

using fabric::shm::Group;
using fabric::shm::Segment;

// Keeps the segments of a group mapped as long as anything uses it.
struct GroupHandle {
    std::vector<std::shared_ptr<Segment>> segments;
    Group group;

    static std::vector<Segment*> raw(const std::vector<std::shared_ptr<Segment>>& segments) {
        std::vector<Segment*> out;
        for (const auto& segment : segments)
            out.push_back(segment.get());
        return out;
    }
    GroupHandle(std::vector<std::shared_ptr<Segment>> all, int32_t rank, int32_t num_processes, uint32_t first_epoch)
        : segments(std::move(all)), group(raw(segments), rank, num_processes, first_epoch) {}
};

struct AllReduceNormHandle {
    std::shared_ptr<GroupHandle> owner;
    AllReduceNorm op;

    AllReduceNormHandle(std::shared_ptr<GroupHandle> group, const AllReduceNormSite& site, int32_t max_threads,
                        const std::string& isa)
        : owner(std::move(group)), op(check(*owner, site), site, max_threads, rows(isa)) {}

    static const RowFunctions& rows(const std::string& isa) {
        if (isa.empty()) return choose_rows();
        for (const RowFunctions* functions : usable_rows()) {
            if (isa == functions->isa) return *functions;
        }
        throw std::invalid_argument("this processor does not run " + isa);
    }

    // A buffer outside the segment would be a wild store later.
    static Group& check(GroupHandle& handle, const AllReduceNormSite& site) {
        const auto data_bytes = static_cast<int64_t>(handle.segments.at(0)->data_bytes());
        const fabric::shm::Layout& at = site.layout;
        const int64_t partial_end = at.partial_offset + 2 * at.partial_bytes;
        const int64_t output_end = at.output_offset + AllReduceNorm::output_bytes(site, handle.group.world());
        if (at.partial_offset < 0 || at.output_offset < 0 || partial_end > data_bytes || output_end > data_bytes ||
            site.max_tokens * site.hidden * size_of(site.dtype) > at.partial_bytes) {
            throw std::invalid_argument("buffers [" + std::to_string(at.partial_offset) + ", " +
                                        std::to_string(partial_end) + ") and [" + std::to_string(at.output_offset) +
                                        ", " + std::to_string(output_end) + ") for " + std::to_string(site.max_tokens) +
                                        " tokens do not fit an arena of " + std::to_string(data_bytes) + " bytes");
        }
        return handle.group;
    }

    int enter(int64_t tokens) {
        py::gil_scoped_release release;
        return static_cast<int>(op.enter(tokens).code);
    }

    // Plain numbers, not a struct: building one from Python would cost more than the call.
    int run(int64_t tokens, int32_t num_threads, uintptr_t partial, uintptr_t residual, uintptr_t reduced_bias,
            uintptr_t post_weight, uintptr_t post_bias, uintptr_t weight, uintptr_t bias, uintptr_t normalized,
            uintptr_t sum, uint32_t fp32_parameters, float scale) {
        auto in = [](uintptr_t pointer) { return reinterpret_cast<const void*>(pointer); };
        const AllReduceNormArrays arrays = {in(partial),
                                            in(residual),
                                            in(reduced_bias),
                                            in(post_weight),
                                            in(post_bias),
                                            in(weight),
                                            in(bias),
                                            reinterpret_cast<void*>(normalized),
                                            reinterpret_cast<void*>(sum),
                                            fp32_parameters,
                                            scale};
        py::gil_scoped_release release;
        return static_cast<int>(op.run(tokens, arrays, num_threads).code);
    }

    int enter_and_run(int64_t tokens, int32_t num_threads, uintptr_t partial, uintptr_t residual,
                      uintptr_t reduced_bias, uintptr_t post_weight, uintptr_t post_bias, uintptr_t weight,
                      uintptr_t bias, uintptr_t normalized, uintptr_t sum, uint32_t fp32_parameters, float scale) {
        const int code = enter(tokens);
        if (code != 0) return code;
        return run(tokens, num_threads, partial, residual, reduced_bias, post_weight, post_bias, weight, bias,
                   normalized, sum, fp32_parameters, scale);
    }
};

void bind_host(py::module_& m) {
    m.def(
        "process_start",
        [](int32_t pid) {
            const auto start = process_start(pid);
            return start ? std::to_string(*start) : std::string();
        },
        py::arg("pid"), "When a process started, in ticks since boot; empty where there is none, or nobody can say.");
    m.def(
        "process_has_ended",
        [](int32_t pid, const std::string& start) {
            return !start.empty() && process_has_ended(pid, std::strtoull(start.c_str(), nullptr, 10));
        },
        py::arg("pid"), py::arg("start"),
        "Whether the process that started then is gone; False where its start, or what the system says, is unknown.");
    m.attr("MAX_WORLD") = fabric::kMaxWorld;
    m.attr("MAX_CTAS") = fabric::kMaxCtas;
    m.attr("HEADER_BYTES") = fabric::kHeaderBytes;
    m.attr("NUM_CHANNELS") = fabric::kNumChannels;
    m.attr("NUM_MAILBOXES") = fabric::kNumMailboxes;
    m.attr("TAG_FIELD_BITS") = fabric::kTagFieldBits;
    m.attr("GPU_ALIGNMENT") = gpu::kBufferAlignment;
    m.attr("SHM_ALIGNMENT") = kShmAlignment;
    using fabric::BufferNeed;
    py::class_<BufferNeed>(m, "BufferNeed")
        .def_readonly("name", &BufferNeed::name)
        .def_readonly("num_bytes", &BufferNeed::num_bytes)
        .def_readonly("fill", &BufferNeed::fill)
        .def_readonly("per_arena", &BufferNeed::per_arena)
        .def("__repr__", [](const BufferNeed& need) {
            return "BufferNeed(" + need.name + ", " + std::to_string(need.num_bytes) + " bytes" +
                   (need.fill ? ", filled with " + std::to_string(*need.fill) : "") +
                   (need.per_arena ? ", per arena)" : ")");
        });
}

void bind_fabric(py::module_& m) {
    py::enum_<Code>(m, "Code")
        .value("OK", Code::kOk)
        .value("TIMEOUT", Code::kTimeout)
        .value("PEER_EXITED", Code::kPeerExited)
        .value("PEER_FAILED", Code::kPeerFailed)
        .value("SITE_MISMATCH", Code::kSiteMismatch)
        .value("POISONED", Code::kPoisoned)
        .value("BUSY", Code::kBusy);
    py::class_<Status>(m, "Status")
        .def_readonly("code", &Status::code)
        .def_readonly("peer", &Status::peer)
        .def_readonly("expected", &Status::expected)
        .def_readonly("seen", &Status::seen)
        .def_readonly("own_tag", &Status::own_tag)
        .def_readonly("peer_tag", &Status::peer_tag)
        .def_readonly("slot", &Status::slot);
    py::class_<Segment, std::shared_ptr<Segment>>(m, "Segment", py::buffer_protocol())
        .def_static(
            "create",
            [](std::size_t bytes, uint64_t cookie, uint32_t first_epoch) {
                py::gil_scoped_release release;
                return std::shared_ptr<Segment>(Segment::create(bytes, cookie, first_epoch));
            },
            py::arg("data_bytes"), py::arg("cookie"), py::arg("first_epoch"))
        .def_static(
            "open",
            [](int32_t pid, int32_t fd, uint64_t cookie, std::size_t bytes) {
                return std::shared_ptr<Segment>(Segment::open(pid, fd, cookie, bytes));
            },
            py::arg("pid"), py::arg("fd"), py::arg("cookie"), py::arg("data_bytes"))
        .def_property_readonly("fd", &Segment::fd)
        .def("close_fd", &Segment::close_fd)
        .def("mark_closed", [](Segment& segment) { segment.mark(fabric::shm::State::kClosed); })
        .def_buffer([](Segment& segment) {
            return py::buffer_info(reinterpret_cast<uint8_t*>(segment.data()),
                                   static_cast<py::ssize_t>(segment.data_bytes()));
        });
    py::class_<GroupHandle, std::shared_ptr<GroupHandle>>(m, "Group")
        .def(py::init<std::vector<std::shared_ptr<Segment>>, int32_t, int32_t, uint32_t>(), py::arg("segments"),
             py::arg("rank"), py::arg("num_processes"), py::arg("first_epoch"))
        .def_property_readonly("epoch", [](const GroupHandle& handle) { return handle.group.epoch(); })
        .def_property_readonly("status", [](const GroupHandle& handle) { return handle.group.status(); });
}

void bind_all_reduce_norm(py::module_& m) {
    py::enum_<DType>(m, "DType")
        .value("float32", DType::kFloat32)
        .value("bfloat16", DType::kBFloat16)
        .value("float16", DType::kFloat16);
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
    py::class_<AllReduceNormHandle>(m, "AllReduceNorm")
        .def(py::init<std::shared_ptr<GroupHandle>, const AllReduceNormSite&, int32_t, const std::string&>(),
             py::arg("group"), py::arg("site"), py::arg("max_threads"), py::arg("isa") = "")
        .def("enter", &AllReduceNormHandle::enter)
        .def("run", &AllReduceNormHandle::run)
        .def("leave", [](AllReduceNormHandle& handle) { handle.owner->group.leave(); })
        .def("enter_and_run", &AllReduceNormHandle::enter_and_run)
        .def_property_readonly("next_parity",
                               [](const AllReduceNormHandle& handle) { return handle.op.next_parity(); });
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

// What plans ask of the GPU kernels, which need no GPU to answer.
void bind_gpu_layout(py::module_& m) {
    py::enum_<gpu::GpuKernel>(m, "GpuKernel")
        .value("ll_packet_one_shot", gpu::GpuKernel::kLLPacketOneShot)
        .value("ll_packet_two_shot", gpu::GpuKernel::kLLPacketTwoShot)
        .value("bulk", gpu::GpuKernel::kBulk)
        .value("direct", gpu::GpuKernel::kDirect);
    py::enum_<gpu::OutKind>(m, "OutKind")
        .value("same", gpu::OutKind::kSame)
        .value("float32", gpu::OutKind::kFloat32)
        .value("float8_e4m3fn", gpu::OutKind::kFp8);
    py::enum_<gpu::QuantKind>(m, "QuantKind")
        .value("none", gpu::QuantKind::kNone)
        .value("static", gpu::QuantKind::kStatic)
        .value("per_token", gpu::QuantKind::kPerToken);
    m.def("gpu_buffers", &gpu::buffer_needs, py::arg("kernel"), py::arg("tokens"), py::arg("hidden"), py::arg("dtype"),
          py::arg("out_kind"), py::arg("world"),
          "What calls of up to `tokens` tokens need of a GPU arena, the sum handed out whole if need be.");
    m.def("shm_buffers", &AllReduceNorm::buffer_needs, py::arg("max_tokens"), py::arg("hidden"), py::arg("dtype"),
          py::arg("out_dtype"), py::arg("world"), "What a site needs of a shared segment.");
}

}  // namespace
}  // namespace weave

PYBIND11_MODULE(_native, m) {
    m.doc() = "Native part of weaveopt: fabrics and kernels, without torch.";
    weave::bind_host(m);
    weave::bind_fabric(m);
    weave::bind_all_reduce_norm(m);
    weave::bind_gpu_layout(m);
#ifdef WEAVE_WITH_CUDA
    m.attr("has_cuda") = true;
    weave::bind_cuda(m);
#else
    m.attr("has_cuda") = false;
#endif
}
