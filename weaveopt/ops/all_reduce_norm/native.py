"""A norm's form as native code takes it, on every fabric."""

from __future__ import annotations

from weaveopt.ops.all_reduce_norm.call import NormForm

try:
    from weaveopt import _native
except ImportError:  # built without it: no site is bound then
    _native = None  # type: ignore[assignment]


def native_form(form: NormForm | None) -> _native.NormSpec:
    """`form`, or the one of no norm."""
    out = _native.NormSpec()
    if form is not None:
        out.kind = getattr(_native.NormKind, form.kind.value)
        out.eps = form.eps
        out.weight_offset = form.weight_offset
        out.cast_before_weight = form.cast_before_weight
    return out
