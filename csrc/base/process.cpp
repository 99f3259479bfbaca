#include "base/process.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace weave {
namespace {

enum class Presence { kUnknown, kGone, kThere };

struct Entry {
    Presence presence = Presence::kUnknown;
    uint64_t start = 0;
};

bool says_gone(int error) {
    return error == ENOENT || error == ESRCH;
}

// Fields 3 (state) and 22 (start time) of /proc/<pid>/stat. The command in field 2 may hold spaces, so count from its
// last bracket.
Entry entry_of(int32_t pid) {
    char path[32], text[1024];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return {says_gone(errno) ? Presence::kGone : Presence::kUnknown};
    const ssize_t length = read(fd, text, sizeof text - 1);
    const int error = length < 0 ? errno : 0;
    close(fd);
    if (length <= 0) return {says_gone(error) ? Presence::kGone : Presence::kUnknown};
    text[length] = 0;
    const char* cursor = std::strrchr(text, ')');
    if (cursor == nullptr || cursor[1] != ' ') return {};
    cursor += 2;
    const char state = *cursor;
    if (state == 'Z' || state == 'X') return {Presence::kGone};
    for (int field = 3; field < 22; ++field) {
        cursor = std::strchr(cursor, ' ');
        if (cursor == nullptr) return {};
        ++cursor;
    }
    return {Presence::kThere, std::strtoull(cursor, nullptr, 10)};
}

}  // namespace

std::optional<uint64_t> process_start(int32_t pid) {
    const Entry entry = entry_of(pid);
    if (entry.presence != Presence::kThere) return std::nullopt;
    return entry.start;
}

bool process_has_ended(int32_t pid, uint64_t start) {
    const Entry entry = entry_of(pid);
    return entry.presence == Presence::kGone || (entry.presence == Presence::kThere && entry.start != start);
}

}  // namespace weave
