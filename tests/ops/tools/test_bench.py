"""``transect bench ops`` on a processor: rows for everybody, what fails is a row, result files grow by operators."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import script_here

from transect.costs.ceilings import Ceilings
from transect.costs.work import Cost
from transect.ops.registry import Case, Implementation, Op, Unavailable, all_ops, get
from transect.ops.tools import bench, bench_run, plots, results
from transect.ops.tools.bench import Timing

LIMITS = Ceilings("a machine", 1e9, 2e9, {"float32": 1e10})


def _op(**more: object) -> Op:
    fields = {
        "name": "double",
        "reference": lambda x: x + x,
        "cost": lambda x: Cost(x.numel(), x.nbytes, x.nbytes),
        "gradient_cost": lambda x: Cost(x.numel(), x.nbytes, x.nbytes),
        "differentiable": ("x",),
        "examples": lambda: [{"x": torch.ones(3, 5)}, {"x": torch.ones(0)}],
    }
    return Op(**{**fields, **more})


def _rows(op: Op, **more: object) -> list[Timing]:
    cases = bench.cases_on(op, torch.device("cpu"))
    return [row for case in cases for row in bench.bench_case(op, case, LIMITS, "cpu", **more)]


def test_every_contender_in_both_directions() -> None:
    double = Implementation("torch", lambda: lambda x: x * 2, ("any",))
    op = _op(peers={"torch": lambda x: 2 * x}, implementations={"torch": double})
    rows = _rows(op)
    assert [(row.contender, row.direction, row.is_peer) for row in rows] == [
        ("torch", "forward", False),
        ("reference", "forward", False),
        ("reference", "backward", False),
        ("torch (peer)", "forward", True),
        ("torch (peer)", "backward", True),
    ]
    assert {row.case for row in rows} == {"example 0, 3x5"}  # the empty example is none
    for row in rows:
        assert row.floor_seconds == pytest.approx(15 * 8 / 2e9)
        assert row.seconds and row.fastest and row.slowest and row.fastest <= row.seconds <= row.slowest
        assert row.of_floor == pytest.approx(row.floor_seconds / row.seconds)


def test_what_fails_is_a_row_with_its_reason() -> None:
    def missing() -> None:
        raise Unavailable("no such library")

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("illegal\n instruction")

    op = _op(
        implementations={"cpu": Implementation("cpu", missing, ("cpu",))},
        peers={"broken": broken, "refused": lambda x: (_ for _ in ()).throw(Unavailable("only odd sizes"))},
    )
    rows = {(row.contender, row.direction): row for row in _rows(op)}
    assert rows["cpu", "forward"].reason == "no such library" and ("cpu", "backward") not in rows
    assert rows["broken", "forward"].reason == "RuntimeError: illegal instruction"
    assert rows["refused", "backward"].reason == "only odd sizes"
    assert rows["broken", "forward"].seconds is None and rows["broken", "forward"].of_floor is None
    assert rows["reference", "forward"].seconds


def test_refused_shapes_directions_and_only() -> None:
    made = Implementation(
        "cpu", lambda: lambda x: x, ("cpu",), refusal=lambda x: "too small" if x.numel() < 9 else None
    )
    op = _op(implementations={"cpu": made}, examples=lambda: [{"x": torch.ones(2)}], directions=("forward", "both"))
    assert [(r.contender, r.direction, r.reason) for r in _rows(op)] == [
        ("cpu", "forward", "too small"),
        ("reference", "forward", ""),
        ("reference", "both", ""),
    ]
    case = Case("one", lambda device, seed: {"x": torch.ones(9)}, "float32", ("forward",), ("cpu",))
    assert [r.contender for r in bench.bench_case(op, case, LIMITS, "cpu") if r.contender != "reference"] == ["cpu"]
    half = Implementation("cpu", lambda: lambda x: x, ("cpu",), dtypes=("bfloat16",))
    assert [r.contender for r in _rows(_op(implementations={"cpu": half}))] == ["reference", "reference"]


def test_floor_is_of_reading_where_little_is_written() -> None:
    limits = Ceilings("a machine", 4e9, 2e9, {"float32": 1e10})
    assert bench.floor_seconds(Cost(0, 1e9, 1e9), limits, "float32") == 1.0
    assert bench.floor_seconds(Cost(0, 4e9, 1e3), limits, "float32") == pytest.approx(1.0, rel=1e-3)
    assert bench.floor_seconds(Cost(3e10, 8, 8), limits, "float32") == 3.0
    with pytest.raises(ValueError, match=r"no rate is known for int8"):
        bench.floor_seconds(Cost(1, 8, 8), limits, "int8")


def test_runs_in_a_process_of_its_own() -> None:
    all_ops()
    rows = list(bench_run.run([get("small_matmul"), get("linear")], LIMITS, "cpu", matching="example 1,"))
    found = {(row.op, row.contender) for row in rows}
    assert {("small_matmul", "reference"), ("linear", "reference"), ("linear", "torch")} <= found
    assert all(row.seconds for row in rows)


WORKER = """
import json, sys, time
job = json.loads(sys.stdin.read())
skip = {tuple(entry) for entry in job["skip"]}
for name, index in job["units"]:
    print(json.dumps({"kind": "unit"}), flush=True)
    for who in ("good", "bad", "late"):
        if (name, index, who, "forward") in skip:
            continue
        print(json.dumps({"kind": "start", "contender": who, "direction": "forward"}), flush=True)
        if name == "sum" and who == "bad":
            MISHAP
        row = {"op": name, "case": str(index), "direction": "forward", "contender": who, "is_peer": False}
        print(json.dumps({"kind": "row", **row}), flush=True)
    print(json.dumps({"kind": "done"}), flush=True)
"""


@pytest.mark.parametrize(
    ("mishap", "reason"), [("time.sleep(60)", "took more than 2 s"), ("sys.exit('gone')", "the process ended (gone)")]
)
def test_outlives_a_process_that_hangs_or_dies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mishap: str, reason: str
) -> None:
    (tmp_path / "fake_tools").mkdir()
    (tmp_path / "fake_tools" / "bench_worker.py").write_text(WORKER.replace("MISHAP", mishap))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(bench_run, "__package__", "fake_tools")
    all_ops()
    said: list[str] = []
    rows = list(bench_run.run([get("sum"), get("dot")], LIMITS, "cpu", matching="example 1,", limit=2, say=said.append))
    assert [(row.op, row.contender, row.reason) for row in rows] == [
        ("sum", "good", ""),
        ("sum", "bad", reason),
        ("sum", "late", ""),
        *(("dot", who, "") for who in ("good", "bad", "late")),
    ]
    assert len(said) == 1 and reason in said[0]


def _timing(op: str, case: str, seconds: float | None = 1e-3, **more: object) -> Timing:
    fields = {"bytes": 1e6, "flops": 1e3, "floor_seconds": 5e-4, "seconds": seconds, "fastest": seconds}
    return Timing(op, case, "forward", "triton", **{**fields, "slowest": seconds, "is_peer": False, **more})


def test_a_result_file_grows_and_forgets_what_was_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    results.merge(path, {"commit": "a"}, [_timing("sum", "1"), _timing("gelu", "1"), _timing("gelu", "2")])
    results.merge(path, {"commit": "b"}, [_timing("gelu", "1", 2e-3)])
    kept = results.read(path)
    assert [(row["op"], row["case"], row["run"]) for row in kept["rows"]] == [
        ("gelu", "2", "1"),
        ("gelu", "1", "2"),
        ("sum", "1", "1"),
    ]
    assert kept["runs"] == {"1": {"commit": "a"}, "2": {"commit": "b"}}
    assert kept["rows"][1]["of_floor"] == 0.25 and results.timing_of(kept["rows"][1]) == _timing("gelu", "1", 2e-3)
    results.merge(path, {"commit": "c"}, [_timing("sum", "1"), _timing("gelu", "2")])
    assert set(results.read(path)["runs"]) == {"2", "3"}


def test_rows_of_cases_that_are_gone_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    results.merge(path, {"commit": "a"}, [_timing("sum", "1"), _timing("gelu", "1")])
    results.merge(path, {"commit": "b"}, [_timing("gelu", "2")])
    before = path.read_text()
    assert results.forget(path, {("sum", "1"), ("gelu", "1"), ("gelu", "2")}) == 0 and path.read_text() == before
    assert results.forget(path, {("gelu", "2"), ("gelu", "3")}) == 2
    kept = results.read(path)
    assert [(row["op"], row["case"]) for row in kept["rows"]] == [("gelu", "2")] and set(kept["runs"]) == {"2"}


@pytest.mark.parametrize("text", ["", "[]", '{"rows": []}'])
def test_a_file_that_is_no_result_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"is not a result file"):
        results.merge(path, {}, [_timing("sum", "1")])
    assert path.read_text() == text


def test_cells() -> None:
    row = _timing("sum", "1", error=3e-3, torch_error=1e-3, allowed_error=2e-3)
    assert results.cells(row)[2:8] == ("1000", "1000 - 1000", "500", "50%", "1 GB/s", "3.00x TOO LARGE")
    assert results.cells(_timing("sum", "1", None, reason="why"))[-1] == "why"


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [_timing("sum", "1"), _timing("sum", "1", 2e-3, is_peer=True), _timing("dot", "1", None, reason="why")]
    files = plots.draw(rows, LIMITS, tmp_path)
    assert [path.name for path in files] == ["sum.png", "roofline.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)


def test_rows_of_a_later_run_of_numerics_take_the_place_of_those_kept(tmp_path: Path) -> None:
    def run(commit: str, *rows: tuple[str, float]) -> dict[str, Any]:
        made = [{"op": op, "implementation": "triton", "dtype": "float32", "ratio": ratio} for op, ratio in rows]
        return {"command": commit, "environment": {"commit": commit}, "rows": made}

    kept, new = tmp_path / "kept.json", tmp_path / "new.json"
    kept.write_text(json.dumps(run("old", ("gelu", 1.0), ("adamw", 2.0), ("gone", 3.0))))
    new.write_text(json.dumps(run("new", ("adamw", 4.0), ("softmax", 5.0))))
    script = Path(__file__).parents[3] / "benchmarks" / "checks" / "numerics.py"
    assert script_here(script, str(kept), "--merge", str(new)).returncode == 0
    merged = json.loads(kept.read_text())
    found = {row["op"]: (row["ratio"], row["commit"]) for row in merged["rows"]}
    assert found == {"adamw": (4.0, "new"), "gelu": (1.0, "old"), "softmax": (5.0, "new")}
    assert merged["command"] == "new"


def test_a_check_on_a_processor_compares_what_runs_there_and_triton_s_kernels() -> None:
    pytest.importorskip("triton")
    right = get("vector_add")
    kernel = right.implementations["triton"]
    off = replace(kernel, autograd=None, load=lambda: lambda x, y: kernel.load()(x, y) * 1.01)
    nan = replace(kernel, backend="torch", autograd=None, load=lambda: lambda x, y: (x + y) / (x * 0))
    op = replace(right, implementations={"right": kernel, "off": off, "nan": nan}, differentiable=(), peers={})
    rows = {row.contender: row for row in _rows(op, check=True) if row.case.startswith("example 0,")}
    assert not rows["right"].wrong and rows["right"].error is not None and rows["right"].seconds is None
    assert rows["off"].wrong and "TOO LARGE" in results.cells(rows["off"])[7]
    assert rows["nan"].wrong and "NaN" in rows["nan"].reason
    assert not any(row.wrong for row in _rows(op))  # nobody asked


@pytest.mark.prove
def test_the_measuring_process_of_a_check_on_a_processor_interprets_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pytest.importorskip("triton")
    all_ops()
    rows = list(bench_run.run([get("vector_add")], LIMITS, "cpu", check=True, matching="example 1,"))
    (row,) = [row for row in rows if (row.contender, row.direction) == ("triton", "forward")]
    assert row.error is not None and not row.wrong
