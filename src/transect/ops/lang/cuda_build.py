"""The CUDA C++ sources of ``ops/``: finds them, and builds them with nvcc for one device. No torch here.

Every ``.cu`` file is complete in itself: kernels, and ``extern "C"`` launchers on raw pointers. So nvcc alone compiles
them, without torch headers, and ctypes is all the binding that they need (``cuda.py``).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from ...hardware.cache import cache_folder
from ...hardware.cores import usable_cores
from ...hardware.targets import NVIDIA_TARGETS, acted_target
from ..registry import Unavailable

SOURCES = Path(__file__).parent.parent
"""The folder ``ops``. Each source is in the folder of its operator, and its name is unique."""
CUDA_TARGETS = NVIDIA_TARGETS
TOOLKIT = "/usr/local/cuda"
"""The folder where NVIDIA's installers put the toolkit."""
WHOLE = ("-shared", "--split-compile=0")
"""Options for a library in one piece; as many threads as cores optimize its kernels (CUDA 12.1)."""
_LAUNCHER = re.compile(r'^extern "C" int (\w+)\(([^)]*)\)', re.MULTILINE)
_PARTS = re.compile(r"^#define TRANSECT_PARTS (\d+)$", re.MULTILINE)


def sources() -> list[Path]:
    """List all CUDA C++ files of every family."""
    return sorted(SOURCES.rglob("*.cu"))


def source(name: str) -> Path:
    """Return the one file called ``name``, such as "gelu.cu" or "hopper.cuh".

    Raises:
        ValueError: there is none.
    """
    found = next(SOURCES.rglob(name), None)
    if found is None:
        raise ValueError(f"no CUDA C++ source is called {name}; there are: {', '.join(p.name for p in sources())}")
    return found


def architecture(target: str) -> str:
    """Return ``90a`` for ``sm_90``: Hopper's own instructions (wgmma, TMA) are only in its ``a`` variant."""
    number = target.removeprefix("sm_")
    return "90a" if number == "90" else number


def find_nvcc() -> str:
    """Return the compiler on the PATH, else in ``$CUDA_HOME``, ``$CUDA_PATH`` or where the CUDA toolkit is installed.

    Raises:
        Unavailable: there is none.
    """
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), TOOLKIT]
    folders = [os.environ.get("PATH", ""), *(f"{toolkit}/bin" for toolkit in toolkits if toolkit)]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    if found is None:
        raise Unavailable("CUDA C++ kernels need nvcc: install the CUDA toolkit, and set CUDA_HOME to its folder")
    return found


def check(target: str) -> None:
    """Raise where libraries for ``target`` cannot be built, which takes a fraction of a second to see.

    Raises:
        Unavailable: there is no nvcc, or one that does not know the target or our options, or does not get along with
            the host's C++ compiler or the GPU driver, or there is no place to keep them.
    """
    if reason := _hindrance(find_nvcc(), target, library_folder()):
        raise Unavailable(reason)


@cache
def _hindrance(nvcc: str, target: str, folder: Path) -> str:
    """Return the reason why ``nvcc`` builds nothing for ``target`` in ``folder``, or ``""``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        where = "CUDA C++ kernels are kept where files cannot be written and locked"
        return f"{where} ({error}): set TRANSECT_CACHE to another folder"
    # To preprocess this takes the options, the target, and a host compiler that nvcc is content with.
    trial = [nvcc, "-E", _code(target), *WHOLE, "-o", "/dev/null", "-x", "cu", "-"]
    driver = _driver()
    source = (
        f"#if {driver} && __CUDACC_VER_MAJOR__ > {driver}\n#error newer than the GPU driver, of CUDA {driver}\n#endif\n"
    )
    done = subprocess.run(trial, input=source, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["nothing"]
        said = next((line for line in lines if "error" in line or "fatal" in line), lines[-1])
        return f"{nvcc} (12.1 or later is needed) builds no CUDA C++ kernels for {target}, it says {said!r}"
    return ""


def _driver() -> int:
    """Return the CUDA version of the GPU driver, 12 for 12.4; 0 where there is none.

    It runs what an older nvcc has built.
    """
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value // 1000


def _nvcc(arguments: list[str], source: Path, target: str) -> str:
    """Run nvcc for ``target``; return its stderr."""
    nvcc = find_nvcc()
    done = subprocess.run([nvcc, "-O3", "-std=c++17", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source.name} does not compile for {target}:\n{done.stderr}")
    return done.stderr


def _code(target: str) -> str:
    """Return the option for a target's code; where a GPU acts as this target, the code is for that GPU."""
    number, acted = architecture(target), acted_target()
    own = str(own_capability()) if acted is not None and acted.name == target else number
    return f"-gencode=arch=compute_{number},code=sm_{own}"


@cache
def own_capability() -> int:
    """Return the compute capability of the first GPU (90 for 9.0), asking the driver alone."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, parts = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    codes = [driver.cuInit(0), driver.cuDeviceGet(ctypes.byref(device), 0)]
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    codes += [driver.cuDeviceGetAttribute(ctypes.byref(part), 75 + i, device) for i, part in enumerate(parts)]
    if any(codes):
        raise RuntimeError(f"the CUDA driver returned {codes}")
    return 10 * parts[0].value + parts[1].value


def part_options(source: Path, part: int, parts: int | None = None) -> list[str]:
    """Return the options for one part of a source, of ``parts`` or as many as it names; none if it names none."""
    named = _PARTS.search(source.read_text())
    return [f"-DTRANSECT_PART={part}", f"-DTRANSECT_OF={parts or named[1]}"] if named else []


def compile_source(source: Path, target: str, output: Path, options: Sequence[str] = ()) -> str:
    """Compile for ``target`` (``sm_80``, ...) to a cubin, or where ``output`` ends in ``.o`` to an object with the
    host's half; returns ptxas's report of registers, spills and shared memory. ``options``: further ones of nvcc.

    Raises:
        Unavailable: there is no nvcc.
        RuntimeError: the source does not compile; the message is the compiler's.
    """
    kind = ["-c", "-Xcompiler", "-fPIC"] if output.suffix == ".o" else ["-cubin"]
    return _nvcc([_code(target), "-Xptxas", "-v", *kind, *options, "-o", str(output), str(source)], source, target)


def compile_library(source: Path, target: str, output: Path) -> None:
    """Compile to a shared library.

    A source that says ``#define TRANSECT_PARTS n`` is compiled in up to n parts at once (``parts.cuh``), one for every
    two cores, because a user waits for it. Errors as in ``compile_source``.
    """
    text = source.read_text()
    wanted = _PARTS.search(text)
    parts = min(int(wanted[1]), usable_cores() // 2) if wanted else 1
    code = [_code(target), "-Xcompiler", "-fPIC"]
    if parts <= 1:
        _nvcc([*code, *WHOLE, "-o", str(output), str(source)], source, target)
        return
    launchers = _LAUNCHER.findall(text)
    with tempfile.TemporaryDirectory() as folder:
        objects = [f"{folder}/{part}.o" for part in range(parts)]
        asks = f"{folder}/launchers.cpp"
        Path(asks).write_text("".join(_asks(name, parameters, parts) for name, parameters in launchers))

        def compile_part(part: int) -> None:
            named = [*part_options(source, part, parts), *(f"-D{name}={name}_{part}" for name, _ in launchers)]
            _nvcc([*code, *named, "-c", "-o", objects[part], str(source)], source, target)

        with ThreadPoolExecutor(parts) as pool:
            list(pool.map(compile_part, range(parts)))
        _nvcc([*code, "-shared", "-o", str(output), asks, *objects], source, target)


def _asks(name: str, parameters: str, parts: int) -> str:
    """Generate the C++ of a launcher that calls those of all parts until one returns something other than -1."""
    arguments = ", ".join(re.findall(r"(\w+)\s*(?:,|$)", parameters))
    lines = [f'extern "C" int {name}_{part}({parameters});' for part in range(parts)]
    lines += [f'extern "C" int {name}({parameters}) {{', "  int code = -1;"]
    lines += [f"  if (code == -1) code = {name}_{part}({arguments});" for part in range(parts)]
    return "\n".join([*lines, "  return code;", "}", ""])


def ptx_of(source: Path, target: str) -> str:
    """Return the PTX of a source; errors as in ``compile_source``."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.ptx"
        _nvcc(["-ptx", f"-arch=compute_{architecture(target)}", "-o", str(output), str(source)], source, target)
        return output.read_text()


def library_folder() -> Path:
    """Return the folder for libraries in the user's cache."""
    return cache_folder() / "cuda"


def library_path(name: str, target: str) -> Path:
    """Return the place of ``NAME.cu``'s library in the user's cache; its name tells the version of the source."""
    headers = b"".join(path.read_bytes() for path in sorted(SOURCES.rglob("*.cuh")))
    digest = hashlib.sha256(source(f"{name}.cu").read_bytes() + headers).hexdigest()[:16]
    acts = "-acted" if acted_target() is not None else ""
    return library_folder() / f"{name}-{digest}-{target}{acts}.so"


def build(name: str, target: str) -> Path:
    """Return the library of ``NAME.cu``, built if it does not exist yet. One of several processes builds it; the others
    wait.

    Errors are those of ``check`` and ``compile_source``.
    """
    output = library_path(name, target)
    if not output.exists():
        check(target)
        with open(output.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not output.exists():
                temporary = output.with_suffix(f".{os.getpid()}.tmp")
                compile_library(source(f"{name}.cu"), target, temporary)
                temporary.replace(output)
    return output
