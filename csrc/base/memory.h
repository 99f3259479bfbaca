// How much memory this process may still take: of the host, and of every control group that limits it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace weave {

struct Available {
    uint64_t num_bytes;
    std::string limit;  // the file that says so
};

// The smallest of what the host and the control groups (versions 1 and 2, with all that are above) would give, page
// cache counted as free: the system takes it back before anything else. Nothing where none of them says; 0
// of the host or of a hard limit says nothing. Taking more calls the OOM killer. `root` stands before the paths of all
// files that are read.
std::optional<Available> available_memory(const std::string& root = "");

}  // namespace weave
