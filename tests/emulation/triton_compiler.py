"""Triton's compiler without a GPU: kernels are made for a compute capability, and not launched.

For a process of its own: it takes the place of Triton's driver.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class Compiled:
    """Facts of a compiled kernel."""

    kernel: str
    shared_bytes: int
    wgmma: int
    """Instructions of warp groups on tensor cores; `mma` counts those of warps."""
    mma: int
    async_bytes: tuple[int, ...]
    """Sizes of asynchronous copies to shared memory, each once."""
    waits_for_grid: bool
    store_bytes: tuple[int, ...]
    """Sizes of stores to memory, each once."""

    def record(self) -> dict[str, object]:
        return asdict(self)


_STORE = r"st\.global(?:\.v(\d+))?\.b(\d+)"


@dataclass(frozen=True)
class Driver:
    """Driver of an absent GPU, with the methods that the compiler calls."""

    capability: int = 90

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def only_compile(kernels: dict[str, object], tell: Callable[[Compiled], None], capability: int = 90) -> None:
    """From now on a launch of one of these kernels compiles it, and reports the result."""
    from triton.runtime.driver import driver

    driver.set_active(Driver(capability))
    for name, kernel in kernels.items():
        kernel.run = _compiling(name, kernel.run, tell)  # type: ignore[attr-defined]


def _compiling(name: str, run: Callable[..., object], tell: Callable[[Compiled], None]) -> Callable[..., object]:
    def compile_only(*arguments: object, warmup: bool, **options: object) -> object:
        made = run(*arguments, warmup=True, **options)
        ptx = made.asm["ptx"]  # type: ignore[attr-defined]
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x[0-9a-f]+|\d+)[,;]", ptx)
        tell(
            Compiled(
                name, made.metadata.shared, ptx.count("wgmma.mma_async"), ptx.count("mma.sync"),  # type: ignore[attr-defined]
                tuple(sorted({int(size, 0) for size in copies})), "griddepcontrol.wait" in ptx,
                tuple(sorted({int(many or 1) * int(bits) // 8 for many, bits in re.findall(_STORE, ptx)})),
            )
        )  # fmt: skip
        return made

    return compile_only
