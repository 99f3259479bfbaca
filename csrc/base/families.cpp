// The kernel families of the Python module: a new one is a line here for each of its two parts.
#include "base/bindings.h"

namespace weave {

void bind_all_gather_gemm(pybind11::module_& m);
void bind_all_reduce_norm(pybind11::module_& m);
void bind_gemm_comm(pybind11::module_& m);
void bind_gemm_reduce_scatter(pybind11::module_& m);
void bind_hierarchical_all_reduce(pybind11::module_& m);
void bind_moe_experts(pybind11::module_& m);
void bind_moe_sharded(pybind11::module_& m);

void bind_families(pybind11::module_& m) {
    bind_all_gather_gemm(m);
    bind_all_reduce_norm(m);
    bind_gemm_comm(m);
    bind_gemm_reduce_scatter(m);
    bind_hierarchical_all_reduce(m);
    bind_moe_experts(m);
    bind_moe_sharded(m);
}

#ifdef WEAVE_WITH_CUDA
void bind_all_gather_gemm_cuda(pybind11::module_& m);
void bind_all_reduce_norm_cuda(pybind11::module_& m);
void bind_gemm_cuda(pybind11::module_& m);
void bind_gemm_reduce_scatter_cuda(pybind11::module_& m);
void bind_moe_experts_cuda(pybind11::module_& m);
void bind_moe_sharded_cuda(pybind11::module_& m);

void bind_families_cuda(pybind11::module_& m) {
    bind_all_gather_gemm_cuda(m);
    bind_all_reduce_norm_cuda(m);
    bind_gemm_cuda(m);
    bind_gemm_reduce_scatter_cuda(m);
    bind_moe_experts_cuda(m);
    bind_moe_sharded_cuda(m);
}
#endif

}  // namespace weave
