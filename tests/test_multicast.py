"""Multicast cannot run on the machines at hand: its instructions are looked for in the binary, for every architecture.

What PTX becomes (nvcc 13.0): `multimem.ld_reduce` an `LDGMC`, whose name says the type and whether the switch sums in
fp32 (`F32ADD` on sm_90, `HPADD` on sm_100; without `.acc::f32` it is `ADD`); `multimem.st` a plain store of system
scope, as the address alone says that all ranks get it. The kernels' own stores to peers are weak, with no scope.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from weaveopt import _native

pytestmark = pytest.mark.skipif(not _native.has_cuda, reason="built without CUDA")

TOOLS = ("cuobjdump", "nvdisasm")
INSTALL = f"pip install {' '.join(f'nvidia-cuda-{tool}' for tool in TOOLS)} (requirements.txt pins them), or CUDA_HOME="
MULTICAST, PEER = "8MultimemE", "4PeerE"
"""In the mangled names of the kernels `direct<Multimem, ...>` and `direct<Peer, ...>`."""
FIRST_MAJOR = 9
"""Compute capability that has multicast instructions."""
REDUCING_LOAD = {
    "13__nv_bfloat16": r"LDGMC\.E\.(F32ADD|HPADD)\.BF16x8\b",
    "6__half": r"LDGMC\.E\.(F32ADD|HPADD)\.F16x8\b",
    "f": r"LDGMC\.E\.ADD\.F32x4\b",
}
"""By the element type in a mangled name: four words at once, summed in fp32."""
ANY_REDUCING_LOAD = r"\bLDGMC\b"
BROADCAST_STORE = r"\bSTG\.E\.128\.STRONG\.SYS\b"


@cache
def tool(name: str) -> str:
    """Path of an NVIDIA binary tool: from its package, from PATH, or from CUDA_HOME."""
    found: list[Path] = []
    try:
        package = importlib.metadata.distribution(f"nvidia-cuda-{name}")
        found = [Path(str(file.locate())) for file in package.files or () if file.name == name]
    except importlib.metadata.PackageNotFoundError:
        pass
    on_path = shutil.which(name)
    found += [Path(on_path)] if on_path else []
    found += [Path(os.environ["CUDA_HOME"]) / "bin" / name] if "CUDA_HOME" in os.environ else []
    existing = [path for path in found if path.exists()]
    assert existing, f"{name} not found, which reads the instructions in the binary: {INSTALL}"
    return str(existing[0])


def dump(*arguments: str) -> str:
    # cuobjdump calls nvdisasm, which comes in a package of its own.
    path = os.pathsep.join((str(Path(tool("nvdisasm")).parent), os.environ.get("PATH", "")))
    command = [tool("cuobjdump"), *arguments, str(_native.__file__)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path}, timeout=120)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@cache
def architectures() -> tuple[str, ...]:
    """Those that the extension was built for: `sm_90a`, ..."""
    return tuple(sorted(set(re.findall(r"\.(sm_\d+[a-z]?)\.cubin", dump("--list-elf")))))


@cache
def instructions(architecture: str, policy: str) -> dict[str, str]:
    """Mangled name -> text of every kernel of a policy."""
    names = re.findall(r"Function (\w+):", dump("--dump-resource-usage", "-arch", architecture))
    wanted = [name for name in names if policy in name]
    assert wanted, f"{architecture}: no kernel of {len(names)} has {policy} in its name"
    text = dump("--dump-sass", "-arch", architecture, "-fun", ",".join(wanted))
    _, *parts = re.split(r"Function : (\w+)", text)
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    assert set(found) == set(wanted)
    return found


def has_multicast(architecture: str) -> bool:
    digits = "".join(filter(str.isdigit, architecture))
    return int(digits[:-1]) >= FIRST_MAJOR


def element_type(function: str) -> str:
    found = re.search(rf"(?:{MULTICAST}|{PEER})({'|'.join(REDUCING_LOAD)})Li", function)
    assert found, f"no element type in {function}"
    return found[1]


def test_some_architecture_has_multicast() -> None:
    assert any(map(has_multicast, architectures())), f"built for {architectures()}: add 90a to WEAVE_CUDA_ARCHS"


def test_multicast_kernels_reduce_and_broadcast_in_the_switch() -> None:
    for architecture in filter(has_multicast, architectures()):
        kernels = instructions(architecture, MULTICAST)
        assert {element_type(name) for name in kernels} == set(REDUCING_LOAD), f"{architecture}: a type is missing"
        for name, text in kernels.items():
            where = f"{architecture}: {name}"
            loads = re.findall(ANY_REDUCING_LOAD, text)
            expected = [*re.finditer(REDUCING_LOAD[element_type(name)], text)]
            assert loads and len(loads) == len(expected), f"{where}: {len(expected)} of {len(loads)} loads fit"
            assert re.search(BROADCAST_STORE, text), f"{where}: no broadcasting store"


def test_peer_kernels_have_no_multicast() -> None:
    for architecture in architectures():
        kernels = instructions(architecture, PEER)
        assert {element_type(name) for name in kernels} == set(REDUCING_LOAD), f"{architecture}: a type is missing"
        for name, text in kernels.items():
            found = re.search(f"{ANY_REDUCING_LOAD}|{BROADCAST_STORE}", text)
            assert found is None, f"{architecture}: {name} holds {found[0]}"


def test_older_architectures_have_no_multicast() -> None:
    """There the kernels are empty shells, and the launch refuses."""
    for architecture in architectures():
        if not has_multicast(architecture):
            for name, text in instructions(architecture, MULTICAST).items():
                assert not re.search(f"{ANY_REDUCING_LOAD}|{BROADCAST_STORE}", text), f"{architecture}: {name}"
