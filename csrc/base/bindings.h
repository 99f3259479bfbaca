// The parts of the Python module, each in a file of its own.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/sizes.h"
#include "base/status.h"
#include "fabric/shm.h"

namespace weave {

// What a call returns to Python. Raises what the handler of a signal raised, where that ended a wait. Needs Python's
// lock.
inline int code_of(const Status& status) {
    if (status.code == Code::kInterrupted && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
    return static_cast<int>(status.code);
}

// None is no object.
template <typename T>
const std::shared_ptr<T>& given(const char* name, const std::shared_ptr<T>& object) {
    if (object == nullptr) throw std::invalid_argument(std::string(name) + " is None");
    return object;
}

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
        : segments(checked(std::move(all), rank)), group(raw(segments), rank, num_processes, first_epoch) {}

    int32_t world() const { return group.world(); }
    int64_t data_bytes() const { return static_cast<int64_t>(segments.front()->data_bytes()); }
    // Raises unless this thread has taken the group for a call.
    void expect_held() const {
        if (!group.is_held()) throw std::invalid_argument("the call was not entered");
    }

  private:
    // Equally large ones, one of each rank.
    static std::vector<std::shared_ptr<fabric::shm::Segment>> checked(
        std::vector<std::shared_ptr<fabric::shm::Segment>> all, int32_t rank) {
        within("the number of segments", static_cast<int64_t>(all.size()), 1, kMostRanks);
        within("rank", rank, 0, static_cast<int64_t>(all.size()) - 1);
        for (const auto& segment : all) {
            if (given("a segment", segment)->data_bytes() != all.front()->data_bytes())
                throw std::invalid_argument("segments of different sizes");
        }
        return all;
    }
};

// Kernel families, one line each in families.cpp.
void bind_families(pybind11::module_& m);

// Defined where the CUDA part is built. Declared in any case, so that other bindings have one object for both builds.
void bind_fabric_cuda(pybind11::module_& m);
void bind_families_cuda(pybind11::module_& m);

}  // namespace weave
