"""The CUDA C++ sources of this folder: found, built with nvcc for one device, and loaded as plain functions.

Every ``.cu`` file is complete in itself: kernels, and ``extern "C"`` launchers on raw pointers.
So nvcc alone compiles them, with no torch headers, and ctypes is all the binding that they need.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .registry import Unavailable

SOURCES = Path(__file__).parent


def sources() -> list[Path]:
    """All CUDA C++ files of this folder."""
    return sorted(SOURCES.glob("*.cu"))


def compile_source(source: Path, target: str, output: Path, *, shared: bool = False) -> str:
    """Compile for ``target`` (``sm_80``, ``sm_90``) and return ptxas's report of registers, spills and shared memory.

    Raises:
        Unavailable: there is no nvcc.
        RuntimeError: the source does not compile; the message is the compiler's.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise Unavailable("CUDA C++ kernels need nvcc on the PATH: install the CUDA toolkit")
    number = target.removeprefix("sm_")
    kind = ["-shared", "-Xcompiler", "-fPIC"] if shared else ["-cubin"]
    code = f"-gencode=arch=compute_{number},code=sm_{number}"
    command = [nvcc, "-O3", code, "-Xptxas", "-v", *kind, "-o", str(output), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source.name} does not compile for {target}:\n{done.stderr}")
    return done.stderr


@cache
def library(name: str) -> ctypes.CDLL:
    """``ops/NAME.cu``, built for the GPU of this machine and loaded.

    Raises:
        Unavailable: no GPU, or no nvcc.
    """
    if not torch.cuda.is_available():
        raise Unavailable("CUDA C++ kernels need an NVIDIA GPU")
    source = SOURCES / f"{name}.cu"
    major, minor = torch.cuda.get_device_capability()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    output = Path(tempfile.mkdtemp(prefix="transect-cuda-")) / f"{name}-{digest}-sm_{major}{minor}.so"
    compile_source(source, f"sm_{major}{minor}", output, shared=True)
    return ctypes.CDLL(str(output))


def launcher(name: str, symbol: str) -> Callable[..., None]:
    """``extern "C"`` function ``symbol`` of ``ops/NAME.cu``: tensors become pointers, the current stream is added.

    Raises (when called):
        RuntimeError: the launcher refused the shape (-1) or CUDA reported an error.
    """
    function = getattr(library(name), symbol)

    def call(*arguments: Tensor | int) -> None:
        values = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_longlong(a) for a in arguments
        ]  # a 64-bit integer is also read rightly as a 32-bit one in a register or on the stack
        code = function(*values, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        if code:
            raise RuntimeError(f"{symbol} of {name}.cu returned {code}" + (": not a shape it takes" * (code == -1)))

    return call
