"""Multicast cannot run on the available machines: its instructions are looked for in the binary, for every
architecture.

What PTX becomes (nvcc 13.0): `multimem.ld_reduce` an `LDGMC`, whose name says the type and whether the switch sums in
fp32 (`F32ADD` on sm_90, `HPADD` on sm_100; without `.acc::f32` it is `ADD`); `multimem.st` a plain store of system
scope, as the address alone says that all ranks get it. The kernels' own stores to peers are weak, with no scope.
"""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.emulation import binary
from tests.graphs.nonempty import some
from weaveopt import _native

pytestmark = binary.needs_cuda_part

MULTICAST, PEER = "8MultimemE", "4PeerE"
"""In the mangled names of the kernels `direct<Multimem, ...>` and `direct<Peer, ...>`."""
FIRST = 90
"""Architecture that has multicast instructions."""
REDUCING_LOAD = {
    "13__nv_bfloat16": r"LDGMC\.E\.(F32ADD|HPADD)\.BF16x8\b",
    "6__half": r"LDGMC\.E\.(F32ADD|HPADD)\.F16x8\b",
    "f": r"LDGMC\.E\.ADD\.F32x4\b",
}
"""Instruction by the element type in a mangled name: four words at once, summed in fp32."""
ANY_REDUCING_LOAD = r"\bLDGMC\b"
BROADCAST_STORE = r"\bSTG\.E\.128\.STRONG\.SYS\b"


@cache
def instructions(architecture: str, policy: str) -> dict[str, str]:
    """Mangled name -> text of every kernel of a policy."""
    wanted = [name for name in binary.kernels(architecture) if policy in name]
    assert wanted, f"{architecture}: no kernel has {policy} in its name"
    return binary.instructions(architecture, wanted)


def has_multicast(architecture: str) -> bool:
    return binary.number(architecture) >= FIRST


def element_type(function: str) -> str:
    found = re.search(rf"(?:{MULTICAST}|{PEER})({'|'.join(REDUCING_LOAD)})Li", function)
    assert found, f"no element type in {function}"
    return found[1]


def test_multicast_kernels_reduce_and_broadcast_in_the_switch() -> None:
    found = [*filter(has_multicast, binary.for_all_chips())]
    if not found:
        pytest.skip(f"built for {_native.CUDA_ARCHS} alone, which has no multicast")
    for architecture in some(found):
        kernels = instructions(architecture, MULTICAST)
        assert {element_type(name) for name in kernels} == set(REDUCING_LOAD), f"{architecture}: a type is missing"
        for name, text in kernels.items():
            where = f"{architecture}: {name}"
            loads = re.findall(ANY_REDUCING_LOAD, text)
            expected = [*re.finditer(REDUCING_LOAD[element_type(name)], text)]
            assert loads and len(loads) == len(expected), f"{where}: {len(expected)} of {len(loads)} loads fit"
            assert re.search(BROADCAST_STORE, text), f"{where}: no broadcasting store"


def test_peer_kernels_have_no_multicast() -> None:
    for architecture in some(binary.for_all_chips()):
        kernels = instructions(architecture, PEER)
        assert {element_type(name) for name in kernels} == set(REDUCING_LOAD), f"{architecture}: a type is missing"
        for name, text in kernels.items():
            found = re.search(f"{ANY_REDUCING_LOAD}|{BROADCAST_STORE}", text)
            assert found is None, f"{architecture}: {name} holds {found[0]}"


def test_older_architectures_have_no_multicast() -> None:
    """There the kernels are empty shells, and the launch refuses."""
    found = [each for each in binary.for_all_chips() if not has_multicast(each)]
    if not found:
        pytest.skip(f"built for {_native.CUDA_ARCHS} alone, which has multicast")
    for architecture in some(found):
        for name, text in some(instructions(architecture, MULTICAST).items()):
            assert not re.search(f"{ANY_REDUCING_LOAD}|{BROADCAST_STORE}", text), f"{architecture}: {name}"
