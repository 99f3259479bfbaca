#include "fabric/tcp.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "base/interrupts.h"
#include "base/sizes.h"

namespace weave::fabric::tcp {
namespace {

constexpr uint32_t kMagic = 0x77767470;  // "wvtp"
// Of one system call.
constexpr int kMaxPieces = 64;
// Where every rank has a core: longer than an idle core takes to wake up, shorter than a call between hosts.
constexpr int64_t kSpinUs = 50;

int64_t bytes_of(const std::vector<Part>& parts) {
    int64_t total = 0;
    for (const Part& part : parts)
        total += part.num_bytes;
    return total;
}

bool would_block(int error) {
    return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

}  // namespace

Group::Group(std::vector<int> sockets, int32_t rank, int32_t num_processes, uint32_t first_epoch)
    : peers_(sockets.size()), rank_(rank), epoch_(first_epoch) {
    for (std::size_t index = 0; index < sockets.size(); ++index)
        add(static_cast<int32_t>(index), sockets[index]);
    cpu_set_t cores;
    CPU_ZERO(&cores);
    const int num_cores = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    spin_us_ = num_processes <= num_cores ? kSpinUs : 0;
}

Group::~Group() {
    for (Peer& peer : peers_) {
        if (peer.socket >= 0) close(peer.socket);
    }
}

void Group::add(int32_t index, int socket) {
    peers_[index].socket = socket;
    if (socket < 0) return;
    const int on = 1;
    fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

Status Group::begin(uint64_t tag, double timeout_s) {
    if (getpid() != maker_) return Status{Code::kForked};
    if (busy_.test_and_set(std::memory_order_acquire)) return Status{Code::kBusy};
    if (!status_.ok()) {
        Status status = status_;
        status.code = Code::kPoisoned;
        return status;
    }
    ++epoch_;
    tag_ = tag;
    timeout_s_ = timeout_of(timeout_s);
    for (Peer& peer : peers_)
        peer.is_a_call_ahead = false;
    return {};
}

void Group::send(int32_t peer, uint32_t slot, std::vector<Part> parts) {
    const auto num_bytes = static_cast<uint64_t>(bytes_of(parts));
    peers_[peer].outgoing.push_back({{kMagic, epoch_, tag_, slot, 0, num_bytes}, std::move(parts)});
}

void Group::receive(int32_t peer, uint32_t slot, std::vector<Part> parts) {
    peers_[peer].expected.push_back({slot, std::move(parts)});
}

// Pieces of `message` that have not moved, at most `count`; the header's are those of `header`.
int Group::gather(Message& message, Header& header, iovec* out, int count) {
    int found = 0;
    int64_t skipped = message.moved;
    for (std::size_t part = message.part; part <= message.parts.size() && found < count; ++part) {
        char* data = part == 0 ? reinterpret_cast<char*>(&header) : static_cast<char*>(message.parts[part - 1].data);
        const int64_t num_bytes = part == 0 ? static_cast<int64_t>(sizeof header) : message.parts[part - 1].num_bytes;
        if (num_bytes > skipped) out[found++] = {data + skipped, static_cast<std::size_t>(num_bytes - skipped)};
        skipped = 0;
    }
    return found;
}

void Group::advance(Message& message, int64_t num_bytes) {
    message.moved += num_bytes;
    while (message.part <= message.parts.size()) {
        const int64_t whole =
            message.part == 0 ? static_cast<int64_t>(sizeof(Header)) : message.parts[message.part - 1].num_bytes;
        if (message.moved < whole) return;
        message.moved -= whole;
        ++message.part;
    }
}

Status Group::write_some(int32_t index, Moved* moved) {
    Peer& peer = peers_[index];
    while (!peer.outgoing.empty()) {
        Message& message = peer.outgoing.front();
        iovec pieces[kMaxPieces];
        msghdr sent{};
        sent.msg_iov = pieces;
        sent.msg_iovlen = gather(message, message.header, pieces, kMaxPieces);
        const ssize_t count = sendmsg(peer.socket, &sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count < 0) return would_block(errno) ? Status{} : lost(index, Code::kPeerExited);
        moved->bytes = true;
        advance(message, count);
        if (!is_complete(message)) return {};
        moved->message = true;
        peer.outgoing.pop_front();
    }
    return {};
}

Status Group::match(int32_t index) {
    Peer& peer = peers_[index];
    const Header& header = peer.incoming.header;
    Status status = lost(index, Code::kSiteMismatch);
    status.seen = header.epoch;
    status.peer_tag = header.tag;
    if (header.magic != kMagic) {
        status.code = Code::kPeerFailed;
        status.slot = "header";
        return status;
    }
    // A peer that began the next call has sent all of this one: nothing of it may be missing.
    if (header.epoch == epoch_ + 1 && peer.expected.empty()) {
        peer.is_a_call_ahead = true;
        return {};
    }
    if (header.epoch != epoch_ || header.tag != tag_) return status;
    const auto found = std::find_if(peer.expected.begin(), peer.expected.end(),
                                    [&](const Expected& each) { return each.slot == header.slot; });
    if (found == peer.expected.end() || static_cast<uint64_t>(bytes_of(found->parts)) != header.num_bytes) {
        status.slot = found == peer.expected.end() ? "unknown" : "size";
        return status;
    }
    peer.incoming.parts = std::move(found->parts);
    peer.expected.erase(found);
    peer.incoming.part = 1;
    peer.incoming.moved = 0;
    advance(peer.incoming, 0);
    return {};
}

Status Group::read_some(int32_t index, Moved* moved, const std::function<void(int32_t, uint32_t)>& arrived) {
    Peer& peer = peers_[index];
    // `incoming.part` is 0 as long as no message was matched to the header, which may be here already.
    for (;;) {
        Message& message = peer.incoming;
        if (peer.has_header && message.part == 0) {
            Status status = match(index);
            if (!status.ok() || peer.is_a_call_ahead) return status;
        }
        if (peer.has_header && is_complete(message)) {
            const uint32_t slot = message.header.slot;
            peer.incoming = {};
            peer.has_header = false;
            moved->message = true;
            arrived(index, slot);
            if (!peer.is_awaited()) return {};
            continue;
        }
        iovec pieces[kMaxPieces];
        int count = 1;
        if (peer.has_header)
            count = gather(message, message.header, pieces, kMaxPieces);
        else
            pieces[0] = {reinterpret_cast<char*>(&message.header) + message.moved,
                         sizeof(Header) - static_cast<std::size_t>(message.moved)};
        const ssize_t num_bytes = readv(peer.socket, pieces, count);
        if (num_bytes < 0) return would_block(errno) ? Status{} : lost(index, Code::kPeerExited);
        if (num_bytes == 0) return lost(index, Code::kPeerExited);
        moved->bytes = true;
        if (peer.has_header) {
            advance(message, num_bytes);
        } else {
            message.moved += num_bytes;
            peer.has_header = message.moved == static_cast<int64_t>(sizeof(Header));
        }
    }
}

Status Group::lost(int32_t index, Code code) const {
    Status status;
    status.code = code;
    status.peer = index;
    status.slot = "message";
    status.expected = epoch_;
    status.seen = epoch_ - 1;
    status.own_tag = tag_;
    return status;
}

// Whoever waits for a rank that does nothing has sent more of this call than that one.
int32_t Group::most_awaited() const {
    const auto pending = [](const Peer& peer) { return std::make_pair(peer.num_awaited(), peer.outgoing.size()); };
    const auto most = std::max_element(peers_.begin(), peers_.end(),
                                       [&](const Peer& a, const Peer& b) { return pending(a) < pending(b); });
    return static_cast<int32_t>(most - peers_.begin());
}

bool Group::is_done() const {
    return std::all_of(peers_.begin(), peers_.end(),
                       [](const Peer& peer) { return peer.outgoing.empty() && !peer.is_awaited(); });
}

// Until a connection has room or news, it is `deadline`, or signals are to be asked for.
void Group::sleep(Clock::time_point deadline) const {
    std::vector<pollfd> waits;
    for (const Peer& peer : peers_) {
        if (peer.socket < 0) continue;
        const short events =
            static_cast<short>((peer.is_awaited() ? POLLIN : 0) | (peer.outgoing.empty() ? 0 : POLLOUT));
        if (events == 0) continue;
        waits.push_back({peer.socket, events, 0});
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    poll(waits.data(), waits.size(), static_cast<int>(std::clamp(left, {}, kSignalSlice).count()));
}

Status Group::progress(const std::function<void(int32_t, uint32_t)>& arrived) {
    const auto patience = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s_));
    auto idle_since = Clock::now();
    auto deadline = idle_since + patience, asked = idle_since;
    for (;;) {
        Moved moved;
        for (int32_t step = 1; step < world(); ++step) {
            const int32_t index = (rank_ + step) % world();
            Peer& peer = peers_[index];
            Status status = write_some(index, &moved);
            if (status.ok() && peer.is_awaited()) status = read_some(index, &moved, arrived);
            if (!status.ok()) return poison(status);
        }
        if (is_done()) return {};
        const auto now = Clock::now();
        // Single bytes buy no time: a peer that sends them for ever is not waited for any longer than a silent one.
        if (moved.message) deadline = now + patience;
        if (now >= deadline) return poison(lost(most_awaited(), Code::kTimeout));
        if (now - asked >= kSignalSlice) {
            if (signal_raised()) return poison(lost(most_awaited(), Code::kInterrupted));
            asked = now;
        }
        if (moved.bytes) {
            idle_since = now;
            continue;
        }
        if (now - idle_since < std::chrono::microseconds(spin_us_)) continue;
        sleep(deadline);
        idle_since = Clock::now();
    }
}

Status Group::poison(const Status& status) {
    if (status_.ok()) status_ = status;
    for (Peer& peer : peers_) {
        if (peer.socket >= 0) shutdown(peer.socket, SHUT_RDWR);
        peer.outgoing.clear();
        peer.expected.clear();
    }
    return status;
}

}  // namespace weave::fabric::tcp
