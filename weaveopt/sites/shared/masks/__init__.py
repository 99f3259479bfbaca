"""Meaning of the attention masks in a graph: their boolean form, and the mask class that they are proven equal to."""

from __future__ import annotations

from weaveopt.sites.shared.masks.classes import Mask, MaskKind
from weaveopt.sites.shared.masks.reading import MaskCache, MaskReading, read_mask

__all__ = ["Mask", "MaskCache", "MaskKind", "MaskReading", "read_mask"]
