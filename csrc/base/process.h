// Whether another process of this host is still there. The one place that asks the system.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace weave {

// Distinguishes a process from a later one with the same number. 0: not known.
struct ProcessMark {
    uint64_t inode = 0;  // of its pidfd, where no two processes share one (Linux 6.9): the same for all who look
    uint64_t start = 0;  // in ticks since boot, as they are in ...
    uint64_t time_namespace = 0;  // ... this time namespace; others count from another boot

    bool is_known() const { return inode != 0 || start != 0; }
};

// Nothing where there is no such process, only its remains (a zombie), or it is unknown.
std::optional<ProcessMark> process_mark(int32_t pid);

// Whether both are of one process; nothing where they have nothing in common that is absolute.
std::optional<bool> is_same(const ProcessMark& one, const ProcessMark& other);

// The pid namespace of this process: only inside it does a number stand for one process. 0 if unknown.
uint64_t pid_namespace();

// Distinguishes a process of this pid namespace from all others, on other hosts too, together with its number: when the
// host was booted, the namespace, and process_mark(). Empty where one of them is not known.
std::string process_identity(int32_t pid);

// A process that may end at any time. It counts as ended, its remains included, only if the system says so: where
// asking fails (no descriptor is left, a sandbox forbids it) it counts as alive.
//
// Holds a pidfd where the system gives one out, so that asking later needs no descriptor; else its number and start are
// looked up, which takes one, or its number alone is asked for.
class Process {
  public:
    // One of which nothing is known: it never ends.
    Process() = default;
    // The one of this pid namespace that has the mark.
    Process(int32_t pid, const ProcessMark& mark);
    // By its process_identity(). Nothing is known of it where that is empty, of another host or of another namespace.
    static Process of(int32_t pid, const std::string& identity);
    Process(Process&& other) noexcept;
    Process& operator=(Process&& other) noexcept;
    ~Process();

    bool has_ended() const;
    // Whether a pidfd is held.
    bool has_descriptor() const { return fd_ >= 0; }

  private:
    std::optional<bool> ended_by_descriptor() const;

    int32_t pid_ = 0;
    ProcessMark mark_;
    int fd_ = -1;
    bool is_gone_ = false;  // a later one had its number when it was looked for
};

}  // namespace weave
