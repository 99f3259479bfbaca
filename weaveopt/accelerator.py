"""`Accelerator(dynamo_plugin=WeavePlugin())`: accelerate compiles with weaveopt, which its own list cannot name."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.utils import TorchDynamoPlugin


@dataclass
class WeavePlugin(TorchDynamoPlugin):
    """accelerate's plugin with `backend="weave"`, the backend that `Accelerator.prepare` passes to `torch.compile`.

    Takes what `TorchDynamoPlugin` takes, but for `backend`. accelerate keeps backends in a closed enum and asks of the
    member only whether there is one, so `backend` reads as inductor, with which weaveopt ends.
    """

    def __post_init__(self) -> None:
        self.backend = "inductor"
        super().__post_init__()

    def to_kwargs(self) -> dict[str, object]:
        """The keywords of `torch.compile`."""
        return {**super().to_kwargs(), "backend": "weave"}
