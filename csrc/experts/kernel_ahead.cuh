// Programmatic dependent launch, of Hopper on: a kernel begins while the one ahead of it in the stream still runs, and
// waits on the device. Code for older GPUs has neither instruction, and is not launched so.
#pragma once

namespace weave::moe_experts {

// Until the kernel ahead has ended and what it wrote can be read.
__device__ __forceinline__ void await_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace weave::moe_experts
