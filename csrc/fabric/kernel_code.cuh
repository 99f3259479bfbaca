// Asks the CUDA runtime what the code of a kernel has: once for each kernel and device, as it takes longer than a
// launch.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "fabric/code_version.h"

namespace weave::fabric {

enum class KernelCode : int8_t {
    kUnknown = 0,
    kMissing,  // neither machine code nor PTX that this GPU can run
    kBeforeSm90,
    kSm90,  // see has_sm90_code()
};

// Leaves `device`, which need not be the current one, as it found it.
inline KernelCode ask_for_code(const void* kernel, int device) {
    int current = device;
    cudaGetDevice(&current);
    if (current != device && cudaSetDevice(device) != cudaSuccess) return KernelCode::kMissing;
    cudaFuncAttributes found{};
    const cudaError_t error = cudaFuncGetAttributes(&found, kernel);
    if (error != cudaSuccess) cudaGetLastError();  // or the next launch's check would find it
    if (current != device) cudaSetDevice(current);
    if (error != cudaSuccess) return KernelCode::kMissing;
    return has_sm90_code(found.binaryVersion, found.ptxVersion) ? KernelCode::kSm90 : KernelCode::kBeforeSm90;
}

template <auto kKernel>
KernelCode code_of(int device) {
    constexpr int kMaxDevices = 64;
    static std::atomic<KernelCode> known[kMaxDevices];
    if (device < 0 || device >= kMaxDevices) return ask_for_code(reinterpret_cast<const void*>(kKernel), device);
    KernelCode code = known[device].load(std::memory_order_relaxed);
    if (code == KernelCode::kUnknown) {
        code = ask_for_code(reinterpret_cast<const void*>(kKernel), device);
        // An error may pass; the launch says which one it was.
        if (code != KernelCode::kMissing) known[device].store(code, std::memory_order_relaxed);
    }
    return code;
}

}  // namespace weave::fabric
