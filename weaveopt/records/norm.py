"""Computation of a norm and quantization of its rows, as matchers find them and ops take them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NormKind(StrEnum):
    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True)
class NormSpec:
    """A norm over the last dimension, in fp32.

    `rms`: `x * rsqrt(mean(x^2) + eps)`; `layer`: `(x - mean(x)) * rsqrt(var(x) + eps)`; then `* (weight +
    weight_offset) + bias`, each where given.
    """

    kind: NormKind
    eps: float
    weight_offset: float = 0.0
    """1.0 for Gemma, which stores weights around zero."""
    cast_before_weight: bool = False
    """Round to the activation dtype before the weight is applied (Llama), not only after (Gemma)."""


class Quant(StrEnum):
    """Quantization of normalized rows to e4m3: `normalized / scale`, rounded to nearest and saturated at 448."""

    NONE = "none"
    STATIC = "static"
    """One scale, given in advance."""
    PER_TOKEN = "per_token"
    """Per-token scales `scale[t] = max(|normalized[t]|) / 448`, returned as a separate result."""
