// What a kernel's code has, by the code itself. A GPU's compute capability does not say it: a GPU of 9.0 may run what
// the driver made of PTX for compute_80, and text under `__CUDA_ARCH__ >= 900` was never part of that.
#pragma once

namespace weave::fabric {

// Whether text under `__CUDA_ARCH__ >= 900` is in the code: griddepcontrol, clusters, bulk copies, multimem. Without
// griddepcontrol.wait in it a kernel must not be launched programmatically: it would read what the kernel before it is
// still writing.
//
// Both as cudaFuncGetAttributes says them, ten times the major number plus the minor one: `ptx_version` of the virtual
// architecture that the text was compiled for, `binary_version` of the machine code, which the driver may have made.
constexpr bool has_sm90_code(int binary_version, int ptx_version) {
    return binary_version >= 90 && ptx_version >= 90;
}

}  // namespace weave::fabric
