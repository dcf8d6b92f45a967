"""``transect trace``: what is recorded is what the kernels do, and nothing stays changed behind it."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_here

pytest.importorskip("triton")

from transect.ops.first.vector_add import triton_add
from transect.ops.lang.jit import INTERPRETED, kernel, tl
from transect.ops.registry import Implementation, Unavailable, all_ops, get
from transect.ops.tools import trace_view
from transect.ops.tools.trace import OUTSIDE, Launch, follow, recording

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are followed in the interpreter, which is off here")
all_ops()


def _elements(launch: Launch, program: int, kind: str, argument: str) -> list[set[int]]:
    chosen = [a for a in launch.of((program, 0, 0)) if a.kind == kind and a.argument == argument]
    return [set(access.elements.tolist()) for access in chosen]


def _box(rows: range, columns: range, width: int) -> set[int]:
    return {row * width + column for row in rows for column in columns}


def test_vector_add_element_by_element() -> None:
    x, y = torch.randn(2, 20)
    with recording() as launches:
        z = triton_add(x, y, config={"block": 8, "warps": 1})
    (launch,) = launches
    assert torch.equal(z, x + y)
    assert launch.grid == (3, 1, 1) and launch.stored() == ["z_ptr"]
    for program in range(3):
        own = set(range(8 * program, min(20, 8 * program + 8)))
        for kind, argument in (("load", "x_ptr"), ("load", "y_ptr"), ("store", "z_ptr")):
            assert _elements(launch, program, kind, argument) == [own]
        assert {access.masked for access in launch.of((program, 0, 0))} == {8 - len(own)}


def test_matmul_s_tile_order_is_the_formula_s() -> None:
    chosen, (launch,) = follow(get("matmul"))
    rows, columns, group, side, k = 3, 4, 2, 4, 8
    assert launch.grid == (rows * columns, 1, 1)
    seen = set()
    for program in range(rows * columns):
        first = program // (group * columns) * group
        height = min(rows - first, group)
        i = first + program % (group * columns) % height
        j = program % (group * columns) // height
        seen.add((i, j))
        tile_rows, tile_columns = range(side * i, side * i + side), range(side * j, side * j + side)
        assert _elements(launch, program, "store", "out") == [_box(tile_rows, tile_columns, columns * side)]
        steps = [range(start, start + side) for start in range(0, k, side)]
        assert _elements(launch, program, "load", "x") == [_box(tile_rows, step, k) for step in steps]
        assert _elements(launch, program, "load", "weight") == [_box(tile_columns, step, k) for step in steps]
    assert len(seen) == rows * columns
    inputs = chosen.arguments()
    torch.testing.assert_close(launch.arguments["out"].value, inputs["x"] @ inputs["weight"].T)


def test_picture_of_the_tile_order() -> None:
    _, (launch,) = follow(get("matmul"))
    stores = [access for access in launch.accesses if access.kind == "store"]
    matrix, note = trace_view.as_matrix(launch.arguments["out"], trace_view.numbers(launch, "out", stores))
    assert note == ""
    rows, columns = trace_view.tiles(matrix)
    assert rows == [(0, 4), (4, 8), (8, 12)] and columns == [(0, 4), (4, 8), (8, 12), (12, 16)]
    order = [[matrix[row[0], column[0]] for column in columns] for row in rows]
    assert order == [["0", "2", "4", "6"], ["1", "3", "5", "7"], ["8", "9", "10", "11"]]


def test_flash_attention_s_running_maximum_and_sum() -> None:
    chosen, launches = follow(get("flash_attention"))
    launch = next(made for made in launches if made.steps)
    inputs = chosen.arguments()
    q, k, v = (inputs[name][:, 0].double().numpy() for name in "qkv")
    scores = q @ k.T * inputs["scale"] * np.log2(np.e)
    out = launch.arguments["out"].value[:, 0].double().numpy()
    checked = 0
    for program in launch.programs:
        stores = _elements(launch, program[0], "store", "out")
        if not stores:
            continue  # a tile past the end
        queries = sorted({element // q.shape[1] for element in stores[0]})
        steps = [step for step in launch.steps if step.program == program]
        size = 4
        assert [step.values["start"] for step in steps] == list(range(0, queries[-1] + 1, size))
        before = np.full(len(queries), -np.inf)
        for step in steps:
            end = step.values["start"] + size
            seen = np.stack([np.where(np.arange(len(k)) <= i, scores[i], -np.inf)[:end] for i in queries])
            peak = seen.max(1)
            np.testing.assert_allclose(step.values["m"], peak, rtol=1e-5)
            np.testing.assert_allclose(step.values["l"], np.exp2(seen - peak[:, None]).sum(1), rtol=1e-5)
            np.testing.assert_allclose(step.values["fade"], np.exp2(before - peak), rtol=1e-5, atol=1e-7)
            before = peak
            checked += 1
        weights = np.exp2(seen - peak[:, None])
        np.testing.assert_allclose(
            out[queries], weights / weights.sum(1, keepdims=True) @ v[:end], rtol=1e-4, atol=1e-6
        )
    assert checked == 1 + 2 + 3


def test_nothing_stays_changed() -> None:
    from triton.runtime import interpreter

    before, tracer = interpreter.GridExecutor.__call__, sys.gettrace()
    x = torch.ones(4)
    with pytest.raises(ValueError, match="stop"), recording(("_add_kernel", "x")) as launches:
        triton_add(x, x)
        raise ValueError("stop")
    assert len(launches) == 1 and launches[0].steps
    assert interpreter.GridExecutor.__call__ is before
    assert not [name for name in vars(interpreter.interpreter_builder) if name.startswith("create_")]
    assert sys.gettrace() is tracer
    triton_add(x, x)
    assert len(launches) == 1


@kernel
def _past_the_end(x_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(x_ptr + index, index.to(tl.float32))


def test_an_access_outside_of_every_argument_is_seen() -> None:
    room = torch.zeros(8)
    with recording() as launches:
        _past_the_end[(1,)](room[:6], BLOCK=8)
    (access,) = trace_view.outside(launches[0])
    assert access.kind == "store" and access.argument == OUTSIDE


def test_strided_arguments_and_several_accesses_of_one_program() -> None:
    x = torch.arange(24.0).view(4, 6)[:, ::2]
    with recording() as launches:
        get("sum").implementations["triton"].load()(x, config={"block": 4, "warps": 1, "waves": 1, **_rest("sum", x)})
    loads = [a for launch in launches[:1] for a in launch.accesses if a.kind == "load"]
    assert set(np.concatenate([a.elements for a in loads]).tolist()) == set(range(12))
    texts = trace_view.numbers(launches[0], loads[0].argument, loads)
    assert all(texts)


def _rest(name: str, x: torch.Tensor) -> dict:
    knobs = get(name).knobs()[0]
    return {k: v for k, v in knobs.heuristic(x.numel()).items() if k not in ("block", "warps", "waves")}


WITH_KERNELS = [op for op in all_ops() if any(made.backend == "triton" for made in op.implementations.values())]


@pytest.mark.parametrize("op", WITH_KERNELS, ids=lambda op: op.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_operator_with_a_triton_kernel_can_be_followed(op) -> None:
    if op.name == "adamw":
        pytest.skip("it reads addresses from a table, so its accesses belong to no argument that a trace could name")
    _, launches = follow(op)
    assert launches
    for launch in launches:
        assert launch.stored()
        assert trace_view.outside(launch) == [], launch.kernel


def test_what_cannot_run_here_is_passed_over() -> None:
    def absent() -> Callable[..., torch.Tensor]:
        raise Unavailable("needs a machine that is not here")

    added = get("vector_add")
    here, elsewhere = added.implementations["triton"], Implementation("triton", absent, ("sm_90",))
    op = replace(added, trace=None, implementations={"elsewhere": elsewhere, "here": here})
    assert [launch.kernel for launch in follow(op)[1]] == ["_add_kernel"]
    with pytest.raises(Unavailable, match=r"vector_add \(elsewhere\): needs a machine"):
        follow(replace(op, implementations={"elsewhere": elsewhere}))
    with pytest.raises(ValueError, match="no Triton kernel"):
        follow(replace(op, implementations={"cuda": added.implementations["cuda"]}))


def test_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run_here("trace", "matmul", "--plot", str(tmp_path / "a.png"), "--program", "5")
    assert done.returncode == 0, done.stderr
    assert "read by program 5" in done.stdout and "[4:8, 8:12]" in done.stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    done = run_here("trace", "matmul", "--program", "12")
    assert done.returncode == 2 and "programs of this run are 0 to 11" in done.stderr
