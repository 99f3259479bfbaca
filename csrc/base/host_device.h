// Marks functions that both the host and kernels call, in headers that a C++ compiler reads too.
#pragma once

#ifdef __CUDACC__
#define WEAVE_HOST_DEVICE __host__ __device__
#else
#define WEAVE_HOST_DEVICE
#endif
