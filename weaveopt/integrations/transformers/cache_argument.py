"""The name of a model's cache in transformers: `cache` from 5.24 on, `past_key_values` in 5.23.

It is the name of the argument of every `forward`, of the input that `generate` prepares, and of the field of outputs.
5.24 still takes the old name from callers, but uses the new one in what it passes to `custom_generate`.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Cache


@functools.cache
def cache_argument() -> str:
    """The name in the transformers that is installed. Imports transformers."""
    from transformers.generation.utils import GenerationMixin

    known = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in known else "past_key_values"


def with_cache(cache: Cache) -> dict[str, Cache]:
    """Keyword arguments that pass `cache` to a model, or put it in an output: `model(ids, **with_cache(cache))`."""
    return {cache_argument(): cache}
