#include "base/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

// Their numbers are the same on every architecture; headers may be older than the system.
#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace weave {
namespace {

struct Entry {
    uint64_t start;
    bool is_remains;  // a zombie
};

// The first bytes of a file; nothing where it cannot be read.
std::optional<std::string> text_of(const char* path) {
    char text[1024];
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return std::nullopt;
    const ssize_t length = read(fd, text, sizeof text);
    close(fd);
    if (length <= 0) return std::nullopt;
    return std::string(text, static_cast<std::size_t>(length));
}

// Fields 3 (state), 20 (threads) and 22 (start time) of /proc/<pid>/stat. The command in field 2 may hold spaces, so
// count from its last bracket.
std::optional<Entry> entry_of(int32_t pid) {
    char path[32];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    const std::optional<std::string> text = text_of(path);
    if (!text) return std::nullopt;
    const char* cursor = std::strrchr(text->c_str(), ')');
    if (cursor == nullptr || cursor[1] != ' ') return std::nullopt;
    cursor += 2;
    const char state = *cursor;
    long num_threads = 0;
    for (int field = 3; field < 22; ++field) {
        if (field == 20) num_threads = std::strtol(cursor, nullptr, 10);
        cursor = std::strchr(cursor, ' ');
        if (cursor == nullptr) return std::nullopt;
        ++cursor;
    }
    // A first thread that has ended looks like a zombie while others go on.
    const bool is_remains = state == 'X' || (state == 'Z' && num_threads <= 1);
    return Entry{std::strtoull(cursor, nullptr, 10), is_remains};
}

// Of the file system whose files are pidfds; before it all of them were one file.
constexpr long kPidFileSystem = 0x50494446;

int open_process(int32_t pid) {
    return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
}

uint64_t inode_of(int fd) {
    struct statfs system{};
    struct stat info{};
    if (fd < 0 || fstatfs(fd, &system) != 0 || system.f_type != kPidFileSystem || fstat(fd, &info) != 0) return 0;
    return static_cast<uint64_t>(info.st_ino);
}

// 1 where the system has no time namespaces, 0 if unknown.
uint64_t time_namespace() {
    struct stat info{};
    if (stat("/proc/self/ns/time", &info) == 0) return static_cast<uint64_t>(info.st_ino);
    return errno == ENOENT ? 1 : 0;
}

// Of the process that `fd` is a descriptor of, if it is one.
std::optional<ProcessMark> mark_of(int32_t pid, int fd) {
    const std::optional<Entry> entry = entry_of(pid);
    if (!entry || entry->is_remains) return std::nullopt;
    return ProcessMark{inode_of(fd), entry->start, time_namespace()};
}

// Which boot of which host this is. Kept: later there may be no descriptor to ask with.
const std::string& boot() {
    static std::string known;
    if (known.empty())
        if (const std::optional<std::string> text = text_of("/proc/sys/kernel/random/boot_id"))
            known = text->substr(0, text->find_first_of(" \n"));
    return known;
}

// Where this process's numbers mean what they do: "<boot of the host>:<namespace>:"; empty if unknown.
std::string place() {
    const uint64_t in = pid_namespace();
    return boot().empty() || in == 0 ? std::string() : boot() + ":" + std::to_string(in) + ":";
}

}  // namespace

std::optional<ProcessMark> process_mark(int32_t pid) {
    const int fd = open_process(pid);
    const std::optional<ProcessMark> found = mark_of(pid, fd);
    if (fd >= 0) close(fd);
    return found;
}

std::optional<bool> is_same(const ProcessMark& one, const ProcessMark& other) {
    if (one.inode != 0 && other.inode != 0) return one.inode == other.inode;
    const bool is_one_clock = one.time_namespace != 0 && one.time_namespace == other.time_namespace;
    if (is_one_clock && one.start != 0 && other.start != 0) return one.start == other.start;
    return std::nullopt;
}

uint64_t pid_namespace() {
    struct stat info{};
    return stat("/proc/self/ns/pid", &info) == 0 ? static_cast<uint64_t>(info.st_ino) : 0;
}

std::string process_identity(int32_t pid) {
    const std::string where = place();
    const std::optional<ProcessMark> mark = process_mark(pid);
    if (where.empty() || !mark) return {};
    return where + std::to_string(mark->time_namespace) + ":" + std::to_string(mark->start) + ":" +
           std::to_string(mark->inode);
}

Process::Process(int32_t pid, const ProcessMark& mark) : pid_(pid), mark_(mark) {
    if (pid_ <= 0) return;
    fd_ = open_process(pid);
    if (fd_ < 0) return;
    const std::optional<ProcessMark> found = mark_of(pid, fd_);
    if (!found || is_same(*found, mark).value_or(true)) return;
    is_gone_ = true;
    close(fd_);  // of a later process with the number
    fd_ = -1;
}

Process Process::of(int32_t pid, const std::string& identity) {
    const std::string where = place();
    if (where.empty() || identity.compare(0, where.size(), where) != 0) return {};
    ProcessMark mark;
    char* cursor = nullptr;
    mark.time_namespace = std::strtoull(identity.c_str() + where.size(), &cursor, 10);
    if (*cursor == ':') mark.start = std::strtoull(cursor + 1, &cursor, 10);
    if (*cursor == ':') mark.inode = std::strtoull(cursor + 1, nullptr, 10);
    return mark.is_known() ? Process(pid, mark) : Process();
}

Process::Process(Process&& other) noexcept
    : pid_(std::exchange(other.pid_, 0)),
      mark_(other.mark_),
      fd_(std::exchange(other.fd_, -1)),
      is_gone_(other.is_gone_) {}

Process& Process::operator=(Process&& other) noexcept {
    std::swap(pid_, other.pid_);
    std::swap(mark_, other.mark_);
    std::swap(fd_, other.fd_);
    std::swap(is_gone_, other.is_gone_);
    return *this;
}

Process::~Process() {
    if (fd_ >= 0) close(fd_);
}

// Nothing where the descriptor does not say, as after somebody closed it and its number went to another file: those may
// look readable, so a second look asks for what only a pidfd answers.
std::optional<bool> Process::ended_by_descriptor() const {
    if (fd_ < 0) return std::nullopt;
    pollfd asked{fd_, POLLIN, 0};
    const int num_ready = poll(&asked, 1, 0);
    if (num_ready == 0) return false;
    if (num_ready < 0 || (asked.revents & POLLIN) == 0) return std::nullopt;
    if (syscall(SYS_pidfd_send_signal, fd_, 0, nullptr, 0) == 0 || errno == ESRCH || errno == EPERM) return true;
    return std::nullopt;
}

bool Process::has_ended() const {
    if (pid_ <= 0) return false;
    if (is_gone_) return true;
    if (const std::optional<bool> ended = ended_by_descriptor()) return *ended;
    // Needs no descriptor and no /proc, but knows neither remains nor a number that is used again.
    if (kill(pid_, 0) != 0 && errno == ESRCH) return true;
    const std::optional<Entry> entry = entry_of(pid_);
    if (!entry) return false;
    return entry->is_remains || !is_same({0, entry->start, time_namespace()}, mark_).value_or(true);
}

}  // namespace weave
