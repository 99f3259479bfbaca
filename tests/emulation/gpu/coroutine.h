// Places between which the CPU switches, each on a stack of its own. `swapcontext` asks the kernel for the mask of
// signals at every switch, which takes longer than most threads run in between; so only the first switch is its kind.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>

namespace weave::emulated {

struct Place {
    ucontext_t first;
    jmp_buf last;
    bool has_begun = false;
};

// The first switch to it calls `text`, which never returns.
inline void make_place(Place& place, void* stack, size_t stack_bytes, void (*text)()) {
    getcontext(&place.first);
    place.first.uc_stack.ss_sp = stack;
    place.first.uc_stack.ss_size = stack_bytes;
    place.first.uc_link = nullptr;
    makecontext(&place.first, text, 0);
}

// Returns when another place switches to `from`.
inline void switch_places(Place& from, Place& to) {
    from.has_begun = true;
    if (_setjmp(from.last) != 0) return;
    if (to.has_begun) _longjmp(to.last, 1);
    to.has_begun = true;
    setcontext(&to.first);
}

}  // namespace weave::emulated
