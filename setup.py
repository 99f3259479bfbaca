"""Builds weaveopt: Python packages from two source folders more than the usual one, and one native module.

`rewrites/` and `cost_model/` stand at the top of the source tree and import as `weaveopt.rewrites` and
`weaveopt.cost_model`. The native module `weaveopt._native` holds no torch, so it builds in an isolated
environment that has neither torch nor a GPU, and one binary serves every torch version.

`WEAVE_CUDA=0|1|auto` builds the CUDA sources: never, in any case, or (auto, the default) where there is nvcc, and a GPU
or a word of which ones are meant. `WEAVE_CUDA_ARCHS` is that word: `all`, or architectures such as `80;90`; by default
those of this host's GPUs. The newest of them is compiled to PTX too, for GPUs that come after it.

Where CUDA sources are built and NVSHMEM is (the package `nvidia-nvshmem-cu13`, or `NVSHMEM_HOME`), a second native
module, `weaveopt._nvshmem`, has what joins GPUs of several hosts; `WEAVE_NVSHMEM=0` leaves it out.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import find_packages, setup

ROOT = Path(__file__).parent
# The kernels of all sources but HOPPER_SOURCE need no feature of one chip alone, so a GPU runs what was compiled for
# the first of its major version (86 and 89 the code of 80, 103 that of 100), and one of a later version (110, 120) the
# PTX of the last.
ALL_ARCHS = ("80", "90", "100")
# Sources that need Hopper's own instructions (wgmma, setmaxnreg), which no other chip has: compiled for it alone,
# whatever the architectures are, as their headers compile for nothing else.
HOPPER_SOURCE = ".sm90a.cu"
HOPPER_CODE = "-gencode=arch=compute_90a,code=sm_90a"
# Sources that instantiate kernels for one type of elements, which they find as a macro: compiled once for each.
DTYPES_MARK = ".dtypes."
ELEMENTS = ("__nv_bfloat16", "__half")
# Sources of the module that needs NVSHMEM, and those of the other module that are part of it too.
NVSHMEM_MARK = ".nvshmem."
NVSHMEM_SHARED = ["csrc/reduction/hosts/doubling.cpp", "csrc/reduction/hosts/schedule.cpp"]
NVSHMEM_MODULE = "weaveopt._nvshmem"
HEADERS = (".h", ".hpp", ".inc", ".cuh")
PYTHON_HEADER = re.compile(r'^#include ["<](pybind11/|Python\.h)', re.MULTILINE)
# Objects by content, so that one built here is found again. Those of CUDA may be carried to another machine.
OBJECTS = ROOT / "build" / "cuda"
CPP_OBJECTS = ROOT / "build" / "cpp"


def sources(suffix: str, nvshmem: bool = False) -> list[str]:
    """All that end so, of one of the two modules."""
    found = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(f"csrc/**/*{suffix}"))
    return [path for path in found if (NVSHMEM_MARK in path) is nvshmem]


def packages(folder: str, name: str) -> list[str]:
    """A source folder that imports as `name`, and every package in it."""
    return [name, *(f"{name}.{inner}" for inner in find_packages(str(ROOT / folder)))]


def find_nvcc() -> str | None:
    """nvcc where the CUDA part is to be built, else None."""
    asked = os.environ.get("WEAVE_CUDA") or "auto"
    if asked not in {"0", "1", "auto"}:
        raise SystemExit(f"WEAVE_CUDA={asked!r}: expected 0, 1 or auto")
    if asked == "0":
        return None
    named = os.environ.get("WEAVE_CUDA_ARCHS")
    if asked == "auto" and not named and not gpu_archs():
        say("no GPU found: the CUDA part is left out (WEAVE_CUDA_ARCHS=all builds it for every architecture)")
        return None
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if nvcc is None:
        wanted = f"WEAVE_CUDA_ARCHS={named}" if named else "WEAVE_CUDA=1"
        missing = "nvcc was not found: put it on PATH, set CUDA_HOME, or build with WEAVE_CUDA=0"
        if asked == "1" or named:
            raise SystemExit(f"{wanted}, but {missing}")
        say(f"the CUDA part is left out: {missing}")
    return nvcc


def say(line: str) -> None:
    sys.stderr.write(f"weaveopt: {line}\n")


@cache
def gpu_archs() -> tuple[str, ...]:
    """Architectures of this host's GPUs that the kernels can be compiled for: `("90",)`."""
    return in_order(arch for arch in set(asked_of_tool() or asked_of_driver()) if number(arch) >= number(ALL_ARCHS[0]))


def asked_of_tool() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [major + minor for major, minor in re.findall(r"^(\d+)\.(\d)$", listed, re.MULTILINE)]


def asked_of_driver() -> list[str]:
    """Compute capabilities reported by libcuda, for hosts without the driver's tool, as in some containers."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = []
    for index in range(count.value):
        device, version = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
        driver.cuDeviceGet(ctypes.byref(device), index)
        # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        for part, attribute in zip(version, (75, 76), strict=True):
            driver.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
        found.append(f"{version[0].value}{version[1].value}")
    return found


def in_order(archs: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(archs, key=number))


def number(arch: str) -> int:
    return int(arch.rstrip("af"))


def choose_archs(known: tuple[str, ...]) -> tuple[str, ...]:
    """Architectures to compile for, the oldest first, by WEAVE_CUDA_ARCHS, else this host's GPUs, else all.

    `known`: what nvcc knows. A GPU newer than that runs the PTX of the newest one.
    """
    asked = os.environ.get("WEAVE_CUDA_ARCHS", "")
    if asked not in ("", "all"):
        named = [arch for arch in re.split("[;, ]+", asked) if arch]
        for arch in named:
            if not re.fullmatch(r"\d{2,3}[af]?", arch):
                raise SystemExit(f"WEAVE_CUDA_ARCHS={asked!r}: expected all, or architectures such as 80;90")
        return in_order(set(named))
    wanted = ALL_ARCHS if asked == "all" else gpu_archs() or ALL_ARCHS
    newest = max(map(number, known))
    return in_order({arch if arch in known else str(min(number(arch), newest)) for arch in wanted})


def find_nvshmem() -> Path | None:
    """The folder of NVSHMEM's headers and libraries; None where there is none, or it is to be left out."""
    asked = os.environ.get("WEAVE_NVSHMEM") or "auto"
    if asked not in {"0", "1", "auto"}:
        raise SystemExit(f"WEAVE_NVSHMEM={asked!r}: expected 0, 1 or auto")
    if asked == "0":
        return None
    home = os.environ.get("NVSHMEM_HOME")
    folders = [Path(home)] if home else [Path(each) / "nvidia" / "nvshmem" for each in sys.path if each]
    for folder in folders:
        if (folder / "include" / "nvshmem.h").exists() and (folder / "lib" / "libnvshmem_device.a").exists():
            return folder.resolve()
    missing = f"NVSHMEM was not found in {home or 'any folder of packages'}: pip install nvidia-nvshmem-cu13"
    if asked == "1" or home:
        raise SystemExit(f"{missing}, or build with WEAVE_NVSHMEM=0")
    say(f"fabric nvshmem is left out: {missing}")
    return None


def find_runtime(nvcc: str) -> Path:
    """Folder of the CUDA runtime, read from nvcc's own plan, as nvcc may be a link or a script."""
    plan = subprocess.run([nvcc, "--dryrun", sources(".cu")[0]], cwd=ROOT, capture_output=True, text=True, check=True)
    found = [Path(folder) for folder in re.findall(r'"-L([^"]+)"', plan.stderr)]
    found += [Path(top.strip()) / "lib64" for top in re.findall(r"^#\$ TOP=(.*)$", plan.stderr, re.MULTILINE)]
    for folder in found:
        if (folder / "libcudart_static.a").exists():
            return folder.resolve()
    raise SystemExit(
        f"{nvcc} has no libcudart_static.a in {found}: install the CUDA runtime, or build with WEAVE_CUDA=0"
    )


class CudaCompiler:
    """nvcc for the architectures asked for. An object that was made of the same text before is used again."""

    def __init__(self, nvcc: str) -> None:
        self.nvcc = nvcc
        self.library_dir = find_runtime(nvcc)
        listed = subprocess.check_output([nvcc, "--list-gpu-code"], text=True)
        archs = choose_archs(tuple(re.findall(r"^sm_(\d+)$", listed, re.MULTILINE)))
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        # PTX for one chip alone (`90a`) runs on no other.
        with_ptx = archs[-1].isdigit()
        if with_ptx:
            codes.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
        self.archs = ";".join(archs) + ("+PTX" if with_ptx else "")
        self.flags = ["-std=c++17", "-O3", "-Icsrc", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
        self.codes = codes
        # NVSHMEM's device library has no PTX to link with.
        self.machine_codes = [code for code in codes if ",code=sm_" in code]
        self.threads = f"--threads={len(archs)}"
        version = subprocess.check_output([nvcc, "--version"], text=True)
        self.surroundings = [version, *self.flags, *codes]

    def compile_all(self, paths: list[str], nvshmem: Path | None = None) -> list[str]:
        OBJECTS.mkdir(parents=True, exist_ok=True)
        units = [(path, element) for path in paths for element in (ELEMENTS if DTYPES_MARK in path else (None,))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda unit: self.compile(*unit, nvshmem), units))

    def compile(self, path: str, element: str | None = None, nvshmem: Path | None = None) -> str:
        """The object of a source, for one type of `ELEMENTS` if it is compiled for each; with `nvshmem` one that is
        still to be linked on the device."""
        text = [*self.surroundings, *(part for each in with_includes(path) for part in (each, read(each)))]
        flags, codes = self.flags, [HOPPER_CODE] if path.endswith(HOPPER_SOURCE) else self.codes
        if element is not None:
            flags = [*flags, f"-DWEAVE_ELEMENT={element}"]
            text += [element]
        if nvshmem is not None:
            flags, codes = [*flags, "-rdc=true"], self.machine_codes
            text += [*flags, nvshmem_version(nvshmem)]
            flags = [*flags, "-isystem", str(nvshmem / "include")]
        return self.made(text, ["-c", path, *flags, *codes, self.threads])

    def link_device(self, objects: list[str], nvshmem: Path) -> str:
        """Links device code of `objects` with that of NVSHMEM; returns the joined object."""
        flags = ["-Xcompiler", "-fPIC", f"-L{nvshmem / 'lib'}", "-lnvshmem_device", *self.machine_codes]
        # Objects are named by what they were made of, wherever they lie.
        text = [*self.surroundings, "-dlink", *(Path(each).name for each in objects), nvshmem_version(nvshmem)]
        return self.made(text, ["-dlink", *objects, *flags])

    def made(self, text: list[str], arguments: list[str]) -> str:
        """The object that nvcc makes by `arguments`; `text` is all that says what is in it."""
        target = OBJECTS / f"{hashlib.sha256(chr(0).join(text).encode()).hexdigest()}.o"
        if not target.exists():
            unfinished = target.with_suffix(f".{os.getpid()}.o")
            command = [self.nvcc, *arguments, "-o", str(unfinished)]
            print(" ".join(command), flush=True)
            subprocess.check_call(command, cwd=ROOT)
            unfinished.replace(target)
        return str(target)


def nvshmem_version(nvshmem: Path) -> str:
    """NVSHMEM's version, which stands for all of it: no object depends on its path."""
    return (nvshmem / "include" / "non_abi" / "nvshmem_version.h").read_text()


def read(path: str) -> str:
    return (ROOT / path).read_text()


def with_includes(path: str) -> list[str]:
    """The source and all headers of this package that it includes, directly or not."""
    found = [path]
    for each in found:
        for name in re.findall(r'^#include "([^"]+)"', read(each), re.MULTILINE):
            included = f"csrc/{name}"
            if included not in found and (ROOT / included).exists():
                found.append(included)
    return found


class BuildNative(build_ext):
    """Compiles the C++ sources, and with nvcc the CUDA sources, into one module, or two."""

    def build_extensions(self) -> None:
        cuda = sources(".cu")
        nvcc = find_nvcc() if cuda else None
        nvshmem = None if nvcc is None else find_nvshmem()
        if nvshmem is None:
            self.extensions = [ext for ext in self.extensions if ext.name != NVSHMEM_MODULE]
        if nvcc is not None:
            compiler = CudaCompiler(nvcc)
            for ext in list(self.extensions):
                with_nvshmem = nvshmem if ext.name == NVSHMEM_MODULE else None
                try:
                    self.add_cuda(ext, compiler, with_nvshmem)
                except subprocess.CalledProcessError:
                    if with_nvshmem is None or os.environ.get("WEAVE_NVSHMEM") == "1":
                        raise
                    say(f"fabric nvshmem is left out: the NVSHMEM in {with_nvshmem} does not compile with {nvcc}")
                    self.extensions.remove(ext)
        self.reuse_objects()
        super().build_extensions()

    def reuse_objects(self) -> None:
        """Has the C++ compiler use an object again that it made of the same text before."""
        # Older setuptools have one command for C and C++.
        command = getattr(self.compiler, "compiler_so_cxx", self.compiler.compiler_so)
        compile_some = self.compiler.compile
        version = subprocess.check_output([command[0], "--version"], text=True)
        surroundings = [version, sys.version, pybind11.__version__, repr(command)]

        def target(path: str, how: dict[str, object]) -> Path:
            content = [part for each in with_includes(path) for part in (each, read(each))]
            # Without macros that its text never names, so most objects serve builds with CUDA and without.
            named = [macro for macro in how.get("macros") or () if any(macro[0] in part for part in content)]
            how = {**how, "macros": named}
            text = [*surroundings, repr(sorted(how.items())), *content]
            # CXXFLAGS replaces Python's own flags: without its headers an object is then the same for every Python.
            if "CXXFLAGS" in os.environ and not any(map(PYTHON_HEADER.search, content)):
                flags = sorted((name, value) for name, value in how.items() if name != "include_dirs")
                text = [version, repr(command), repr(flags), *content]
            return CPP_OBJECTS / f"{hashlib.sha256(chr(0).join(text).encode()).hexdigest()}.o"

        def compile_missing(paths: list[str], output_dir: str | None = None, **how: object) -> list[str]:
            if output_dir is None:  # pybind11 asks whether the compiler knows a flag
                return list(compile_some(paths, **how))
            CPP_OBJECTS.mkdir(parents=True, exist_ok=True)
            depends = how.pop("depends", None)
            targets = {path: target(path, how) for path in paths}

            def compile_one(path: str) -> None:
                (made,) = compile_some([path], output_dir, depends=depends, **how)
                unfinished = targets[path].with_suffix(f".{os.getpid()}.o")
                shutil.copy(made, unfinished)
                unfinished.replace(targets[path])

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(compile_one, (path for path in paths if not targets[path].exists())))
            return [str(targets[path]) for path in paths]

        self.compiler.compile = compile_missing

    def add_cuda(self, ext: Pybind11Extension, compiler: CudaCompiler, nvshmem: Path | None) -> None:
        """Compiles an extension's CUDA sources, and says how it is linked with them."""
        objects = compiler.compile_all(sources(".cu", nvshmem=nvshmem is not None), nvshmem)
        ext.extra_link_args.append(f"-L{compiler.library_dir}")
        if nvshmem is not None:
            objects.append(compiler.link_device(objects, nvshmem))
            library = nvshmem / "lib"
            ext.extra_link_args += [f"-L{library}", "-lnvshmem_device", "-l:libnvshmem_host.so.3"]
            # Of the package that is installed beside this one; else that of the build.
            ext.extra_link_args += [f"-Wl,-rpath,$ORIGIN/../nvidia/nvshmem/lib:{library}"]
            ext.optional = os.environ.get("WEAVE_NVSHMEM") != "1"
        ext.extra_objects = [*ext.extra_objects, *objects]
        ext.depends = [*ext.depends, *objects]
        ext.define_macros += [("WEAVE_WITH_CUDA", "1"), ("WEAVE_CUDA_ARCHS", f'"{compiler.archs}"')]
        ext.libraries += ["cudart_static", "dl", "rt", "pthread"]


def extension(name: str, cpp: list[str]) -> Pybind11Extension:
    return Pybind11Extension(
        name,
        cpp,
        include_dirs=["csrc"],
        depends=[path for suffix in HEADERS for path in sources(suffix)],
        extra_compile_args=["-std=c++17", "-O3", "-fopenmp", "-fvisibility=hidden"],
        extra_link_args=["-fopenmp"],
    )


native = extension("weaveopt._native", sources(".cpp"))
joined = extension(NVSHMEM_MODULE, [*sources(".cpp", nvshmem=True), *NVSHMEM_SHARED])

ParallelCompile(default=0).install()

setup(
    packages=[
        *packages("weaveopt", "weaveopt"),
        *packages("rewrites", "weaveopt.rewrites"),
        *packages("cost_model", "weaveopt.cost_model"),
        "weaveopt.cost_model.profiles",
    ],
    package_dir={"weaveopt.rewrites": "rewrites", "weaveopt.cost_model": "cost_model"},
    package_data={
        "weaveopt": ["py.typed"],
        "weaveopt.presets": ["*.json"],
        "weaveopt.cost_model": ["*.json"],
        "weaveopt.cost_model.profiles": ["*.json"],
    },
    ext_modules=[native, joined] if native.sources else [],
    cmdclass={"build_ext": BuildNative},
)
