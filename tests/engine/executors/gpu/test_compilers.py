"""The processes that compile kernels: started without torch, they compile what they are sent, and end by themselves."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from effort import quick_first

from transect.engine.config import EngineConfig
from transect.engine.executors.gpu import compilers
from transect.engine.executors.gpu.compilers import Compilers, _answer, sources_digest
from transect.hardware import cores

pytest.importorskip("triton")

KERNEL = """
import torch
from triton.runtime import driver
from transect.engine.executors.gpu.compilers import CompileTarget
from transect.ops.lang.collecting import collected
from transect.ops.linear.few_rows.triton import _rows

driver.set_active(CompileTarget(90))
x = torch.zeros(16, 16, dtype=torch.bfloat16)
tile = dict(BM=16, BN=16, BK=16, SPLIT=1, SWAP=False, EVEN=True, BULK=False, DEPENDENT_LAUNCH=False, GATED=False,
SQUARES=1)

def found(kernel):
    print(*kernel, sep="\\n")

with collected(found):
    _rows[(1, 1, 1)](x, x, None, x, *(None,) * 7, *(16,) * 8, 1e-5, None, **tile)
"""


@pytest.fixture
def environment(tmp_path):
    """For processes with empty caches, in which Triton is not the interpreter."""
    left = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return left | {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TRANSECT_CACHE": str(tmp_path / "transect")}


def start(environment, config):
    command = [sys.executable, "-m", "transect.engine.executors.gpu.compilers", repr(config), "0"]
    pipe = subprocess.PIPE
    return Compilers(
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, process_group=0)
    )


def group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def saying(*lines):
    """Compilers that say this and end."""
    command = [sys.executable, "-c", f"import sys; sys.stdout.writelines({list(lines)!r})"]
    pipe = subprocess.PIPE
    return Compilers(subprocess.Popen(command, stdin=pipe, stdout=pipe, process_group=0))


def soon(condition):
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not condition():
        time.sleep(0.05)
    return condition()


def test_none_without_a_gpu_to_compile_for():
    assert Compilers.start(EngineConfig(model="x", device="cpu")) is None


def test_none_in_a_container_with_little_cpu_time(tmp_path, monkeypatch):
    monkeypatch.setattr(compilers, "DEVICES", ("/",))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    monkeypatch.setattr(cores, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    (tmp_path / "membership").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("300000 100000\n")
    monkeypatch.setattr(subprocess, "Popen", lambda *command, **options: pytest.fail("a process is started"))
    assert Compilers.start(EngineConfig(model="x")) is None


def test_compiles_what_it_is_sent(environment, tmp_path):
    done = subprocess.run([sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True, timeout=300)
    kernel = done.stdout.splitlines()
    assert len(kernel) == 3, done.stderr
    assert not list(tmp_path.rglob("_rows.cubin"))
    compilers = start(environment, EngineConfig(model="x"))
    compilers.begin(90, ())
    compilers.submit(kernel)
    compilers.submit(["transect.ops.linear.few_rows.small_matmul", "no_such_kernel", "{}"])
    compilers.all_needed()
    assert compilers.needed == 2
    loaded = []
    # Without the CUDA driver's library the C function that launches a kernel cannot be linked: an answer with an error.
    assert compilers.finish(loaded.append) == len(loaded) <= 1
    assert [path.stat().st_size > 0 for path in tmp_path.rglob("_rows.cubin")] == [True]
    compilers._process.wait(timeout=300)  # by itself


@pytest.mark.prove
def test_ends_when_there_is_nothing_to_do(environment):
    compilers = start(environment, EngineConfig(model="x"))
    assert compilers.finish(lambda kernel: None) == 0
    compilers._process.wait(timeout=300)


def test_is_stopped_when_the_engine_cannot_be_built(environment):
    compilers = start(environment, EngineConfig(model="x"))
    compilers.begin(90, ())
    compilers._process.stdout.readline()
    compilers.stop()
    assert compilers._process.returncode != 0
    assert soon(lambda: not group_lives(compilers._process.pid))


def test_the_engine_goes_on_when_it_has_died(environment):
    compilers = start(environment, EngineConfig(model="x"))
    compilers._process.kill()
    compilers._process.wait()
    compilers.begin(90, ())
    compilers.submit(("module", "name", "{}"))
    assert compilers.finish(lambda kernel: None) == 0


@pytest.mark.parametrize("last_words", quick_first([b"\x80\x05", b""], 1))
def test_nothing_is_left_when_the_engine_has_been_killed(environment, last_words):
    """Perhaps in the middle of a message."""
    compilers = start(environment, EngineConfig(model="x"))
    compilers.begin(90, ())
    compilers._process.stdin.write(last_words)
    compilers._process.stdin.close()
    assert compilers._process.wait(timeout=300) == -signal.SIGKILL
    assert soon(lambda: not group_lives(compilers._process.pid))
    compilers._process.stdout.close()


def test_workers_end_when_their_parent_has_been_killed(environment):
    """Ends processes as a machine out of memory does. They hold the pipe that the engine reads answers from."""
    compilers = start(environment, EngineConfig(model="x"))
    compilers.begin(90, ())
    compilers.submit(("transect.ops.linear.few_rows.small_matmul", "no_such_kernel", "{}"))
    while json.loads(compilers._process.stdout.readline())["done"] != 0:
        pass
    compilers._process.send_signal(signal.SIGKILL)
    compilers._process.wait(timeout=300)
    try:
        assert soon(lambda: not group_lives(compilers._process.pid))
        assert compilers.finish(lambda kernel: None) == 0
    finally:
        if group_lives(compilers._process.pid):
            os.killpg(compilers._process.pid, signal.SIGKILL)


def test_what_libraries_print_is_no_answer():
    compilers = saying("a greeting\n", '{"done": 0}\n', "7\n", '{"done": "libraries"}\n')
    compilers.submit(("module", "name", "{}"))
    loaded = []
    assert compilers.finish(loaded.append) == 1
    assert loaded == [("module", "name", "{}")]


def test_it_is_said_when_they_end_early(caplog):
    compilers = saying('{"done": "libraries"}\n')
    for _ in range(3):
        compilers.submit(("module", "name", "{}"))
    assert compilers.finish(lambda kernel: None) == 0
    (record,) = caplog.records
    assert "3 kernels are compiled at their first launch" in record.getMessage()


def test_an_answer_is_one_piece_of_the_pipe(capfd):
    _answer(3, time.time(), ValueError("\N{SNOWMAN}" * 5000))
    line = capfd.readouterr().out
    assert json.loads(line)["done"] == 3 and len(line) <= select.PIPE_BUF


@pytest.mark.parametrize(
    "path",
    [
        "ops/linear/few_rows/small_matmul.py",
        "ops/tuned/nvidia_h200.json",
        "models/fused_stack.py",
        "engine/executors/gpu/step_sizes.py",
    ],
)
def test_kernels_are_looked_for_again_when_a_source_has_changed(path, tmp_path, monkeypatch):
    copied = shutil.copytree(Path(compilers.__file__).parents[3], tmp_path / "transect")
    monkeypatch.setattr(compilers, "__file__", str(copied / "engine" / "executors" / "gpu" / "compilers.py"))
    before = sources_digest()
    with open(copied / path, "a") as file:
        file.write(" ")
    assert sources_digest() != before


def test_triton_may_be_of_another_package(monkeypatch):
    """``pytorch-triton`` is the same module."""

    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert len(sources_digest()) == 64


def test_no_torch_until_it_has_begun():
    modules = "transect.engine.frontends.llm, transect.engine.executors.gpu.compilers"
    script = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["False"], done.stderr
