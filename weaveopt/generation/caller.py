"""Arguments of `generate` that transformers does not pass on to a function in `custom_generate`.

transformers (5.17 to 5.23 at least) passes such a function no streamer, no `synced_gpus` and no assistant model, though
`_sample`, in whose place it is called, gets them. They are in the frame that calls us.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass

from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerationMixin


@dataclass(frozen=True)
class Withheld:
    streamer: BaseStreamer | None = None
    synced_gpus: bool | None = None
    assistant_model: object | None = None


def withheld() -> Withheld:
    """Read the arguments of the nearest call of `generate` on the stack; empty if there is none."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is code:
            names = frame.f_locals
            return Withheld(names.get("streamer"), names.get("synced_gpus"), names.get("assistant_model"))
    return Withheld()
