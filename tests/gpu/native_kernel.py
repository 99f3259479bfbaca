"""Kernels that are compiled on the GPU host from csrc's headers, with the compiler that torch brings (NVRTC).

For what no kernel of the package uses by itself. No nvcc and no CUDA headers are needed.
"""

from __future__ import annotations

import ctypes
import sysconfig
import tempfile
from pathlib import Path

import torch

CSRC = Path(__file__).parents[2] / "csrc"
_INTEGERS = """#pragma once
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long uint64_t; typedef unsigned long uintptr_t;
"""
_SIZES = "#pragma once\nnamespace std { using size_t = decltype(sizeof(0)); }\nusing std::size_t;\n"


def nvrtc() -> ctypes.CDLL | None:
    """NVRTC of torch's CUDA version; None where it is not found."""
    name = f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}"
    places = sorted(Path(sysconfig.get_path("purelib")).glob(f"nvidia/*/lib/{name}"))
    for place in (name, *map(str, places)):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    return None


def compiled(library: ctypes.CDLL, source: str, architecture: str) -> bytes:
    """`source` for an architecture such as `sm_90`. Raises `RuntimeError` with the compiler's words."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cstdint").write_text(_INTEGERS)
        (Path(folder) / "cstddef").write_text(_SIZES)
        options = [f"--gpu-architecture={architecture}", "--std=c++17", f"-I{folder}", f"-I{CSRC}"]
        options.append("--device-as-default-execution-space")
        program = ctypes.c_void_p()
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"test.cu", 0, None, None)
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        code = library.nvrtcCompileProgram(program, len(options), arguments)
    size = ctypes.c_size_t()
    if code:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.value.decode())
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, binary)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


class Module:
    """Compiled kernels, loaded on one GPU."""

    def __init__(self, binary: bytes, device: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._device = device
        self._module = ctypes.c_void_p()
        torch.empty(1, device=f"cuda:{device}")  # makes the device's context
        with torch.cuda.device(device):
            self._call("cuModuleLoadData", ctypes.byref(self._module), binary)

    def launch(self, name: str, grid: int, block: int, stream: torch.cuda.Stream, *arguments: ctypes._CData) -> None:
        function = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        with torch.cuda.device(self._device):
            self._call(
                "cuLaunchKernel",
                function,
                grid,
                1,
                1,
                block,
                1,
                1,
                0,
                ctypes.c_void_p(stream.cuda_stream),
                places,
                None,
            )

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        assert code == 0, f"{name}: CUDA driver error {code}"
