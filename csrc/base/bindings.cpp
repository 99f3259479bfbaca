// The Python face of the native code. Pointers and sizes come in as integers: nothing here knows torch.
#include "base/bindings.h"

#include <pthread.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/stat.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/dtype.h"
#include "base/interrupts.h"
#include "base/memory.h"
#include "base/process.h"
#include "base/sizes.h"
#include "fabric/arena.h"
#include "fabric/buffer_need.h"
#include "fabric/code_version.h"
#include "fabric/shm.h"
#include "fabric/shm_rows.h"
#include "fabric/tcp.h"

namespace py = pybind11;

namespace weave {
namespace {

using fabric::shm::Segment;

// Python runs handlers on its main thread alone; another one would wait for the lock in vain.
pthread_t main_thread;

bool run_python_handlers() {
    if (pthread_equal(pthread_self(), main_thread) == 0) return false;
    const py::gil_scoped_acquire acquire;
    return PyErr_CheckSignals() != 0;
}

void hear_signals() {
    const auto ident = py::module_::import("threading").attr("main_thread")().attr("ident");
    main_thread = static_cast<pthread_t>(ident.cast<unsigned long>());
    pthread_atfork(nullptr, nullptr, [] { main_thread = pthread_self(); });
    run_handlers.store(&run_python_handlers);
}

void expect_socket(int socket) {
    struct stat info{};
    if (socket >= 0 && fstat(socket, &info) == 0 && S_ISSOCK(info.st_mode)) return;
    throw std::invalid_argument("descriptor " + std::to_string(socket) + " is no socket");
}

std::shared_ptr<fabric::tcp::Group> connections(const std::vector<int>& sockets, int32_t rank, int32_t num_processes,
                                                uint32_t first_epoch) {
    within("the number of sockets", static_cast<int64_t>(sockets.size()), 1, kMostRanks);
    within("rank", rank, 0, static_cast<int64_t>(sockets.size()) - 1);
    for (std::size_t index = 0; index < sockets.size(); ++index) {
        if (static_cast<int32_t>(index) == rank && sockets[index] >= 0)
            throw std::invalid_argument("a socket to this rank itself");
        if (sockets[index] >= 0) expect_socket(sockets[index]);
    }
    return std::make_shared<fabric::tcp::Group>(sockets, rank, num_processes, first_epoch);
}

// A rank that `group` has a connection to.
void expect_peer(const fabric::tcp::Group& group, int32_t peer) {
    within("peer", peer, 0, group.world() - 1);
    if (!group.is_connected(peer)) throw std::invalid_argument("no connection to rank " + std::to_string(peer));
}

void bind_host(py::module_& m) {
    hear_signals();
    m.def("process_identity", &process_identity, py::arg("pid"),
          "Distinguishes a process from all others, on other hosts too, together with its number; empty if unknown.");
    py::class_<Process>(m, "Process")
        .def(py::init(&Process::of), py::arg("pid"), py::arg("identity"))
        .def_property_readonly("has_descriptor", &Process::has_descriptor)
        .def("has_ended", &Process::has_ended);
    m.def(
        "available_memory",
        [](const std::string& root) -> std::optional<std::pair<uint64_t, std::string>> {
            const auto found = available_memory(root);
            if (!found) return std::nullopt;
            return std::make_pair(found->num_bytes, found->limit);
        },
        py::arg("root") = "", "Bytes that this process may still take, and the file that says so.");
    m.def("has_sm90_code", &fabric::has_sm90_code, py::arg("binary_version"), py::arg("ptx_version"),
          "Whether a kernel's code has what `__CUDA_ARCH__ >= 900` selects, by what cudaFuncGetAttributes says of it.");
    m.attr("MAX_WORLD") = fabric::kMaxWorld;
    m.attr("MAX_CTAS") = fabric::kMaxCtas;
    m.attr("HEADER_BYTES") = fabric::kHeaderBytes;
    m.attr("NUM_CHANNELS") = fabric::kNumChannels;
    m.attr("NUM_MAILBOXES") = fabric::kNumMailboxes;
    m.attr("TAG_FIELD_BITS") = fabric::kTagFieldBits;
    py::enum_<DType>(m, "DType")
        .value("float32", DType::kFloat32)
        .value("bfloat16", DType::kBFloat16)
        .value("float16", DType::kFloat16);
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
        .value("BUSY", Code::kBusy)
        .value("FORKED", Code::kForked)
        .value("INTERRUPTED", Code::kInterrupted)
        .value("ABANDONED", Code::kAbandoned);
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
            [](std::size_t bytes, uint64_t cookie, uint32_t first_epoch, int32_t num_segments, const std::string& root,
               bool in_dev_shm, int32_t node) {
                py::gil_scoped_release release;
                return std::shared_ptr<Segment>(
                    Segment::create(bytes, cookie, first_epoch, num_segments, root, in_dev_shm, node));
            },
            py::arg("data_bytes"), py::arg("cookie"), py::arg("first_epoch"), py::arg("num_segments") = 1,
            py::arg("root") = "", py::arg("in_dev_shm") = true, py::arg("node") = -1)
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
    using fabric::shm::RowsSite;
    py::class_<RowsSite>(m, "RowsSite")
        .def(py::init<>())
        .def_readwrite("tag", &RowsSite::tag)
        .def_readwrite("partial_offset", &RowsSite::partial_offset)
        .def_readwrite("partial_bytes", &RowsSite::partial_bytes)
        .def_readwrite("timeout_s", &RowsSite::timeout_s);
    m.def(
        "partial_need",
        [](int64_t num_bytes) { return fabric::shm::partial_need(within("num_bytes", num_bytes, 0, kMostBytes)); },
        py::arg("num_bytes"), "The two buffers of what a rank puts into its segment in one call, at most `num_bytes`.");
    using Connections = fabric::tcp::Group;
    py::class_<Connections, std::shared_ptr<Connections>>(m, "Connections")
        .def(py::init(&connections), py::arg("sockets"), py::arg("rank"), py::arg("num_processes"),
             py::arg("first_epoch"))
        .def(
            "add",
            [](Connections& group, int32_t index, int socket) {
                within("index", index, 0, group.world() - 1);
                if (index == group.rank() || group.is_connected(index))
                    throw std::invalid_argument("rank " + std::to_string(index) + " has no place for a connection");
                expect_socket(socket);
                group.add(index, socket);
            },
            py::arg("index"), py::arg("socket"), "One connection more; the socket is taken over.")
        .def_property_readonly("epoch", &Connections::epoch)
        .def_property_readonly("status", &Connections::status)
        .def(
            "exchange",
            [](Connections& group, uint64_t tag, double timeout_s, const std::map<int32_t, py::bytes>& sent,
               const std::map<int32_t, std::size_t>& expected) {
                std::map<int32_t, std::string> out, in;
                timeout_of(timeout_s);
                for (const auto& [peer, bytes] : sent) {
                    expect_peer(group, peer);
                    out[peer] = bytes;
                }
                for (const auto& [peer, num_bytes] : expected) {
                    expect_peer(group, peer);
                    in[peer].resize(num_bytes);
                }
                Status status;
                {
                    py::gil_scoped_release release;
                    status = group.begin(tag, timeout_s);
                    if (status.ok()) {
                        for (auto& [peer, bytes] : in)
                            group.receive(peer, 0, {{bytes.data(), static_cast<int64_t>(bytes.size())}});
                        for (auto& [peer, bytes] : out)
                            group.send(peer, 0, {{bytes.data(), static_cast<int64_t>(bytes.size())}});
                        status = group.progress([](int32_t, uint32_t) {});
                        group.leave();
                    }
                }
                const int code = code_of(status);
                std::map<int32_t, py::bytes> found;
                for (const auto& [peer, bytes] : in)
                    found[peer] = py::bytes(bytes);
                return std::make_pair(code, found);
            },
            py::arg("tag"), py::arg("timeout_s"), py::arg("sent"), py::arg("expected"),
            "One call: bytes to some ranks, so many from others. Its code, and what came; `status` says more.");
}

}  // namespace
}  // namespace weave

PYBIND11_MODULE(_native, m) {
    m.doc() = "Native part of weaveopt: fabrics and kernels, without torch.";
    weave::bind_host(m);
    weave::bind_fabric(m);
    weave::bind_families(m);
#ifdef WEAVE_WITH_CUDA
    m.attr("has_cuda") = true;
    weave::bind_fabric_cuda(m);
    weave::bind_families_cuda(m);
#else
    m.attr("has_cuda") = false;
#endif
}
