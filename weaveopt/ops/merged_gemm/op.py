"""`weave::merged_linear`: linear layers of one input.

    def merged_linear(x, weights, biases):
        return torch.cat([F.linear(x, weight, bias) for weight, bias in zip_longest(weights, biases)], dim=1)

Shapes: `x` [M, K]; `weights` one or more [N_i, K]; `biases` empty, or a [N_i] for each weight; all of one dtype. The
result is [M, sum of N_i], contiguous.

Where the weights are adjacent in memory (`adjacent.adjoin`), and the biases too, one GEMM of the library computes all
columns. Else one GEMM for each weight writes its columns. Which of the two runs is looked up in every call, so weights
may be replaced or moved at any time; a CUDA graph keeps what it captured. The two differ in rounding, as GEMMs of
different sizes do.

Raises `WeaveError` where shapes contradict one another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weaveopt.errors import WeaveError
from weaveopt.ops.merged_gemm.adjacent import joined, note_apart

Tensor = torch.Tensor


def merged_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """See the module's docstring."""
    with torch._C._AutoDispatchBelowAutograd():
        weight, bias = joined(weights) if weights else None, joined(biases) if biases else None
        fits = weight is not None and x.ndim == 2 and x.shape[1] == weight.shape[1] and (bias is None) is (not biases)
        if weight is not None and fits and (bias is None or bias.shape[0] == weight.shape[0]):
            return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
        out, end = _result(x, weights, biases), 0
        note_apart(weights if weight is None else biases)
        for index, each in enumerate(weights):
            begin, end = end, end + each.shape[0]
            part = out[:, begin:end]
            if biases:
                torch.addmm(biases[index], x, each.t(), out=part)
            else:
                torch.mm(x, each.t(), out=part)
    return out


def _result(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    if x.ndim != 2 or not weights or any(each.ndim != 2 or each.shape[1] != x.shape[1] for each in weights):
        shapes = [tuple(each.shape) for each in (x, *weights)]
        raise WeaveError(f"merged_linear: x is [M, K] and weights are [N, K], not {shapes}")
    if biases and [tuple(each.shape) for each in biases] != [(each.shape[0],) for each in weights]:
        shapes = [tuple(each.shape) for each in biases]
        raise WeaveError(f"merged_linear: biases are [N] of each weight's N, or none, not {shapes}")
    return x.new_empty(x.shape[0], sum(each.shape[0] for each in weights))


_library = torch.library.Library("weave", "FRAGMENT")
_library.define(
    "merged_linear(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
for _device in ("CPU", "CUDA"):
    _library.impl("merged_linear", merged_linear, _device)
torch.library.register_fake("weave::merged_linear", _result, lib=_library)
