// A site of all_reduce_norm as Python holds it, on one host or on several.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "all_reduce_norm/shm.h"
#include "base/bindings.h"

namespace weave {

struct AllReduceNormHandle {
    std::shared_ptr<GroupHandle> owner;
    std::unique_ptr<AllReduceNorm> op;

    AllReduceNormHandle(std::shared_ptr<GroupHandle> group, const AllReduceNormSite& site, int32_t max_threads,
                        const std::string& isa)
        : owner(std::move(group)),
          op(std::make_unique<AllReduceNorm>(check(*owner, site), site, max_threads, rows(isa))) {}

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
    static fabric::shm::Group& check(GroupHandle& handle, const AllReduceNormSite& site) {
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
        pybind11::gil_scoped_release release;
        return static_cast<int>(op->enter(tokens).code);
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
        pybind11::gil_scoped_release release;
        return static_cast<int>(op->run(tokens, arrays, num_threads).code);
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

}  // namespace weave
