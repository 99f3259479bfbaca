#include "base/memory.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <vector>

namespace weave {
namespace {

// The number that a file begins with; nothing where there is none, as in "max".
std::optional<uint64_t> number_in(const std::string& path) {
    std::ifstream file(path);
    uint64_t value = 0;
    if (file >> value) return value;
    return std::nullopt;
}

// The number after `key` in a file of lines "key number".
std::optional<uint64_t> number_of(const std::string& path, const std::string& key) {
    std::ifstream file(path);
    for (std::string word; file >> word;) {
        uint64_t value = 0;
        if (word == key && file >> value) return value;
    }
    return std::nullopt;
}

void keep_smaller(std::optional<Available>& least, uint64_t num_bytes, const std::string& limit) {
    if (!least || num_bytes < least->num_bytes) least = Available{num_bytes, limit};
}

// A version of control groups: names of its files.
struct Names {
    std::vector<const char*> limits;  // hard ones, and soft ones, which may be exceeded
    const char* usage;
    const char* inactive_file;  // of memory.stat, with the groups below
    const char* active_file;
};

const Names kVersion1{{"memory.limit_in_bytes"}, "memory.usage_in_bytes", "total_inactive_file", "total_active_file"};
const Names kVersion2{{"memory.max", "memory.high"}, "memory.current", "inactive_file", "active_file"};

void add_group(std::optional<Available>& least, const std::string& folder, const Names& names) {
    const std::optional<uint64_t> usage = number_in(folder + "/" + names.usage);
    if (!usage) return;
    const std::string stat = folder + "/memory.stat";
    const uint64_t cache =
        number_of(stat, names.inactive_file).value_or(0) + number_of(stat, names.active_file).value_or(0);
    const uint64_t taken = *usage - std::min(*usage, cache);
    for (const char* name : names.limits) {
        const std::string path = folder + "/" + name;
        const std::optional<uint64_t> limit = number_in(path);
        if (!limit) continue;
        const uint64_t left = *limit - std::min(*limit, taken);
        // Nobody runs at a hard limit that leaves nothing, and who runs beyond a soft one may go on: sandboxes say so
        // of groups that have none.
        if (left > 0) keep_smaller(least, left, path);
    }
}

// A mounted tree of control groups that limit memory.
struct Mount {
    bool is_version_2;
    std::string top;    // the group that is mounted
    std::string place;  // where
};

// Lines of /proc/self/mountinfo: "36 35 98:0 <top> <place> <options> [<tags>] - <type> <source> <super options>".
std::vector<Mount> mounts(const std::string& root) {
    std::vector<Mount> found;
    std::ifstream file(root + "/proc/self/mountinfo");
    for (std::string line; std::getline(file, line);) {
        const std::size_t bar = line.find(" - ");
        if (bar == std::string::npos) continue;
        std::istringstream before(line.substr(0, bar)), after(line.substr(bar + 3));
        std::string skipped, top, place, type, source, options;
        before >> skipped >> skipped >> skipped >> top >> place;
        after >> type >> source >> options;
        if (type == "cgroup2" || (type == "cgroup" && ("," + options + ",").find(",memory,") != std::string::npos))
            found.push_back({type == "cgroup2", top, place});
    }
    return found;
}

// Where this process is in the tree of that version; lines of /proc/self/cgroup: "<id>:<controllers>:<path>", where
// version 2 has no controllers.
std::optional<std::string> own_group(const std::string& root, bool is_version_2) {
    std::ifstream file(root + "/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {
        const std::size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        if (is_version_2 ? controllers == ",," : controllers.find(",memory,") != std::string::npos)
            return line.substr(second + 1);
    }
    return std::nullopt;
}

}  // namespace

std::optional<Available> available_memory(const std::string& root) {
    std::optional<Available> least;
    const std::string meminfo = root + "/proc/meminfo";
    // Sandboxes say 0 here too, despite gigabytes that can be taken.
    if (const auto kib = number_of(meminfo, "MemAvailable:").value_or(0)) keep_smaller(least, kib * 1024, meminfo);
    for (const Mount& mount : mounts(root)) {
        const std::optional<std::string> group = own_group(root, mount.is_version_2);
        if (!group) continue;
        // A container sees its own group as the top, and may know where that is on the host.
        std::string below = *group;
        const bool is_below = mount.top == "/" || below == mount.top || below.rfind(mount.top + "/", 0) == 0;
        below = is_below ? below.substr(mount.top == "/" ? 0 : mount.top.size()) : "";
        while (!below.empty() && below.back() == '/')
            below.pop_back();
        for (;;) {
            add_group(least, root + mount.place + below, mount.is_version_2 ? kVersion2 : kVersion1);
            if (below.empty()) break;
            below.resize(below.rfind('/') == std::string::npos ? 0 : below.rfind('/'));
        }
    }
    return least;
}

}  // namespace weave
