"""`torch.ops.weave.*`: importing this package registers every op. One folder a family."""

from __future__ import annotations

from weaveopt.ops.attention import library as _library_attention  # noqa: F401
from weaveopt.ops.attention import op as _masked_attention  # noqa: F401
from weaveopt.ops.attention import paged as _paged_attention  # noqa: F401
from weaveopt.ops.collective_wait import op as _collective_wait  # noqa: F401
from weaveopt.ops.experts import op as _moe_experts  # noqa: F401
from weaveopt.ops.experts.prefetch import op as _expert_prefetch  # noqa: F401
from weaveopt.ops.experts.sharded import op as _moe_sharded  # noqa: F401
from weaveopt.ops.gemm_comm.all_gather import op as _all_gather_gemm  # noqa: F401
from weaveopt.ops.gemm_comm.all_reduce import op as _gemm_all_reduce  # noqa: F401
from weaveopt.ops.gemm_comm.reduce_scatter import norm_op as _gemm_reduce_scatter_norm  # noqa: F401
from weaveopt.ops.gemm_comm.reduce_scatter import op as _gemm_reduce_scatter  # noqa: F401
from weaveopt.ops.merged_gemm import op as _merged_linear  # noqa: F401
from weaveopt.ops.reduction import begin_end as _all_reduce_norm_begin_end  # noqa: F401
from weaveopt.ops.reduction import op as _all_reduce_norm  # noqa: F401
