// The Python face of mixtures whose tokens are sharded. Plain C++: everything that needs CUDA's headers is declared in
// exchange.h and peer.h.
#include "base/bindings.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "experts/sharded/counts.h"
#include "experts/sharded/shm.h"

#ifdef WEAVE_WITH_CUDA
#include "base/timeout.h"
#include "experts/grouped.h"
#include "experts/sharded/exchange.h"
#include "fabric/peer.h"
#endif

namespace py = pybind11;

namespace weave {

void bind_moe_sharded(py::module_& m);

namespace {

struct ShardedMixtureHandle {
    std::shared_ptr<GroupHandle> owner;
    moe::ShardedMixture op;

    ShardedMixtureHandle(std::shared_ptr<GroupHandle> group, const moe::Site& site, const std::string& isa)
        : owner(given("group", group)), op(owner->group, site, owner->data_bytes(), rows(isa)) {}

    // Raises unless this thread is in a call that has come so far.
    void expect(bool is_dispatched) const {
        owner->expect_held();
        if (op.is_dispatched() != is_dispatched) throw std::invalid_argument("the steps of a call are out of order");
    }

    int enter() {
        Status status;
        {
            py::gil_scoped_release release;
            status = op.enter();
        }
        return code_of(status);
    }

    void dispatch(uintptr_t x, uintptr_t experts, int64_t tokens, int32_t num_threads) {
        expect(false);
        within("tokens", tokens, 0, kMostCount);
        expect_address("x", x, tokens > 0);
        expect_address("experts", experts, tokens > 0);
        py::gil_scoped_release release;
        op.dispatch(reinterpret_cast<const void*>(x), reinterpret_cast<const int64_t*>(experts), tokens,
                    threads(num_threads));
    }

    std::pair<int, int64_t> collect(int32_t first, int32_t last) {
        expect(true);
        within("last", last, 0, owner->world());
        within("first", first, 0, last);
        int64_t num_routes = 0;
        Status status;
        {
            py::gil_scoped_release release;
            status = op.collect(first, last, num_routes);
        }
        return {code_of(status), num_routes};
    }

    void gather(uintptr_t rows, uintptr_t experts, int32_t num_threads) const {
        expect(true);
        expect_address("rows", rows, op.num_collected() > 0);
        expect_address("experts", experts, op.num_collected() > 0);
        py::gil_scoped_release release;
        op.gather(reinterpret_cast<void*>(rows), reinterpret_cast<int64_t*>(experts), threads(num_threads));
    }

    void return_results(uintptr_t results, int32_t num_threads) {
        expect(true);
        expect_address("results", results, op.num_collected() > 0);
        py::gil_scoped_release release;
        op.return_results(reinterpret_cast<const void*>(results), threads(num_threads));
    }

    int finish(uintptr_t weights, uintptr_t out, int32_t num_threads) {
        expect(true);
        within("tokens of a call that is finished", op.num_tokens(), 0, op.site().max_tokens);
        expect_address("weights", weights, op.num_tokens() > 0);
        expect_address("out", out, op.num_tokens() > 0);
        Status status;
        {
            py::gil_scoped_release release;
            status =
                op.finish(reinterpret_cast<const float*>(weights), reinterpret_cast<void*>(out), threads(num_threads));
        }
        return code_of(status);
    }

    int end_without_results() {
        expect(true);
        Status status;
        {
            py::gil_scoped_release release;
            status = op.end_without_results();
        }
        return code_of(status);
    }

    static int32_t threads(int32_t num_threads) { return std::min(num_threads, kMostThreads); }

    static const RowFunctions& rows(const std::string& isa) {
        if (isa.empty()) return choose_rows();
        for (const RowFunctions* functions : usable_rows()) {
            if (isa == functions->isa) return *functions;
        }
        throw std::invalid_argument("this processor does not run " + isa);
    }
};

struct TokenCountsHandle {
    std::shared_ptr<GroupHandle> owner;
    moe::TokenCounts op;

    TokenCountsHandle(std::shared_ptr<GroupHandle> group, int64_t offset, uint32_t site, double timeout_s)
        : owner(given("group", group)), op(owner->group, offset, owner->data_bytes(), site, timeout_s) {}
};

}  // namespace

void bind_moe_sharded(py::module_& m) {
    using moe::Site;
    py::class_<Site>(m, "ShardedMixtureSite")
        .def(py::init<>())
        .def_readwrite("tag", &Site::tag)
        .def_readwrite("dispatch_offset", &Site::dispatch_offset)
        .def_readwrite("combine_offset", &Site::combine_offset)
        .def_readwrite("max_tokens", &Site::max_tokens)
        .def_readwrite("choices", &Site::choices)
        .def_readwrite("num_experts", &Site::num_experts)
        .def_readwrite("hidden", &Site::hidden)
        .def_readwrite("dtype", &Site::dtype)
        .def_readwrite("timeout_s", &Site::timeout_s);
    m.def(
        "sharded_mixture_needs",
        [](int32_t world, int64_t max_tokens, int64_t choices, int64_t row_bytes) {
            return moe::Layout(world, max_tokens, choices, row_bytes).needs();
        },
        py::arg("world"), py::arg("max_tokens"), py::arg("choices"), py::arg("row_bytes"),
        "What a call needs in every rank's arena: rows that others push here, and results returned to it.");
    m.def(
        "gpu_sharded_mixture_needs",
        [](int32_t world, int64_t max_tokens, int64_t choices, int64_t row_bytes) {
            return moe::GpuLayout(world, max_tokens, choices, row_bytes).needs();
        },
        py::arg("world"), py::arg("max_tokens"), py::arg("choices"), py::arg("row_bytes"),
        "The same in the arena of a GPU.");
    using Handle = ShardedMixtureHandle;
    py::class_<Handle>(m, "ShardedMixture")
        .def(py::init<std::shared_ptr<GroupHandle>, const Site&, const std::string&>(), py::arg("group"),
             py::arg("site"), py::arg("isa") = "")
        .def_property_readonly("status", [](const Handle& handle) { return handle.owner->group.status(); })
        .def_property_readonly("rows_dispatched", [](const Handle& handle) { return handle.op.traffic().dispatched; })
        .def_property_readonly("rows_returned", [](const Handle& handle) { return handle.op.traffic().returned; })
        .def("enter", &Handle::enter)
        .def("dispatch", &Handle::dispatch, py::arg("x"), py::arg("experts"), py::arg("tokens"), py::arg("num_threads"))
        .def("collect", &Handle::collect, py::arg("first"), py::arg("last"),
             "A code, and how many routes there are; -1 where a rank has more tokens than were planned for.")
        .def("gather", &Handle::gather, py::arg("rows"), py::arg("experts"), py::arg("num_threads"))
        .def("return_results", &Handle::return_results, py::arg("results"), py::arg("num_threads"))
        .def("finish", &Handle::finish, py::arg("weights"), py::arg("out"), py::arg("num_threads"))
        .def("end_without_results", &Handle::end_without_results,
             "Ends a call in which some rank has too many tokens, on all ranks.")
        .def("abandon", [](Handle& handle) { handle.owner->group.abandon(); });
    m.def("token_counts_need", &moe::TokenCounts::need, "What ranks on GPUs need in the memory of their hosts.");
    py::class_<TokenCountsHandle>(m, "TokenCounts")
        .def(py::init<std::shared_ptr<GroupHandle>, int64_t, uint32_t, double>(), py::arg("group"), py::arg("offset"),
             py::arg("tag"), py::arg("timeout_s"))
        .def_property_readonly("status", [](const TokenCountsHandle& handle) { return handle.owner->group.status(); })
        .def(
            "largest",
            [](TokenCountsHandle& handle, int64_t tokens) {
                int64_t most = 0;
                Status status;
                {
                    py::gil_scoped_release release;
                    status = handle.op.largest(tokens, most);
                }
                return std::make_pair(code_of(status), most);
            },
            py::arg("tokens"), "A code, and how many tokens the rank has that has most.");
}

#ifdef WEAVE_WITH_CUDA
void bind_moe_sharded_cuda(py::module_& m);

namespace {

using fabric::PeerGroup;

// What is constant over the calls of a site. Offsets are from the begin of an arena.
struct GpuShardedSite {
    uint32_t tag = 0;
    int32_t channel = 0;
    int64_t dispatch_offset = 0;
    int64_t combine_offset = 0;
    int64_t max_tokens = 0;   // of a rank
    int64_t choices = 0;      // of a token
    int64_t num_experts = 0;  // of a rank
    int64_t hidden = 0;
    DType dtype = DType::kBFloat16;
    double timeout_s = 120;
};

class GpuShardedMixture {
  public:
    GpuShardedMixture(std::shared_ptr<PeerGroup> group, const GpuShardedSite& site)
        : group_(given("group", group)),
          dtype_(known("dtype", site.dtype, DType::kFloat16)),
          max_tokens_(site.max_tokens),
          row_bytes_(within("hidden", site.hidden, 1, kMostRow) * size_of(site.dtype)) {
        const moe::GpuLayout layout(group_->world(), site.max_tokens, site.choices, row_bytes_);
        expect_inside(site.dispatch_offset, layout.dispatch_bytes());
        expect_inside(site.combine_offset, layout.combine_bytes());
        within("num_experts", site.num_experts, 1, INT32_MAX / group_->world());
        exchange_.group = group_->view(site.channel, nanoseconds_of(site.timeout_s));
        exchange_.ids_offset = site.dispatch_offset;
        exchange_.rows_offset = site.dispatch_offset + layout.rows();
        exchange_.combine_offset = site.combine_offset;
        exchange_.site = site.tag;
        exchange_.choices = static_cast<int32_t>(site.choices);
        exchange_.num_experts = static_cast<int32_t>(site.num_experts);
        exchange_.row_vecs = static_cast<int32_t>(row_bytes_ / moe::kVecBytes);
    }

    // Where this rank finds what came, from the begin of its arena.
    int64_t ids_offset() const { return exchange_.ids_offset; }
    int64_t rows_offset() const { return exchange_.rows_offset; }

    // Where the rows of each rank's tokens go.
    std::vector<uintptr_t> result_buffers() const {
        std::vector<uintptr_t> found;
        for (int32_t rank = 0; rank < exchange_.group.world; ++rank)
            found.push_back(reinterpret_cast<uintptr_t>(exchange_.group.base[rank] + exchange_.combine_offset));
        return found;
    }

    int dispatch(int64_t tokens, int64_t slot_tokens, uintptr_t x, int64_t x_stride, uintptr_t experts,
                 uintptr_t traffic, uintptr_t stream) const {
        moe::Dispatch asked{};
        if (!set_tokens(asked.exchange, tokens, slot_tokens)) return kInvalid;
        expect_address("x", x, tokens > 0);
        expect_address("experts", experts, tokens > 0);
        asked.x = reinterpret_cast<const char*>(x);
        asked.x_stride = x_stride * size_of(dtype_);
        asked.experts = reinterpret_cast<const int64_t*>(experts);
        asked.traffic = reinterpret_cast<moe::Counters*>(traffic);
        // A launch blocks where the queue is full, which may be because a kernel waits for a peer: the watchdog,
        // another thread of this interpreter, must get to run then.
        py::gil_scoped_release release;
        return moe::run_dispatch(asked, reinterpret_cast<void*>(stream));
    }

    int down(int64_t slot_tokens, uintptr_t inner, int64_t inner_width, const moe_experts::Weight& weight,
             const moe_experts::Routing& routing, uintptr_t stream) const {
        within("slot_tokens", slot_tokens, 0, max_tokens_);
        within("inner_width", inner_width, 1, kMostRow);
        moe_experts::ResultBuffers to{};
        to.rows = slot_tokens * exchange_.choices;
        static_assert(moe_experts::kMostResultBuffers >= fabric::kMaxWorld);
        for (int32_t rank = 0; rank < exchange_.group.world; ++rank)
            to.base[rank] = exchange_.group.base[rank] + exchange_.combine_offset;
        py::gil_scoped_release release;
        return moe_experts::run_down_to_ranks(reinterpret_cast<const void*>(inner), inner_width, weight, routing, to,
                                              dtype_, reinterpret_cast<void*>(stream));
    }

    int combine(int64_t tokens, int64_t slot_tokens, uintptr_t experts, uintptr_t weights, DType weights_dtype,
                uintptr_t out, uintptr_t stream) const {
        moe::Combine asked{};
        if (!set_tokens(asked.exchange, tokens, slot_tokens)) return kInvalid;
        known("weights_dtype", weights_dtype, DType::kFloat16);
        expect_address("experts", experts, tokens > 0);
        expect_address("weights", weights, tokens > 0);
        expect_address("out", out, tokens > 0);
        asked.experts = reinterpret_cast<const int64_t*>(experts);
        asked.weights = reinterpret_cast<const void*>(weights);
        asked.weights_dtype = weights_dtype;
        asked.out = reinterpret_cast<char*>(out);
        py::gil_scoped_release release;
        return moe::run_combine(asked, dtype_, reinterpret_cast<void*>(stream));
    }

  private:
    static constexpr int kInvalid = 1;  // cudaErrorInvalidValue

    bool set_tokens(moe::Exchange& exchange, int64_t tokens, int64_t slot_tokens) const {
        exchange = exchange_;
        exchange.tokens = static_cast<int32_t>(tokens);
        exchange.slot_tokens = static_cast<int32_t>(slot_tokens);
        return tokens >= 0 && tokens <= slot_tokens && slot_tokens <= max_tokens_;
    }

    void expect_inside(int64_t offset, int64_t num_bytes) const {
        const auto header = static_cast<int64_t>(fabric::kHeaderBytes);
        weave::expect_inside("a buffer", offset, num_bytes, group_->num_bytes());
        if (offset >= header && offset % moe::GpuLayout::kAlignment == 0) return;
        throw std::invalid_argument("a buffer at " + std::to_string(offset) + ": expected a multiple of " +
                                    std::to_string(moe::GpuLayout::kAlignment) + " after the header of " +
                                    std::to_string(header) + " bytes, in an arena of " +
                                    std::to_string(group_->num_bytes()) + " bytes");
    }

    std::shared_ptr<PeerGroup> group_;
    DType dtype_;
    int64_t max_tokens_;
    int64_t row_bytes_;
    moe::Exchange exchange_{};
};

}  // namespace

void bind_moe_sharded_cuda(py::module_& m) {
    using Site = GpuShardedSite;
    py::class_<Site>(m, "GpuShardedMixtureSite")
        .def(py::init<>())
        .def_readwrite("tag", &Site::tag)
        .def_readwrite("channel", &Site::channel)
        .def_readwrite("dispatch_offset", &Site::dispatch_offset)
        .def_readwrite("combine_offset", &Site::combine_offset)
        .def_readwrite("max_tokens", &Site::max_tokens)
        .def_readwrite("choices", &Site::choices)
        .def_readwrite("num_experts", &Site::num_experts)
        .def_readwrite("hidden", &Site::hidden)
        .def_readwrite("dtype", &Site::dtype)
        .def_readwrite("timeout_s", &Site::timeout_s);
    using Op = GpuShardedMixture;
    py::class_<Op>(m, "GpuShardedMixture")
        .def(py::init<std::shared_ptr<PeerGroup>, const Site&>(), py::arg("group"), py::arg("site"))
        .def_property_readonly("ids_offset", &Op::ids_offset)
        .def_property_readonly("rows_offset", &Op::rows_offset)
        .def_property_readonly("result_buffers", &Op::result_buffers)
        .def("dispatch", &Op::dispatch, py::arg("tokens"), py::arg("slot_tokens"), py::arg("x"), py::arg("x_stride"),
             py::arg("experts"), py::arg("traffic"), py::arg("stream"),
             "Rows and ids to the ranks of the experts, and waits for those of all ranks. A CUDA error code, as of the "
             "others.")
        .def("down", &Op::down, py::arg("slot_tokens"), py::arg("inner"), py::arg("inner_width"), py::arg("weight"),
             py::arg("routing"), py::arg("stream"),
             "As experts_down, with rows into the memory of their tokens' ranks.")
        .def("combine", &Op::combine, py::arg("tokens"), py::arg("slot_tokens"), py::arg("experts"), py::arg("weights"),
             py::arg("weights_dtype"), py::arg("out"), py::arg("stream"),
             "Waits for all ranks' rows of this one's tokens, and sums them.");
}
#endif

}  // namespace weave
