// Signals whose Python handlers have yet to run, asked for by native code that waits: Python notes a signal, and runs
// its handler at the next step in Python, which a wait would put off until its timeout. No Python here: the module that
// is loaded says how to ask (base/bindings.cpp).
#pragma once

#include <atomic>
#include <chrono>

namespace weave {

// How often a wait asks. It takes Python's lock, so never while a wait still polls.
constexpr std::chrono::milliseconds kSignalSlice{50};

// Runs the handlers; true if one raised, as that of SIGINT does: the exception is set in this thread then.
using RunHandlers = bool (*)();
inline std::atomic<RunHandlers> run_handlers{nullptr};

// True if the handler of a signal raised, and the wait has to end. False at once on threads other than Python's main
// one.
inline bool signal_raised() {
    const RunHandlers run = run_handlers.load(std::memory_order_relaxed);
    return run != nullptr && run();
}

}  // namespace weave
