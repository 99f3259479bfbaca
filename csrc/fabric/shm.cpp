#include "fabric/shm.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>

#include "base/process.h"

namespace weave::fabric::shm {
namespace {

constexpr uint64_t kMagic = 0x77656176656f7074;  // "weaveopt"
// A sleeping wait checks the peer's process this often: a dead peer is noticed within this time.
constexpr long kSliceNs = 20'000'000;

using Clock = std::chrono::steady_clock;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Shared between processes, so not FUTEX_PRIVATE.
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, long ns) {
    timespec time{0, ns};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &time, nullptr, 0);
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

uint64_t pid_namespace() {
    struct stat info{};
    return stat("/proc/self/ns/pid", &info) == 0 ? static_cast<uint64_t>(info.st_ino) : 0;
}

// Only knows within one pid namespace; elsewhere a dead peer costs the whole timeout.
bool exited(const SegmentHeader& header, uint64_t own_namespace) {
    if (header.pid_namespace != own_namespace || header.start_time == 0) return false;
    return process_has_ended(header.pid, header.start_time);
}

[[noreturn]] void fail(const std::string& what, int error) {
    throw std::runtime_error(what + ": " + std::strerror(error));
}

// Bytes that the host could still give; 0 if it does not say.
uint64_t available_bytes() {
    std::FILE* file = std::fopen("/proc/meminfo", "re");
    if (file == nullptr) return 0;
    char line[128];
    unsigned long long kib = 0;
    while (std::fgets(line, sizeof line, file) != nullptr) {
        if (std::sscanf(line, "MemAvailable: %llu kB", &kib) == 1) break;
    }
    std::fclose(file);
    return kib * 1024;
}

// Sizes `fd` with memory that is really there: a full /dev/shm must be an error now, not a SIGBUS at the first store.
int allocate(int fd, std::size_t bytes) {
    if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) return errno;
    return posix_fallocate(fd, 0, static_cast<off_t>(bytes));
}

// A file in memory, of `bytes`, that has no name.
int make_file(std::size_t bytes) {
    const std::string what = "cannot reserve " + std::to_string(bytes) + " bytes of shared memory";
    // memfd has no limit of its own: past the host's memory it would call the OOM killer instead of failing.
    const uint64_t available = available_bytes();
    if (available != 0 && bytes > available) {
        throw std::runtime_error(what + ": the host has " + std::to_string(available) + " available");
    }
    std::random_device random;
    char name[64];
    std::snprintf(name, sizeof name, "/weaveopt-%08x%08x%08x", random(), random(), random());
    int error = 0;
    int fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
    if (fd >= 0) {
        shm_unlink(name);
        error = allocate(fd, bytes);
        if (error == 0) return fd;
        close(fd);
    } else {
        error = errno;
    }
    // Containers often have a /dev/shm of 64 MiB; a memfd counts against their memory instead.
    fd = memfd_create("weaveopt", MFD_CLOEXEC);
    int second = fd < 0 || fchmod(fd, 0600) != 0 ? errno : allocate(fd, bytes);
    if (second == 0) return fd;
    if (fd >= 0) close(fd);
    fail(what + " in /dev/shm (" + std::strerror(error) + ") or as memfd", second);
}

}  // namespace

Segment* Segment::create(std::size_t data_bytes, uint64_t cookie, uint32_t first_epoch) {
    const std::size_t bytes = kSegmentHeaderBytes + data_bytes;
    int fd = make_file(bytes);
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        int error = errno;
        close(fd);
        fail("cannot map " + std::to_string(bytes) + " bytes of shared memory", error);
    }
    std::memset(base, 0, bytes);  // the owner touches first: the pages lie at its memory node
    auto* header = static_cast<SegmentHeader*>(base);
    header->cookie = cookie;
    header->data_bytes = data_bytes;
    header->pid = getpid();
    header->pid_namespace = pid_namespace();
    header->start_time = process_start(header->pid).value_or(0);
    store_relaxed(header->ready, first_epoch);
    store_relaxed(header->rows, first_epoch);
    header->magic = kMagic;
    auto* segment = new Segment(base, data_bytes, fd);
    segment->mark(State::kLive);
    return segment;
}

Segment* Segment::open(int32_t pid, int32_t fd, uint64_t cookie, std::size_t data_bytes) {
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

void Segment::close_fd() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
}

Group::Group(std::vector<Segment*> segments, int32_t rank, int32_t num_processes, uint32_t first_epoch)
    : segments_(std::move(segments)), rank_(rank), epoch_(first_epoch) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    const int num_cores = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    // With a core for every rank, poll for longer than waking a sleeper takes (an idle virtual core: 100 us). With
    // less, each rank finds the other asleep, wakes it, falls asleep itself meanwhile, and every call costs a wake-up.
    // Yield after a while, in case the scheduler has put both ranks on one core. Where ranks outnumber cores, spinning
    // would only keep the peer from running.
    spin_policy_ = num_processes <= num_cores ? SpinPolicy{50, 450, 0} : SpinPolicy{0, 0, 4};
}

Status Group::wait(std::atomic<uint32_t>& word, const char* slot, int32_t peer, double timeout_s) const {
    if (spins_until(word, epoch_, spin_policy_)) {
        std::atomic_thread_fence(std::memory_order_acquire);
        return {};
    }
    SegmentHeader& header = *segments_[peer]->header();
    const uint64_t own_namespace = segments_[rank_]->header()->pid_namespace;
    const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
    for (;;) {
        header.num_waiters.fetch_add(1, std::memory_order_seq_cst);
        uint32_t seen = word.load(std::memory_order_seq_cst);
        if (!reached(seen, epoch_)) futex_wait(word, seen, kSliceNs);
        header.num_waiters.fetch_sub(1, std::memory_order_relaxed);
        seen = word.load(std::memory_order_acquire);
        if (reached(seen, epoch_)) return {};
        Status status;
        status.peer = peer;
        status.slot = slot;
        status.expected = epoch_;
        const auto state = static_cast<State>(header.state.load(std::memory_order_acquire));
        const auto now = Clock::now();
        if (state == State::kFailed) {
            status.code = Code::kPeerFailed;
        } else if (state == State::kClosed || exited(header, own_namespace)) {
            status.code = Code::kPeerExited;
        } else if (now >= deadline) {
            status.code = Code::kTimeout;
        } else {
            continue;
        }
        // The peer may have signalled since `seen` was loaded, as its last act.
        status.seen = word.load(std::memory_order_acquire);
        if (reached(status.seen, epoch_)) return {};
        return status;
    }
}

Status Group::enter(const Layout& layout, uint64_t tag, double timeout_s) {
    if (busy_.test_and_set(std::memory_order_acquire)) return Status{Code::kBusy};
    if (!status_.ok()) {
        Status status = status_;
        status.code = Code::kPoisoned;
        return status;
    }
    if (layout == layout_ || layout_.partial_offset < 0) {
        layout_ = layout;
        return {};
    }
    signal_ready(tag);
    store_rows_relaxed();
    for (int32_t step = 1; step < world(); ++step) {
        Status status = wait_ready((rank_ + step) % world(), tag, timeout_s);
        if (!status.ok()) return poison(status);
    }
    layout_ = layout;
    return {};
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
    SegmentHeader& header = *segments_[peer]->header();
    Status status = wait(header.ready, "ready", peer, timeout_s);
    status.own_tag = tag;
    if (!status.ok()) return status;
    const uint64_t peer_tag = header.tag[epoch_ & 1].load(std::memory_order_relaxed);
    if (peer_tag == tag) return status;
    status.code = Code::kSiteMismatch;
    status.peer = peer;
    status.slot = "ready";
    status.expected = status.seen = epoch_;
    status.peer_tag = peer_tag;
    return status;
}

Status Group::wait_rows(int32_t peer, double timeout_s) {
    return wait(segments_[peer]->header()->rows, "rows", peer, timeout_s);
}

Status Group::poison(const Status& status) {
    status_ = status;
    segments_[rank_]->mark(State::kFailed);
    return status;
}

}  // namespace weave::fabric::shm
