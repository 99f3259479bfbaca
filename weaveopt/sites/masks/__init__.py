"""What an attention mask in a graph means: its boolean form, and the class of masks that it is proven equal to."""

from __future__ import annotations

from weaveopt.sites.masks.classes import Mask, MaskKind
from weaveopt.sites.masks.reading import MaskCache, MaskReading, read_mask

__all__ = ["Mask", "MaskCache", "MaskKind", "MaskReading", "read_mask"]
