// The parts of the Python module, each in a file of its own.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "fabric/shm.h"

namespace weave {

// Keeps the segments of a group mapped as long as anything uses it.
struct GroupHandle {
    std::vector<std::shared_ptr<fabric::shm::Segment>> segments;
    fabric::shm::Group group;

    static std::vector<fabric::shm::Segment*> raw(const std::vector<std::shared_ptr<fabric::shm::Segment>>& segments) {
        std::vector<fabric::shm::Segment*> out;
        for (const auto& segment : segments)
            out.push_back(segment.get());
        return out;
    }
    GroupHandle(std::vector<std::shared_ptr<fabric::shm::Segment>> all, int32_t rank, int32_t num_processes,
                uint32_t first_epoch)
        : segments(std::move(all)), group(raw(segments), rank, num_processes, first_epoch) {}
};

// Kernel families, one line each in families.cpp.
void bind_families(pybind11::module_& m);

#ifdef WEAVE_WITH_CUDA
void bind_fabric_cuda(pybind11::module_& m);
void bind_families_cuda(pybind11::module_& m);
#endif

}  // namespace weave
