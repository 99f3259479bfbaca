// Whether another process of this host is still there. The one place that asks the system.
#pragma once

#include <cstdint>
#include <optional>

namespace weave {

// When the process started, in ticks since boot, which tells it from a later one with the same number. Nothing where
// there is no such process, only its remains (a zombie), or nobody can say.
std::optional<uint64_t> process_start(int32_t pid);

// Whether the process that started at `start` is gone, a zombie included. Only if the system says so: where asking
// fails for another reason (no descriptor left), it counts as alive. Knows only within one pid namespace.
bool process_has_ended(int32_t pid, uint64_t start);

}  // namespace weave
