"""The compiled GPU kernels: their instructions, and that the host launches them accordingly.

SASS (nvcc 13.0): `griddepcontrol.wait` is `ACQBULK`. `cp.async.bulk.wait_group N` is `DEPBAR.LE SB0, N`, followed at
once by `CCTL.IVALL` unless it is of `.read`.
"""

from __future__ import annotations

import re

import pytest

from tests.emulation import binary
from tests.graphs.nonempty import some
from weaveopt import _native

ORDERED = ("9ll_packet", "4bulk", "6direct", "8dispatch", "7combine")
"""In the mangled names of kernels that call fabric::begin_call."""
HOPPER = "sm_90a"
HOPPER_KERNELS = (
    "10push_tiles", "7compute", "12grouped_gemm", "17wide_grouped_gemm", "19ranged_grouped_gemm",
    "24ranged_wide_grouped_gemm", "18gather_expert_rows",
)  # fmt: skip
"""In the mangled names of kernels that need Hopper's own instructions: of sources called `*.sm90a.cu`."""


@pytest.mark.parametrize(
    ("binary_version", "ptx_version", "expected"),
    [
        (80, 80, False),
        (89, 80, False),
        (90, 90, True),
        (103, 100, True),  # sm_100's code on a B300
        (120, 100, True),  # PTX of compute_100, made into code by the driver
        (90, 80, False),  # PTX of compute_80: it has no griddepcontrol.wait, though the GPU launches programmatically
        (120, 80, False),
    ],
)
def test_a_kernel_has_what_it_was_compiled_for(binary_version: int, ptx_version: int, expected: bool) -> None:
    assert _native.has_sm90_code(binary_version, ptx_version) is expected


@binary.needs_cuda_part
def test_the_extension_holds_the_architectures_that_it_names() -> None:
    archs, ptx = binary.named_architectures(), "+" in _native.CUDA_ARCHS
    expected = {f"sm_{arch}" for arch in archs} | ({HOPPER} if "90" in archs else set())
    assert expected == set(binary.architectures())
    held = set(re.findall(r"\.sm_(\d+[a-z]?)\.ptx", binary.dump("--list-ptx")))
    assert held == ({archs[-1]} if ptx else set())
    assert ptx or not archs[-1].isdigit(), "GPUs that come after the newest one need its PTX"


@binary.needs_cuda_part
def test_kernels_for_hopper_alone_are_compiled_for_nothing_else() -> None:
    if HOPPER not in binary.architectures():
        pytest.skip(f"built for {_native.CUDA_ARCHS}: nothing of it runs on Hopper alone")
    for architecture in some(binary.architectures()):
        names = binary.kernels(architecture)
        found = {part for part in HOPPER_KERNELS if any(part in name for name in names)}
        assert found == (set(HOPPER_KERNELS) if architecture == HOPPER else set()), architecture


def ordered(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if any(part in name for part in ORDERED)]


@binary.needs_cuda_part
def test_machine_code_waits_for_the_kernel_ahead_where_the_host_launches_it_early() -> None:
    for architecture in some(binary.for_all_chips()):
        names = ordered(binary.kernels(architecture))
        # One of each kernel: a whole architecture is a hundred.
        one_each = [next(name for name in names if part in name) for part in ORDERED]
        launched_early = _native.has_sm90_code(binary.number(architecture), binary.number(architecture))
        for name, text in some(binary.instructions(architecture, one_each).items()):
            assert bool(re.search(r"\bACQBULK\b", text)) is launched_early, f"{architecture}: {name}"


@binary.needs_cuda_part
def test_ptx_waits_for_the_kernel_ahead_where_the_host_launches_it_early() -> None:
    """Every kernel of it: a driver of a GPU to come makes its code of nothing else."""
    if "+PTX" not in _native.CUDA_ARCHS:
        pytest.skip(f"built for {_native.CUDA_ARCHS} alone, without PTX")
    text = binary.dump("--dump-ptx")
    (version,) = {int(found) for found in re.findall(r"^\.target sm_(\d+)", text, re.MULTILINE)}
    launched_early = _native.has_sm90_code(200, version)
    _, *parts = re.split(r"^(?:\.visible )?\.entry (\w+)", text, flags=re.MULTILINE)
    entries = dict(zip(parts[::2], parts[1::2], strict=True))
    assert set(ordered(tuple(entries))) >= set(ordered(binary.kernels(binary.for_all_chips()[-1])))
    for name in ordered(tuple(entries)):
        assert ("griddepcontrol.wait" in entries[name]) is launched_early, name


def early_flags(text: str) -> list[str]:
    """Counts of arrived data that a peer may see before the data; the kernel's counts, of several threads, are `RED`s.

    In the order of the text, in which what follows the end of a loop stands after it.
    """
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/ +(.+?) *;", text)
    arrived, found, flags = False, [], 0
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if re.search(r"UTMASTG|UBLKCP\.G\.S", line):
            arrived = False
        elif line.startswith("DEPBAR.LE SB0"):
            arrived = "CCTL.IVALL" in following and line.endswith("0x0")
        elif re.search(r"REDG?\.E\.ADD\.64\.STRONG\.SYS", line):
            flags += 1
            found += [] if arrived else [line]
    assert flags >= 2, "panels and rows are counted at peers"
    return found


@binary.needs_cuda_part
def test_flags_of_bulk_stores_follow_their_arrival() -> None:
    """Not the end of their reading, which says nothing of where the data go."""
    if HOPPER not in binary.architectures():
        pytest.skip(f"built for {_native.CUDA_ARCHS}: nothing of it runs on Hopper alone")
    names = [name for name in binary.kernels(HOPPER) if "10push_tiles" in name]
    assert len(names) == 4, names
    for name, text in binary.instructions(HOPPER, names).items():
        assert not early_flags(text), name
