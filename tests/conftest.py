"""What holds for every test: how much runs, what happens without a GPU, and fixtures that every folder may use."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import effort
import pytest
import quick_interpreter
import shared_tls
import unwritten_memory
import warm_processes
from changed_package import ChangedPackages
from hypothesis import HealthCheck, settings
from remembered import Remembered

# A test that reads what nobody wrote fails each time, not seldom.
unwritten_memory.fill_with_nan()

# A test fails by what it finds, not by how busy the machine is.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("patient"), max_examples=60)
settings.load_profile("patient")

# Test processes share the machine: threads that wait for each other would spin, also where an engine asks for two (ten
# times the processor time). Set before torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The first profiler of a process decides whether all of them log their starts and ends among what a test prints.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

# Tables are as wide as where nobody says how wide: some shells tell every program of their terminal.
os.environ.pop("COLUMNS", None)

# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a GPU, Triton kernels run in the interpreter; it must be chosen before Triton is first imported.
if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# transformers imports scikit-learn, and with it SciPy and pandas, for a way to draft that no test uses: seconds in
# every process. Tests find it again once they are collected.
sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]

# Imports and the collection of tests make a million objects that stay: no search for garbage until they are there.
gc.disable()

left_out = pytest.StashKey[int]()
MANY = 1000
"""After so many tests the dearest of them are named."""
STAYING = 100_000
"""Most old objects for garbage collection to scan, which takes 0.1 s; beyond that they are excluded from it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prove", action="store_true", help="run everything, also what takes long")


def pytest_configure(config: pytest.Config) -> None:
    """Leave out tests marked ``prove``, unless asked for by ``--prove``, by ``-m`` or by name."""
    config.stash[left_out] = 0
    settings.load_profile("patient" if config.option.prove else "quick")
    if config.option.prove:
        os.environ[effort.PROVE] = "1"
    elif not config.option.markexpr and not any("::" in argument for argument in config.args):
        config.option.markexpr = "not prove"


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        items[0].config.stash[left_out] += sum(item.get_closest_marker("prove") is not None for item in items)


class NeedsGPU(pytest.Item):
    """Stands for a file's tests that need a GPU, where there is none; its mark skips it."""

    def runtest(self) -> None:
        raise AssertionError("a skipped test runs")

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU, one skipped entry a file in place of its tests marked ``gpu``."""
    by_file = defaultdict(list)
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            by_file[item.path].append(item)
    if not by_file:
        return
    import torch

    if torch.cuda.is_available():
        return
    left = {item for tests in by_file.values() for item in tests}
    kept = []
    for item in items:
        if item not in left:
            kept.append(item)
        elif item is (tests := by_file[item.path])[0]:
            entry = NeedsGPU.from_parent(item.getparent(pytest.File), name="gpu")
            entry.add_marker(pytest.mark.skip(reason=f"{len(tests)} tests need a CUDA GPU"))
            kept.append(entry)
    items[:] = kept


def pytest_collection_finish() -> None:
    """Search for garbage from now on, but never in what the test files have imported, which takes half a second."""
    if sys.modules.get("sklearn", "unknown") is None:
        del sys.modules["sklearn"]
    if not effort.proving():
        quick_interpreter.install()
        shared_tls.install()
        warm_processes.install()
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 5, 5)  # Triton's interpreter makes thousands of objects a millisecond


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After a file, leave out of later searches for garbage what is there to stay, such as modules imported late.

    Tests and the engines they close collect garbage themselves, each time through all of it.
    """
    yield
    if (nextitem is None or nextitem.path != item.path) and len(gc.get_objects(generation=2)) > STAYING:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash[left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Every worker collects all tests, so one of them knows the number."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[left_out] = max(node.config.stash[left_out], output.get("left_out", 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.stash[left_out]:
        terminalreporter.write_line(f"{count} tests were left out that `make prove` runs")
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            seconds[getattr(report, "nodeid", "")] += getattr(report, "duration", 0.0)
    if len(seconds) > MANY:
        dearest = sorted(seconds, key=lambda name: -seconds[name])[:5]
        named = "; ".join(f"{seconds[name]:.0f} s {name}" for name in dearest)
        terminalreporter.write_line(f"{sum(seconds.values()):.0f} s of tests, of which {named}")


@pytest.fixture
def port() -> Iterator[int]:
    """For a server that cannot choose one by itself, and sets SO_REUSEADDR: meanwhile the system gives it to nobody."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """An engine that a test made in this process has set torch's threads; those of later tests would wait for each
    other whenever something else runs, at ten times the processor time."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets, whose paths have 107 bytes at most; ``tmp_path`` may have as many."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def two_ranks():
    """This process and another one, on the CPU, which takes seconds to start; one engine at a time runs on them."""
    from two_ranks import started

    ranks = started("cpu")
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def changed_packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChangedPackages]:
    """Copies of the package with the changes that guides show, by the guide's page."""
    packages = ChangedPackages(tmp_path_factory.mktemp)
    yield packages
    packages.close()


@pytest.fixture(scope="session")
def remembered() -> Remembered:
    """Keeps what compilers said about the same inputs in an earlier run."""
    return Remembered()


@pytest.fixture(scope="session")
def smollm2():
    """The ``ModelSource`` of the built-in model: from the user's cache, or fetched (98 MB, once)."""
    from transect.checkpoints.resolve import resolve

    return resolve("smollm2-135m")
