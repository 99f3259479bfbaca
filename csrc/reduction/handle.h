// A site of all_reduce_norm as Python holds it, on one host or on several.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/bindings.h"
#include "reduction/parameters.h"
#include "reduction/shm.h"

namespace weave {

struct AllReduceNormHandle {
    std::shared_ptr<GroupHandle> owner;
    std::unique_ptr<AllReduceNorm> op;

    AllReduceNormHandle(std::shared_ptr<GroupHandle> group, const AllReduceNormSite& site, int32_t max_threads,
                        const std::string& isa)
        : owner(std::move(group)),
          op(std::make_unique<AllReduceNorm>(check(owner, site, max_threads), site, max_threads, rows(isa))) {}

    AllReduceNormHandle(std::shared_ptr<GroupHandle> group, std::unique_ptr<AllReduceNorm> made)
        : owner(std::move(group)), op(std::move(made)) {}
    virtual ~AllReduceNormHandle() = default;

    virtual Status status() const { return owner->group.status(); }

    static const RowFunctions& rows(const std::string& isa) {
        if (isa.empty()) return choose_rows();
        for (const RowFunctions* functions : usable_rows()) {
            if (isa == functions->isa) return *functions;
        }
        throw std::invalid_argument("this processor does not run " + isa);
    }

    // A buffer outside the segment would be a wild store later.
    static fabric::shm::Group& check(const std::shared_ptr<GroupHandle>& handle, const AllReduceNormSite& site,
                                     int32_t max_threads) {
        const int64_t all = given("group", handle)->data_bytes();
        const fabric::shm::Layout& at = site.layout;
        within("max_threads", max_threads, 1, kMostThreads);
        known("dtype", site.dtype, DType::kFloat16);
        known("out_dtype", site.out_dtype, DType::kFloat16);
        known("the first norm", site.post.kind, NormKind::kLayer);
        known("the norm", site.norm.kind, NormKind::kLayer);
        known("sum_out", site.sum_out, SumOut::kSharded);
        timeout_of(site.timeout_s);
        within("max_tokens", site.max_tokens, 0, kMostCount);
        within("hidden", site.hidden, 1, kMostRow);
        expect_inside("partial", at.partial_offset, product_of("partial", {2, at.partial_bytes}), all);
        expect_inside("a partial result", 0, product_of("rows", {site.max_tokens, site.hidden, size_of(site.dtype)}),
                      at.partial_bytes);
        expect_inside("output", at.output_offset, AllReduceNorm::output_bytes(site, handle->world()), all);
        return handle->group;
    }

    int enter(int64_t tokens) {
        expect_tokens(tokens);
        Status status;
        {
            pybind11::gil_scoped_release release;
            status = op->enter(tokens);
        }
        return code_of(status);
    }

    void expect_tokens(int64_t tokens) const { within("tokens", tokens, 0, op->site().max_tokens); }

    // What changes from call to call are plain numbers: building a struct from Python would cost more than the call.
    int run(int64_t tokens, int32_t num_threads, uintptr_t partial, uintptr_t residual,
            const ReductionParameters& parameters, uintptr_t normalized, uintptr_t sum, float scale) {
        owner->expect_held();
        const fabric::shm::Held held(owner->group);
        expect_tokens(tokens);
        auto in = [](uintptr_t pointer) { return reinterpret_cast<const void*>(pointer); };
        const AllReduceNormArrays arrays = {in(partial),
                                            in(residual),
                                            in(parameters.reduced_bias),
                                            in(parameters.post_weight),
                                            in(parameters.post_bias),
                                            in(parameters.weight),
                                            in(parameters.bias),
                                            reinterpret_cast<void*>(normalized),
                                            reinterpret_cast<void*>(sum),
                                            parameters.fp32,
                                            scale};
        Status status;
        {
            pybind11::gil_scoped_release release;
            status = op->run(tokens, arrays, num_threads);
        }
        return code_of(status);
    }

    int enter_and_run(int64_t tokens, int32_t num_threads, uintptr_t partial, uintptr_t residual,
                      const ReductionParameters& parameters, uintptr_t normalized, uintptr_t sum, float scale) {
        const int code = enter(tokens);
        return code != 0 ? code : run(tokens, num_threads, partial, residual, parameters, normalized, sum, scale);
    }
};

}  // namespace weave
