"""The commands that look at operators and devices: what they print, and what they say to mistakes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from transect.cli import main
from transect.costs.ceilings import Ceilings
from transect.hardware import cpu, measured
from transect.ops import registry
from transect.ops.cpu import ceilings
from transect.ops.tools import bench, bench_run

LIMITS = Ceilings("a processor", 1e10, 2e10, {"float32": 1e11}, 1e-6, memory_bytes=10**9)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu, "measure", lambda: LIMITS)
    # The empty cache has no C++ kernels: they would be compiled in every test.
    monkeypatch.setattr(ceilings, "load", lambda threads: None)
    monkeypatch.setattr(ceilings, "multiply_adds", lambda library: 5e10)
    monkeypatch.setattr(measured, "cpu_load", lambda: 0.0)  # a busy machine would be waited for


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    written = capsys.readouterr()
    return int(stop.value.code or 0), written.out, written.err


def test_hardware_as_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "hardware", "--device", "cpu")
    assert code == 0 and "10.0 GB/s" in out and "20.0 GB/s" in out and "0.10 TFLOP/s" in out
    code, out, _ = run(capsys, "hardware", "--device", "cpu", "--json")
    found = json.loads(out)
    assert code == 0 and found["ceilings"]["copy_bytes_per_second"] == 2e10 and found["device"]["kind"] == "cpu"


def test_the_place_of_the_file_is_whole_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run(capsys, "hardware", "--device", "cpu")
    (file,) = tmp_path.rglob("*.json")
    assert "".join(str(file).split()) in "".join(out.split())


def test_a_trace_of_masked_elements_is_quiet() -> None:
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-m", "transect", "trace", "softmax"], capture_output=True, text=True)
    assert done.returncode == 0 and "program 0, in order" in done.stdout and not done.stderr


def test_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert "rtx-4090" in run(capsys, "hardware", "--preset", "list")[1]
    code, out, _ = run(capsys, "hardware", "--preset", "mi300x", "--json")
    assert code == 0 and json.loads(out)["bytes_per_second"] == 5.3e12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hardware", "--preset", "tpu"), "no preset 'tpu'; there are: a10, a100-40gb"),
        (("hardware", "--device", "tpu"), "'tpu'"),
        (("bench", "ops", "nothing"), "no operator 'nothing'; there are: "),
        (
            ("bench", "ops", "kv_cache_write", "--device", "cpu", "--case", "nothing"),
            "no case's name contains 'nothing'",
        ),
        (("trace", "nothing"), "no operator 'nothing'"),
    ],
    ids=["preset", "device", "operator", "case", "trace"],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and message in err and len(err.splitlines()) == 1 and "Traceback" not in err + out


def test_operators_and_their_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bench", "ops", "vector_add", "linear", "--list", "--device", "cpu")
    assert code == 0 and out.startswith("vector_add\n  example 0, 5000\n")


def test_help_loads_neither_torch_nor_triton() -> None:
    program = (
        "import sys\n"
        "from transect.cli import main\n"
        "try:\n"
        "    main(['bench', 'ops', '--help'])\n"
        "except SystemExit:\n"
        "    print([name for name in ('torch', 'triton', 'numpy', 'matplotlib') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_without_triton_a_trace_says_what_to_install(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """Builds of torch for processors bring none."""
    monkeypatch.setattr("transect.ops.tools.trace.triton", None)
    code, out, err = run(capsys, "trace", "vector_add")
    assert (code, out) == (2, "")
    assert err == "transect: error: Triton is not installed: pip install 'transect[gpu]'\n"


@pytest.mark.parametrize(
    ("kernel", "code", "words"),
    [
        ("right", 0, ""),
        ("wrong", 1, "transect: wrong: vector_add, example 0, 5000, triton forward: error "),
        ("raises", 1, "triton forward: RuntimeError: out of bounds"),
        ("missing", 1, "transect: vector_add was not compared with float64 (triton: no compiler)"),
    ],
)
def test_a_broken_kernel_fails_the_check(capsys, monkeypatch, kernel: str, code: int, words: str) -> None:
    pytest.importorskip("triton")
    everything, right = registry.all_ops(), registry.get("vector_add")
    made = right.implementations["triton"]

    def load():
        if kernel == "missing":
            raise registry.Unavailable("no compiler")
        return broken if kernel != "right" else made.load()

    def broken(x, y):
        if kernel == "raises":
            raise RuntimeError("out of bounds")
        return made.load()(x, y) + 1e-3

    op = replace(right, implementations={"triton": replace(made, load=load)}, differentiable=(), peers={})

    def here(ops, ceilings, device, *, check, matching, **_):
        cases = [case for case in bench.cases_on(op, torch.device(device)) if matching in case.name]
        return (row for case in cases for row in bench.bench_case(op, case, ceilings, device, check=check))

    monkeypatch.setattr(bench_run, "run", here)
    monkeypatch.setattr(registry, "all_ops", lambda: everything)
    found, _, err = run(capsys, "bench", "ops", "vector_add", "--check", "--device", "cpu", "--case", "example 0,")
    assert found == code and words in err and bool(err) == bool(words)
    assert run(capsys, "bench", "ops", "vector_add", "--device", "cpu", "--case", "example 0,")[0] == 0
