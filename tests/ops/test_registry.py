"""What every entry of the registry must say, so that benchmarks, inspection and docs can be made from it alone."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from transect.hardware import targets
from transect.ops.lang import cuda_build
from transect.ops.registry import OnHost, Op, all_ops, get
from transect.ops.tuning import bucket_name

OPS = all_ops()
TARGETS = {"any", "cpu", *targets.TARGETS}


@pytest.fixture(params=OPS, ids=lambda op: op.name)
def op(request: pytest.FixtureRequest) -> Op:
    return request.param


def test_examples_and_cost(op: Op) -> None:
    examples = op.examples()
    assert len(examples) >= 2
    for example in examples:
        for cost in [op.cost(**example)] + ([op.gradient_cost(**example)] if op.gradient_cost else []):
            assert cost.flops >= 0 and cost.bytes_read >= 0 and cost.bytes_written >= 0
    assert any(op.cost(**example).bytes > 0 for example in examples)
    assert op.gradient_cost is None or op.differentiable


def test_measured_somewhere(op: Op) -> None:
    """Cases and peers of its own, or of the operators whose kernels it runs."""
    if op.measured_as:
        assert all(get(name).cases() for name in op.measured_as)
        return
    assert op.cases(), f"{op.name} has no cases"
    assert any(not isinstance(peer, OnHost) for peer in op.peers.values()), f"{op.name} has no peers"


def test_cases_are_told_apart(op: Op) -> None:
    names = [case.name for case in op.cases()]
    assert len(set(names)) == len(names)
    known = {*op.implementations, *op.peers}
    for case in op.cases():
        assert set(case.only) <= known, case.name
        assert set(case.directions) <= set(op.directions), case.name


def test_implementations(op: Op) -> None:
    launched = {kernel.implementation for kernel in op.kernels()}
    for name, made in op.implementations.items():
        assert made.targets and set(made.targets) <= TARGETS
        assert made.dtypes and all(hasattr(torch, dtype) for dtype in made.dtypes)
        if made.backend == "cuda":
            assert cuda_build.source(made.source).is_file()
        if made.backend == "triton" and name in ("triton", *launched) and not op.measured_as:
            assert name in launched, f"{op.name}: no kernel is declared for {name}"
    assert launched <= set(op.implementations)


def test_kernels_name_every_argument(op: Op) -> None:
    pytest.importorskip("triton")
    names = [kernel.name for kernel in op.kernels()]
    assert len(set(names)) == len(names)
    for kernel in op.kernels():
        wanted = set(kernel.function.arg_names)
        assert wanted == {*kernel.arguments, *kernel.constants} & wanted, kernel.name


def test_knobs(op: Op) -> None:
    for knobs in op.knobs():
        assert all(len(values) >= 1 for values in knobs.choices.values())
        sizes = [1, 1000, 4096]
        for case in op.cases()[:1]:
            if torch.cuda.is_available():
                sizes = [knobs.size(case.make(torch.device("cuda"), 0))]
        for size in sizes:
            try:
                fixed = knobs.heuristic(size)
            except TypeError:
                continue  # keyed on several sizes at once, which only its cases know
            assert set(fixed) & set(knobs.choices), knobs.name
            assert bucket_name(size)


def test_page_of_the_operator(op: Op) -> None:
    """The docstring of its file says what it computes, the shapes, and what bounds it."""
    text = sys.modules[op.reference.__module__].__doc__ or ""
    assert len(text.splitlines()) >= 5
    assert "ound" in text and ("hape" in text or "[" in text), f"{op.name}: say shapes and what bounds it"


def test_names_are_sorted_and_known() -> None:
    assert all(a.name < b.name for a, b in pairwise(OPS))
    with pytest.raises(ValueError, match=r"no operator 'matmull'; did you mean 'matmul'\?"):
        get("matmull")
    with pytest.raises(ValueError, match=r"no operator 'nothing'; there are: "):
        get("nothing")


def test_every_cuda_source_belongs_to_an_implementation() -> None:
    """``benchmarks/checks/sanitize_cuda.py`` runs those, and what it names: so no source goes unwatched."""
    named = {made.source for op in OPS for made in op.implementations.values() if made.backend == "cuda"}
    watched = {"scaled8_chain.cu", "int4_chain.cu", "gguf_chain.cu", "gguf_row.cu"}  # parts of operators, or several
    program = (Path(__file__).parents[2] / "benchmarks" / "checks" / "sanitize_cuda.py").read_text()
    assert all(f"``{name}``" in program for name in watched)
    assert {path.name for path in cuda_build.sources()} == named | watched
