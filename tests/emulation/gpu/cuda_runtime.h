// Stands in for CUDA's header: what launches ask.
#pragma once

constexpr int cudaSuccess = 0;
constexpr int cudaErrorInvalidValue = 1;
constexpr int cudaDevAttrMultiProcessorCount = 16;

int cudaGetDevice(int* device);
int cudaDeviceGetAttribute(int* value, int attribute, int device);
