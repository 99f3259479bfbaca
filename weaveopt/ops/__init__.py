"""`torch.ops.weave.*`: importing this package registers every op. One module per family."""

from __future__ import annotations

from weaveopt.ops import all_reduce_norm as all_reduce_norm
