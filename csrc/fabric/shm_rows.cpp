#include "fabric/shm_rows.h"

#include <stdexcept>
#include <string>

#include "base/sizes.h"

namespace weave::fabric::shm {

RowsCall::RowsCall(Group& group, const RowsSite& site, int64_t data_bytes) : group_(group), site_(site) {
    // A buffer outside the segment would be a wild store later.
    expect_inside("partial", site.partial_offset, product_of("partial", {2, site.partial_bytes}), data_bytes);
    timeout_of(site.timeout_s);
}

Status RowsCall::enter(int64_t tokens) {
    const Layout layout{site_.partial_offset, site_.partial_bytes, -1};
    const Status status = group_.enter(layout, tag(site_.tag, tokens), site_.timeout_s);
    const bool entered = status.code != Code::kBusy && status.code != Code::kForked;
    if (!status.ok() && entered) group_.leave();
    return status;
}

void RowsCall::signal(int64_t tokens) {
    group_.signal_ready(tag(site_.tag, tokens));
    group_.store_rows_relaxed();
}

Status RowsCall::wait(int32_t peer, int64_t tokens) {
    const Status status = group_.wait_ready(peer, tag(site_.tag, tokens), site_.timeout_s);
    return status.ok() ? status : group_.poison(status);
}

}  // namespace weave::fabric::shm
