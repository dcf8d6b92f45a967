"""Compile the CPU kernels for this machine once, and keep the library in the user's cache.

Most of the time goes into the products of packed weights, of which each kind has loops of its own. So ``linear.cpp`` is
compiled for some kinds at a time, as many compilers side by side as there are processors.

The cache key is a hash of the sources, the flags, the compiler and the features of the processor. So a library never
runs on a processor that lacks its instructions, and a changed source is compiled again.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...hardware.cache import cache_folder
from ...hardware.cores import usable_cores
from ..registry import Unavailable

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-std=c++20", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-pthread")
TOGETHER = (
    "Q5_0, Q5_1",
    "Q5_K",
    "Q6_K",
    "Q4_0, Q4_K",
    "Q4_HALF, Q4_FLOAT",
    "Q8_HALF, Q8_FLOAT, Q8_FLOAT_G16",
    "Q8_0, FP8, BF16, F32",
)
"""Kinds of ``kinds.h`` that one compiler makes the products of."""
COMPILERS = ("c++", "g++", "clang++")
BUILD_TIMEOUT = 300


def library_path(march: str = "native", *, build: bool = True) -> Path:
    """Return the compiled library for this machine, built if it does not exist yet.

    Args:
        build: False raises ``Unavailable`` where it would be built, which takes up to a minute.
        march: the compiler's ``-march``: ``native`` in use; tests name older levels to try the other paths.

    ``TRANSECT_CXXFLAGS`` of the environment comes after our flags, for a sanitizer or symbols. ``CXXFLAGS`` is not
    asked: some environments set it to ``-O2``, with which a model decodes at less than half the speed.

    Raises:
        Unavailable: no compiler, or it failed; the message says which and how to get one.
    """
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable(f"no C++ compiler found (looked for {', '.join(COMPILERS)}); install g++ or clang++")
    files = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])
    key = hashlib.sha256()
    for part in (*_flags(), *TOGETHER, march, _compiler_version(compiler), _processor(), sys.platform):
        key.update(part.encode() + b"\0")
    for file in files:
        key.update(file.read_bytes())
    target = cache_folder() / "native" / f"kernels-{march}-{key.hexdigest()[:16]}.so"
    if not target.exists():
        if not build:
            raise Unavailable("the C++ kernels are not compiled yet")
        _compile(compiler, march, target)
    return target


def _flags() -> tuple[str, ...]:
    return *FLAGS, *os.environ.get("TRANSECT_CXXFLAGS", "").split()


def _compile(compiler: str, march: str, target: Path) -> None:
    from filelock import FileLock

    architecture = f"-march={march}" if platform.machine() in ("x86_64", "AMD64") else f"-mcpu={march}"
    command = [compiler, *_flags(), architecture]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            if target.exists():  # another process, such as a replica, has compiled it meanwhile
                return
            print(
                "transect: compiling the C++ kernels for this processor (once, under a minute)",
                file=sys.stderr,
                flush=True,
            )
            jobs = [[str(SOURCES / "linear.cpp"), f"-DTRANSECT_KINDS={kinds}"] for kinds in TOGETHER]
            jobs.insert(0, [str(SOURCES / "native.cpp")])
            objects = [str(Path(scratch) / f"{number}.o") for number in range(len(jobs))]
            calls = [[*command, "-c", *job, "-o", made] for job, made in zip(jobs, objects, strict=True)]
            with ThreadPoolExecutor(usable_cores()) as pool:
                list(pool.map(_run, calls))
            built = Path(scratch) / target.name
            _run([*command, "-shared", *objects, "-o", str(built)])
            os.replace(built, target)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{compiler} took over {BUILD_TIMEOUT} s to compile the C++ kernels") from None
    except OSError as error:
        raise Unavailable(f"the C++ kernels could not be built in {target.parent}: {error.strerror}") from None


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise Unavailable(f"{command[0]} could not compile the C++ kernels: {errors[0].strip()}")


@functools.cache
def _compiler_version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    return done.stdout.split("\n", 1)[0]


@functools.cache
def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.split(":", 1)[1].split()))
    except OSError:
        pass
    return platform.processor() or platform.machine()


def main() -> None:
    """Build ahead of the first use, and report the result."""
    try:
        print(f"C++ kernels: {library_path().name}")
    except Unavailable as reason:
        print(f"C++ kernels: none, the models will run on torch alone: {reason}")


if __name__ == "__main__":
    main()
