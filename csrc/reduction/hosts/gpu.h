// The all-reduce with residual and norm between GPUs of several hosts: its entry for host code. Meaning
// and arguments: reduction/gpu.h.
#pragma once

#include "reduction/gpu.h"
#include "reduction/hosts/doubling.h"

namespace weave::hosts {

// Why `device` cannot run it for such rows; empty where it can.
const char* doubling_unsupported(DType dtype, int64_t hidden, int32_t device);

// Enqueues the call, one kernel. `call.group` is a group of this rank alone. Returns a CUDA error code; 0 is success.
// Runs nothing for 0 tokens.
int run_doubling(const gpu::Call& call, const Doubling& exchange, Transfer transfer, const gpu::Launch& launch);

// Its part for hosts of several ranks, in a source of its own.
int run_doubling_of_several(const gpu::Call& call, const Doubling& exchange, Transfer transfer,
                            const gpu::Launch& launch);

}  // namespace weave::hosts
