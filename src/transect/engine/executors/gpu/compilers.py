"""Processes that compile an engine's kernels while the engine itself imports, loads weights, and waits.

``Compilers.start`` comes first of all, before torch is imported here. It starts one process, which has nvcc build the
CUDA C++ libraries, imports torch, Triton and the operators once, and forks workers. None of them uses the GPU: Triton
compiles for a target. Which kernels are needed is found by the engine (``warm_kernels.py``) and sent one by one; what
is compiled goes to Triton's cache on disk, from where the engine loads it.

    python -m transect.engine.executors.gpu.compilers CONFIG BUILD

It reads kernels as pickles from its standard input and answers on its standard output.

It leads a process group of its own, which is ended as a whole: by the engine, or by itself when the engine is gone.

No torch is imported here at the top.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ....hardware.cores import usable_cores
from ....hardware.targets import act_as, acted_target
from ....ops.lang import cuda_build
from ...config import EngineConfig

log = logging.getLogger(__name__)

DEVICES = ("/dev/nvidiactl", "/dev/dxg")
"""Device files of NVIDIA GPUs: on Linux, and on Linux within Windows."""
FEWEST_CORES = 4
"""Fewest cores for compiler processes; with fewer, they would slow the engine itself down."""
MOST_WORKERS = 16
PIPE_BYTES = 2**20
END = None
"""Last message from the engine."""
ANSWER = b'{"done": '
"""First bytes of an answer from the compiler processes."""
MOST_BYTES = 2**17
"""Size limit of one job's message; a kernel's description is 3 KB."""
PRODUCTS = ("small_matmul", "small_matmul_hopper")
"""Sources for nvcc of products; those named after Hopper are for it alone."""


class Compilers:
    """Handle on the compiler processes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._sent: list[Any] = []
        self._needed: int | None = None
        self._left_alone = False

    @classmethod
    def start(cls, config: EngineConfig) -> Compilers | None:
        """Start the processes, unless the engine is not for a GPU or there are too few cores to gain from them."""
        if config.device == "cpu" or config.native or not any(map(os.path.exists, DEVICES)):
            return None
        if find_spec("triton") is None or usable_cores() < FEWEST_CORES:
            return None
        attention = "paged_spans_hopper" if config.deterministic else "paged_decode_hopper"
        sources = "" if config.dtype == "float32" else ",".join((*PRODUCTS, attention))
        command = [sys.executable, "-m", __spec__.name, repr(config), sources]
        pipe = subprocess.PIPE
        # A group of its own, to be ended together.
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, process_group=0)
        assert process.stdin is not None
        # Room for all kernels (3 KB each), so that no sender waits; where that is not allowed, they do.
        with contextlib.suppress(OSError):
            fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return cls(process)

    def begin(self, arch: int, stamps: tuple[str, ...]) -> None:
        """Tell the processes the compute capability to compile for (90 for 9.0), and the files to create when all is
        compiled."""
        self._send((arch, stamps))

    def submit(self, kernel: Any) -> None:
        """Submit a ``CollectedKernel`` for compilation."""
        self._send((len(self._sent), tuple(kernel)))
        self._sent.append(kernel)

    def all_needed(self) -> None:
        """Mark the end of the needed kernels: ``finish`` does not wait for later ones."""
        self._needed = len(self._sent)

    @property
    def needed(self) -> int:
        """Kernels that ``finish`` waits for."""
        return len(self._sent) if self._needed is None else self._needed

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        # If it has ended, kernels are compiled when they are launched.
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()

    def finish(self, compiled: Callable[[Any], object]) -> int:
        """Wait until the needed kernels are compiled and the libraries built; report each kernel when it is ready.

        Returns their number. The other kernels are compiled in the background.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._send(END)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdin = None
        needed: set[int | str] = {*range(self.needed), "libraries"}
        count = 0
        while needed and (line := self._process.stdout.readline()):
            if not line.startswith(ANSWER):
                continue  # a library's own words
            answer = json.loads(line)
            log.debug("%s", answer)
            needed.discard(answer["done"])
            if "error" in answer:
                log.info("compiling ahead failed: %s", answer["error"])
            elif isinstance(answer["done"], int):
                compiled(self._sent[answer["done"]])
                count += 1
        if needed:
            log.warning(
                "processes that compile kernels ended early: %d kernels are compiled at their first launch", len(needed)
            )
        self._left_alone = True
        threading.Thread(target=self._process.communicate, daemon=True).start()
        return count

    def stop(self) -> None:
        """End the processes, even busy ones, unless ``finish`` has left them to end by themselves."""
        if not self._left_alone:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextlib.contextmanager
def compiling(config: EngineConfig) -> Iterator[Compilers | None]:
    """Run ``Compilers.start``, and ``stop`` at the end of the block. Before that, act as ``GPUOptions.target``."""
    if config.gpu.target is not None:
        act_as(config.gpu.target)
    compilers = Compilers.start(config)
    try:
        yield compilers
    finally:
        if compilers is not None:
            compilers.stop()


def sources_digest() -> str:
    """Compute a digest of everything that compiled kernels depend on besides their arguments."""
    import triton

    key = hashlib.sha256(triton.__version__.encode())
    package = Path(__file__).parents[3]
    # engine/ decides which steps there are, ops/tuned how kernels are cut.
    patterns = ("ops/**/*.py", "ops/tuned/**/*.json", "models/**/*.py", "engine/**/*.py")
    for path in sorted(path for pattern in patterns for path in package.glob(pattern)):
        key.update(path.read_bytes())
    return key.hexdigest()


def hint(config: str) -> Path:
    """Return the path of the file that exists once an engine of this configuration (its ``repr``) has found all its
    kernels compiled."""
    import triton

    key = hashlib.sha256(f"{config} {sources_digest()}".encode()).hexdigest()
    return Path(triton.knobs.cache.dir) / f"transect-{key[:24]}"


# ---- the process


def main() -> None:
    """Run the compiler processes."""
    config, sources = sys.argv[1:]
    names = sources.split(",") if sources else []
    children = [_fork(lambda: _build_libraries(names))]
    first = None
    if hint(config).exists():  # perhaps nothing is to be done: wait until something is
        first = _next_message()
        if first is END:
            return
    children.append(_fork(_build_driver))
    import_operators()
    first = first or _next_message()
    if first is END:
        return
    arch, stamps = first
    # Each message is taken by one worker. There is no lock that one could die with, and whoever is left when the others
    # have died (a machine out of memory) finds the other end closed.
    jobs, taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    count = min(MOST_WORKERS, max(1, usable_cores() - 1))
    children += [_fork(lambda: _work(jobs, taken, arch)) for _ in range(count)]
    taken.close()
    while (job := _next_message()) is not END:
        with contextlib.suppress(BrokenPipeError):
            jobs.send(pickle.dumps(job))
    jobs.close()
    codes = [os.waitpid(child, 0)[1] for child in children]
    if not any(codes):
        for stamp in stamps:
            Path(stamp).touch()


def _next_message() -> Any:
    """Read the engine's next message; the last one is ``END``. If the engine ends without it, this whole process group
    ends."""
    try:
        return pickle.load(sys.stdin.buffer)
    except (EOFError, pickle.UnpicklingError):
        os.killpg(0, signal.SIGKILL)


def _fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    with contextlib.suppress(BaseException):
        work()
        code = 0
    os._exit(code)


def _answer(done: int | str, started: float, error: Exception | None = None) -> None:
    """Write a line to standard output in one piece (if it is shorter than the pipe's 4096 bytes)."""
    answer: dict[str, Any] = {"done": done, "seconds": time.time() - started, "at": time.time(), "by": os.getpid()}
    if error is not None:
        answer["error"] = f"{type(error).__name__}: {error}"[:600]  # of up to 6 characters each in JSON
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), (json.dumps(answer) + "\n").encode())


def _build_libraries(names: list[str]) -> None:
    started, failed = time.time(), None
    try:
        if names:
            acted = acted_target()
            target = f"sm_{cuda_build.own_capability()}" if acted is None else acted.name
            names = [name for name in names if "hopper" not in name or target == "sm_90"]
            with ThreadPoolExecutor(len(names)) as pool:
                list(pool.map(lambda name: cuda_build.build(name, target), names))
    except Exception as error:  # no nvcc, for example; the engine says so when it needs one
        failed = error
    _answer("libraries", started, failed)


def _build_driver() -> None:
    """Build Triton's own C module, which the engine would otherwise compile at its first use of the GPU."""
    from triton.backends.nvidia.driver import CudaUtils

    CudaUtils()


def import_operators() -> None:
    """Import all modules that the workers share."""
    from triton.runtime.cache import triton_key

    key = threading.Thread(target=triton_key)  # reads all of Triton; kept
    key.start()
    from ....models import fused_stack  # noqa: F401
    from ....ops import opset  # noqa: F401
    from . import device_sampling  # noqa: F401

    key.join()


class CompileTarget:
    """Stands in for Triton's driver, for a GPU that this process does not use."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def compile_kernel(kernel: Any, arch: int) -> None:
    """Compile a ``CollectedKernel`` and the C function that launches it into Triton's cache."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime import driver

    driver.set_active(CompileTarget(arch))
    compiled = kernel.load()
    CudaLauncher(compiled.src, compiled.metadata)  # builds it


def _work(jobs: socket.socket, taken: socket.socket, arch: int) -> None:
    from ....ops.lang.collecting import CollectedKernel

    jobs.close()
    well = True
    while job := taken.recv(MOST_BYTES):
        number, fields = pickle.loads(job)
        started = time.time()
        try:
            compile_kernel(CollectedKernel(*fields), arch)
            _answer(number, started)
        except Exception as error:
            well = False
            _answer(number, started, error)
    if not well:
        sys.exit(1)


if __name__ == "__main__":
    main()
