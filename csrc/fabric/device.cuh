// Calls of the CUDA runtime that are made for one device, with their errors as exceptions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace weave::fabric {

inline void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Makes `device` the current one while it lives.
class DeviceGuard {
  public:
    explicit DeviceGuard(int32_t device) {
        cudaGetDevice(&before_);
        check(cudaSetDevice(device), "cudaSetDevice");
    }
    ~DeviceGuard() { cudaSetDevice(before_); }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    int before_ = 0;
};

}  // namespace weave::fabric
