#include "fabric/shm.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "base/interrupts.h"
#include "base/memory.h"
#include "base/sizes.h"

namespace weave::fabric::shm {
namespace {

constexpr uint64_t kMagic = 0x77656176656f7074;  // "weaveopt"
// A sleeping wait looks after the peers this often: a dead one is noticed within twice this time.
constexpr long kSliceNs = 20'000'000;

using Clock = std::chrono::steady_clock;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Shared between processes, so not FUTEX_PRIVATE. Whether a signal ended it.
bool futex_wait(std::atomic<uint32_t>& word, uint32_t seen, long ns) {
    timespec time{0, ns};
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &time, nullptr, 0) != 0 &&
           errno == EINTR;
}

void futex_wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

bool reached(uint32_t seen, uint32_t epoch) {
    return static_cast<int32_t>(seen - epoch) >= 0;
}

bool reached_relaxed(const std::atomic<uint32_t>& word, uint32_t epoch) {
    return reached(word.load(std::memory_order_relaxed), epoch);
}

void store_relaxed(std::atomic<uint32_t>& word, uint32_t epoch) {
    word.store(epoch, std::memory_order_relaxed);
}

// The full fence puts the store before the load of `num_waiters`. A waiter counts itself before it sleeps, and the
// kernel compares the word once more then, so either it sees the epoch or we see it waiting.
void signal(std::atomic<uint32_t>& word, uint32_t epoch, std::atomic<uint32_t>& num_waiters) {
    word.store(epoch, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (num_waiters.load(std::memory_order_relaxed) != 0) futex_wake_all(word);
}

// Spins, then yields, and says whether the epoch came. Relaxed: the caller makes it an acquire.
bool spins_until(const std::atomic<uint32_t>& word, uint32_t epoch, const SpinPolicy& policy) {
    constexpr int kPollsPerTurn = 64;
    if (reached_relaxed(word, epoch)) return true;
    const auto start = Clock::now();
    const auto elapsed = [start] { return Clock::now() - start; };
    const std::chrono::microseconds spin(policy.spin_us), yield(policy.spin_us + policy.yield_us);
    while (elapsed() < spin) {
        for (int i = 0; i < kPollsPerTurn; ++i) {
            if (reached_relaxed(word, epoch)) return true;
            pause();
        }
    }
    for (int32_t i = 0; i < policy.min_yields || elapsed() < yield; ++i) {
        sched_yield();
        if (reached_relaxed(word, epoch)) return true;
    }
    return false;
}

[[noreturn]] void fail(const std::string& what, int error) {
    throw std::runtime_error(what + ": " + std::strerror(error));
}

// Sizes `fd` with memory that is really there: a full /dev/shm must be an error now, not a SIGBUS at the first store.
int allocate(int fd, std::size_t bytes) {
    if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) return errno;
    return posix_fallocate(fd, 0, static_cast<off_t>(bytes));
}

// Has the pages of a file in memory that nobody has touched yet placed on a memory node. The policy is the file's, so
// it holds for pages that are allocated without a mapping too. Containers often forbid it; then they are placed where
// the thread that allocates them runs.
void prefer_node(int fd, std::size_t bytes, int32_t node) {
    constexpr int kPreferred = 1;  // MPOL_PREFERRED
    constexpr int kBits = 8 * sizeof(unsigned long);
    constexpr int kMostNodes = 1024;
    if (node < 0 || node >= kMostNodes || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return;
    void* place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (place == MAP_FAILED) return;
    unsigned long nodes[kMostNodes / kBits] = {};
    nodes[node / kBits] = 1ul << (node % kBits);
    syscall(SYS_mbind, place, bytes, kPreferred, nodes, kMostNodes + 1, 0);
    munmap(place, bytes);
}

// A file in memory, of `bytes`, that has no name, where as many as `num_segments` are made at the same time.
int make_file(std::size_t bytes, int32_t num_segments, const std::string& root, bool in_dev_shm, int32_t node) {
    const std::string what = "cannot reserve " + std::to_string(bytes) + " bytes of shared memory";
    // memfd has no limit of its own: past the memory there is it would call the OOM killer instead of failing.
    const std::optional<Available> available = available_memory(root);
    if (available && bytes > available->num_bytes / static_cast<uint64_t>(num_segments)) {
        throw std::runtime_error(what + " on each of " + std::to_string(num_segments) + " ranks: " +
                                 std::to_string(available->num_bytes) + " are available (" + available->limit + ")");
    }
    int error = 0;
    if (in_dev_shm) {
        // Never has a name: a process that is killed in between would leave that behind.
        const int fd = open("/dev/shm", O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
        error = fd < 0 ? errno : allocate(fd, bytes);
        if (error == 0) return fd;
        if (fd >= 0) close(fd);
    }
    // Containers often have a /dev/shm of 64 MiB; a memfd counts against their memory instead.
    const int fd = memfd_create("weaveopt", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    int second = fd < 0 || fchmod(fd, 0600) != 0 ? errno : 0;
    if (second == 0) {
        prefer_node(fd, bytes, node);
        second = allocate(fd, bytes);
    }
    // No process can truncate it under the mappings of the others; a system that has no seals makes it all the same.
    if (second == 0) fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    if (second == 0) return fd;
    if (fd >= 0) close(fd);
    fail(in_dev_shm ? what + " in /dev/shm (" + std::strerror(error) + ") or as memfd" : what + " as memfd", second);
}

}  // namespace

Segment* Segment::create(std::size_t data_bytes, uint64_t cookie, uint32_t first_epoch, int32_t num_segments,
                         const std::string& root, bool in_dev_shm, int32_t node) {
    if (data_bytes > static_cast<std::size_t>(kMostBytes))
        throw std::invalid_argument("cannot reserve " + std::to_string(data_bytes) + " bytes of shared memory");
    const std::size_t bytes = kSegmentHeaderBytes + data_bytes;
    int fd = make_file(bytes, std::max(num_segments, 1), root, in_dev_shm, node);
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        int error = errno;
        close(fd);
        fail("cannot map " + std::to_string(bytes) + " bytes of shared memory", error);
    }
    std::memset(base, 0, bytes);  // the owner touches first: the pages are at its memory node
    auto* header = static_cast<SegmentHeader*>(base);
    header->cookie = cookie;
    header->data_bytes = data_bytes;
    header->pid = getpid();
    header->pid_namespace = pid_namespace();
    header->mark = process_mark(header->pid).value_or(ProcessMark{});
    store_relaxed(header->ready, first_epoch);
    store_relaxed(header->rows, first_epoch);
    header->magic = kMagic;
    auto* segment = new Segment(base, data_bytes, fd);
    segment->mark(State::kLive);
    return segment;
}

Segment* Segment::open(int32_t pid, int32_t fd, uint64_t cookie, std::size_t data_bytes) {
    if (data_bytes > static_cast<std::size_t>(kMostBytes))
        throw std::invalid_argument("no segment has " + std::to_string(data_bytes) + " bytes");
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (own < 0) fail("cannot open " + path, errno);
    const std::size_t bytes = kSegmentHeaderBytes + data_bytes;
    struct stat info{};
    if (fstat(own, &info) != 0 || static_cast<std::size_t>(info.st_size) != bytes) {
        close(own);
        throw std::runtime_error(path + ": has " + std::to_string(info.st_size) + " bytes, expected " +
                                 std::to_string(bytes));
    }
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, own, 0);
    int error = errno;
    close(own);
    if (base == MAP_FAILED) fail("cannot map " + path, error);
    auto* header = static_cast<SegmentHeader*>(base);
    if (header->magic != kMagic || header->cookie != cookie || header->pid != pid) {
        munmap(base, bytes);
        throw std::runtime_error(path + ": is not the segment that its owner announced");
    }
    return new Segment(base, data_bytes, -1);
}

Segment::~Segment() {
    close_fd();
    munmap(base_, kSegmentHeaderBytes + data_bytes_);
}

void Segment::mark(State state) {
    if (getpid() == maker_) header()->state.store(static_cast<uint32_t>(state), std::memory_order_release);
}

void Segment::close_fd() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
}

Group::Group(std::vector<Segment*> segments, int32_t rank, int32_t num_processes, uint32_t first_epoch)
    : segments_(std::move(segments)), rank_(rank), epoch_(first_epoch), maker_(getpid()) {
    const uint64_t own_namespace = segments_[rank]->header()->pid_namespace;
    for (const Segment* segment : segments_) {
        const SegmentHeader& header = *segment->header();
        const bool is_known = own_namespace != 0 && header.pid_namespace == own_namespace && header.mark.is_known();
        processes_.push_back(is_known ? Process(header.pid, header.mark) : Process());
    }
    cpu_set_t cores;
    CPU_ZERO(&cores);
    const int num_cores = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    // With a core for every rank, poll for longer than waking a sleeper takes (an idle virtual core: 100 us). With
    // less, each rank finds the other asleep, wakes it, falls asleep itself meanwhile, and every call costs a wake-up.
    // Yield after a while, in case the scheduler has put both ranks on one core. Where ranks outnumber cores, spinning
    // would only keep the peer from running.
    spin_policy_ = num_processes <= num_cores ? SpinPolicy{50, 450, 0} : SpinPolicy{0, 0, 4};
}

// A peer without which this call cannot end: it gave up, or ended before it had done its part of the call. `peer` comes
// first. Code kOk if there is none.
Status Group::lost_peer(int32_t peer) const {
    Status status;
    for (int32_t step = 0; step < world(); ++step) {
        const int32_t other = (peer + step) % world();
        if (other == rank_) continue;
        const SegmentHeader& header = *segments_[other]->header();
        const auto state = static_cast<State>(header.state.load(std::memory_order_acquire));
        if (state == State::kFailed)
            status.code = Code::kPeerFailed;
        else if (state == State::kClosed || processes_[other].has_ended())
            status.code = Code::kPeerExited;
        else
            continue;
        // Loaded after its state: what it did, it had done before. A peer that gave up in a later call finished this
        // one; one that gave up in this call will not begin another.
        const uint32_t ready = header.ready.load(std::memory_order_acquire);
        const uint32_t rows = header.rows.load(std::memory_order_acquire);
        const bool is_through = status.code == Code::kPeerFailed ? reached(ready, epoch_ + 1)
                                                                 : reached(ready, epoch_) && reached(rows, epoch_);
        if (!is_through) {
            status.peer = other;
            return status;
        }
    }
    return {};
}

uintptr_t Group::this_thread() {
    static thread_local char mark;
    return reinterpret_cast<uintptr_t>(&mark);
}

bool Group::is_interrupted() {
    runs_handlers_ = true;
    const bool raised = signal_raised();
    runs_handlers_ = false;
    return raised;
}

void Group::abandon() {
    if (!is_held() || runs_handlers_) return;
    if (status_.ok()) {
        Status status;
        status.code = Code::kAbandoned;
        status.peer = rank_;
        status.slot = "call";
        status.expected = status.seen = epoch_;
        poison(status);
    }
    leave();
}

Status Group::wait(Word word, const char* slot, int32_t peer, double timeout_s) {
    SegmentHeader& header = *segments_[peer]->header();
    std::atomic<uint32_t>& awaited = header.*word;
    if (spins_until(awaited, epoch_, spin_policy_)) {
        std::atomic_thread_fence(std::memory_order_acquire);
        return {};
    }
    const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
    bool was_lost = false;
    auto asked = Clock::now();
    for (;;) {
        header.num_waiters.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t seen = awaited.load(std::memory_order_seq_cst);
        const bool has_signal = !reached(seen, epoch_) && futex_wait(awaited, seen, kSliceNs);
        header.num_waiters.fetch_sub(1, std::memory_order_relaxed);
        if (reached(awaited.load(std::memory_order_acquire), epoch_)) return {};
        const auto now = Clock::now();
        bool is_interrupted = false;
        if (has_signal || now - asked >= kSignalSlice) {
            is_interrupted = this->is_interrupted();
            asked = now;
        }
        const bool is_late = now >= deadline;
        Status status = is_interrupted ? Status{} : lost_peer(peer);
        const bool is_lost = !status.ok();
        // Not at the first look: what is not there at the second one either is gone.
        if (!(is_lost && was_lost) && !is_late && !is_interrupted) {
            was_lost = is_lost;
            continue;
        }
        if (!is_lost) {
            status.code = is_interrupted ? Code::kInterrupted : Code::kTimeout;
            status.peer = peer;
        }
        // The peer may have signalled meanwhile, as its last act. What a handler raised is raised all the same.
        if (!is_interrupted && reached(awaited.load(std::memory_order_acquire), epoch_)) return {};
        status.slot = slot;
        status.expected = epoch_;
        status.seen = (segments_[status.peer]->header()->*word).load(std::memory_order_acquire);
        return status;
    }
}

Status Group::enter() {
    if (getpid() != maker_) return Status{Code::kForked};
    uintptr_t unowned = 0;
    if (!holder_.compare_exchange_strong(unowned, this_thread(), std::memory_order_acquire)) return Status{Code::kBusy};
    if (status_.ok()) return {};
    Status status = status_;
    status.code = Code::kPoisoned;
    return status;
}

Status Group::enter(const Layout& asked, uint64_t tag, double timeout_s) {
    const Status entered = enter();
    if (!entered.ok()) return entered;
    Layout layout = asked;
    if (layout.output_offset < 0) layout.output_offset = layout_.output_offset;
    if (layout == layout_ || layout_.partial_offset < 0) {
        layout_ = layout;
        return {};
    }
    signal_ready(tag);
    store_rows_relaxed();
    const Status status = wait_all_ready(tag, timeout_s);
    if (status.ok()) layout_ = layout;
    return status;
}

void Group::signal_ready(uint64_t tag) {
    ++epoch_;
    SegmentHeader& own = *segments_[rank_]->header();
    // By parity: a peer reads the tag of this epoch before it signals the next, and we write this place again only
    // after that signal.
    own.tag[epoch_ & 1].store(tag, std::memory_order_relaxed);
    signal(own.ready, epoch_, own.num_waiters);
}

void Group::signal_rows() {
    SegmentHeader& own = *segments_[rank_]->header();
    signal(own.rows, epoch_, own.num_waiters);
}

void Group::store_rows_relaxed() {
    store_relaxed(segments_[rank_]->header()->rows, epoch_);
}

Status Group::wait_ready(int32_t peer, uint64_t tag, double timeout_s) {
    Status status = wait(&SegmentHeader::ready, "ready", peer, timeout_s);
    status.own_tag = tag;
    // A peer that gave up in this call may have found that it runs something else.
    if (!status.ok() && status.code != Code::kPeerFailed) return status;
    const int32_t other = status.ok() ? peer : status.peer;
    const SegmentHeader& header = *segments_[other]->header();
    if (!status.ok() && header.ready.load(std::memory_order_acquire) != epoch_) return status;
    const uint64_t peer_tag = header.tag[epoch_ & 1].load(std::memory_order_relaxed);
    if (peer_tag == tag) return status;
    status.code = Code::kSiteMismatch;
    status.peer = other;
    status.slot = "ready";
    status.expected = status.seen = epoch_;
    status.peer_tag = peer_tag;
    return status;
}

Status Group::wait_all_ready(uint64_t tag, double timeout_s) {
    for (int32_t step = 1; step < world(); ++step) {
        const Status status = wait_ready((rank_ + step) % world(), tag, timeout_s);
        if (!status.ok()) return poison(status);
    }
    return {};
}

Status Group::wait_rows(int32_t peer, double timeout_s) {
    return wait(&SegmentHeader::rows, "rows", peer, timeout_s);
}

Status Group::poison(const Status& status) {
    status_ = status;
    segments_[rank_]->mark(State::kFailed);
    return status;
}

}  // namespace weave::fabric::shm
