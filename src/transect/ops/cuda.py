"""The CUDA C++ sources of this folder: found, built with nvcc for one device, and loaded as plain functions.

Every ``.cu`` file is complete in itself: kernels, and ``extern "C"`` launchers on raw pointers.
So nvcc alone compiles them, with no torch headers, and ctypes is all the binding that they need.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..hardware.measured import cache_folder
from .registry import Unavailable

SOURCES = Path(__file__).parent
CUDA_TARGETS = ("sm_80", "sm_90")


def sources() -> list[Path]:
    """All CUDA C++ files of this folder."""
    return sorted(SOURCES.glob("*.cu"))


def architecture(target: str) -> str:
    """``90a`` for ``sm_90``: Hopper's own instructions (wgmma, TMA) are only in its ``a`` variant."""
    number = target.removeprefix("sm_")
    return "90a" if number == "90" else number


def _nvcc(arguments: list[str], source: Path, target: str) -> str:
    """Run nvcc on ``source`` for ``target``; returns what it wrote to stderr."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise Unavailable("CUDA C++ kernels need nvcc on the PATH: install the CUDA toolkit")
    done = subprocess.run([nvcc, "-O3", "-std=c++17", *arguments, str(source)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source.name} does not compile for {target}:\n{done.stderr}")
    return done.stderr


def compile_source(source: Path, target: str, output: Path, *, shared: bool = False) -> str:
    """Compile for ``target`` (``sm_80``, ``sm_90``) and return ptxas's report of registers, spills and shared memory.

    Raises:
        Unavailable: there is no nvcc.
        RuntimeError: the source does not compile; the message is the compiler's.
    """
    number = architecture(target)
    # Somebody may wait for a library, so its kernels are optimized by as many threads as there are cores (CUDA 12.1).
    kind = ["-shared", "-Xcompiler", "-fPIC", "--split-compile=0"] if shared else ["-cubin"]
    code = f"-gencode=arch=compute_{number},code=sm_{number}"
    return _nvcc([code, "-Xptxas", "-v", *kind, "-o", str(output)], source, target)


def ptx_of(source: Path, target: str) -> str:
    """The PTX of a source; errors as in ``compile_source``."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.ptx"
        _nvcc(["-ptx", f"-arch=compute_{architecture(target)}", "-o", str(output)], source, target)
        return output.read_text()


@cache
def library(name: str) -> ctypes.CDLL:
    """``ops/NAME.cu``, built for the GPU of this machine (once, kept in the user's cache) and loaded.

    Raises:
        Unavailable: no GPU, or no nvcc.
    """
    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise Unavailable("CUDA C++ kernels need an NVIDIA GPU")
    source = SOURCES / f"{name}.cu"
    major, minor = torch.cuda.get_device_capability()
    headers = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.cuh")))
    digest = hashlib.sha256(source.read_bytes() + headers).hexdigest()[:16]
    output = cache_folder() / "cuda" / f"{name}-{digest}-sm_{major}{minor}.so"
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(output.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one compiles, the others wait for it
            if not output.exists():
                temporary = output.with_suffix(f".{os.getpid()}.tmp")
                compile_source(source, f"sm_{major}{minor}", temporary, shared=True)
                temporary.replace(output)
    return ctypes.CDLL(str(output))


def bind(name: str, symbol: str, signature: str) -> Callable[..., int]:
    """A launcher of ``ops/NAME.cu``; its arguments by letter: p pointer, i int, l long long, f float.

    Raises:
        Unavailable: no GPU, or no nvcc.
    """
    function = getattr(library(name), symbol)
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_longlong, "f": ctypes.c_float}
    function.argtypes = [kinds[letter] for letter in signature]
    function.restype = ctypes.c_int
    return cast(Callable[..., int], function)


@cache
def launcher(name: str, symbol: str) -> Callable[..., None]:
    """``extern "C"`` function ``symbol`` of ``ops/NAME.cu``: tensors become pointers, the current stream is added.

    Raises (when called):
        RuntimeError: the launcher refused the shape (-1) or CUDA reported an error.
    """
    function = getattr(library(name), symbol)

    def value(a: Tensor | int | float) -> Any:
        if isinstance(a, Tensor):
            return ctypes.c_void_p(a.data_ptr())
        return ctypes.c_double(a) if isinstance(a, float) else ctypes.c_longlong(a)

    def call(*arguments: Tensor | int | float) -> None:
        # A 64-bit integer is also read rightly as a 32-bit one in a register or on the stack; a float is a C double.
        values = [value(a) for a in arguments]
        code = function(*values, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        if code:
            raise RuntimeError(f"{symbol} of {name}.cu returned {code}" + (": not a shape it takes" * (code == -1)))

    return call


def available(name: str, call: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """What ``Implementation.load`` of a CUDA C++ implementation is: builds ``ops/NAME.cu``, then gives ``call``.

    Raises (when called):
        Unavailable: no GPU, or no nvcc.
    """

    def load() -> Callable[..., Any]:
        library(name)
        return call

    return load


def aligned(x: Tensor) -> Tensor:
    """``x`` contiguous and beginning at a multiple of 16 bytes, which is what the kernels read at a time; copied if it
    is not."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
