"""Pieces of students inside the product: the same tokens and losses as the shipped ones, with proof that they ran."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from commands import run_here
from effort import quick_first
from tiny_llm import save_tiny_llm

from transect import LLM, SamplingParams
from transect.engine.build import scheduler_class
from transect.engine.scheduling.scheduler import Scheduler
from transect.learn.live import Placed, placed, refusal
from transect.learn.live_training import write_run
from transect.learn.registry import all_rungs, get
from transect.learn.rungs.fleet import planned

PROMPTS = ["Hello", "The sea is", "A", "One two three four five six seven eight nine ten", "x y z", "Why"]
ANSWERS = """
import json
import sys

from transect import LLM, SamplingParams

model, settings, sampling, prompts = json.loads(sys.argv[1])
if __name__ == "__main__":
    llm = LLM(model, device="cpu", max_model_len=100, **settings)
    params = SamplingParams(max_tokens=12, ignore_eos=True, **sampling)
    found = [llm.generate(prompts, params) for _ in range(2)]  # the second time prefixes are cached
    print(json.dumps([each.outputs[0].token_ids for answers in found for each in answers]))
"""
GREEDY: dict[str, Any] = {"temperature": 0.0}
SERVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prefix_cache": ({"num_kv_blocks": 12, "max_num_seqs": 4}, GREEDY),
    "paged_attention": ({"native": False, "dtype": "float32"}, GREEDY),
    "sampler": ({}, {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "seed": 3}),
    "tokenizer": ({}, GREEDY),
    "router": ({"data_parallel_size": 2}, GREEDY),
}
OPERATORS = """
import torch

from transect.ops.registry import all_ops, get

all_ops()
op = get({name!r})
run = op.implementations["triton"].load()
for example in op.examples():
    tensors = {{k: v.float() for k, v in example.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}}
    example = {{**example, **tensors}}
    torch.testing.assert_close(run(**example), op.reference(**example), rtol=1e-4, atol=1e-5)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(folder)
    return str(folder)


def reference(name: str, folder: Path) -> Path:
    path = folder / get(name).file
    path.write_text(get(name).solution)
    return path


def python(script: str, *arguments: str, **environment: str) -> str:
    command, space = [sys.executable, "-c", script, *arguments], {**os.environ, **environment}
    done = subprocess.run(command, env=space, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def put_in(here: Placed) -> dict[str, str]:
    return {"PYTHONPATH": here.environment["PYTHONPATH"]}


PLACES = [target for rung in all_rungs().values() if rung.live for target in rung.live.pieces if ":" in target]


@pytest.mark.parametrize("place", PLACES)
def test_the_product_has_the_place_of_each_piece(place: str) -> None:
    name, _, path = place.partition(":")
    assert attrgetter(path)(importlib.import_module(name))


@pytest.mark.parametrize("blocks", [40, 9])
def test_the_students_scheduler_serves_the_same_tokens(model: str, tmp_path: Path, blocks: int) -> None:
    """Also where the pool is so small that it must preempt."""
    settings = {"async_scheduling": False, "enable_prefix_caching": False, "num_kv_blocks": blocks, "max_num_seqs": 4,
                "max_num_batched_tokens": 16, "max_model_len": 100, "device": "cpu"}  # fmt: skip
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    want = [each.outputs[0].token_ids for each in LLM(model, **settings).generate(PROMPTS, params)]
    with placed(get("scheduler"), reference("scheduler", tmp_path)) as here:
        mine = LLM(model, scheduler_cls=f"{here.folder}/piece.py:Piece", **settings)
        assert type(mine._core.scheduler).__name__ == "LiveScheduler"
        assert [each.outputs[0].token_ids for each in mine.generate(PROMPTS, params)] == want
        assert (mine._core.stats().preemptions > 0) == (blocks == 9)
        with pytest.raises(ValueError, match="n = 1"):
            mine.generate(PROMPTS[:1], SamplingParams(n=2, max_tokens=2, temperature=1.0))
        with pytest.raises(ValueError, match="plans no rows with drafts"):
            drafts = {"method": "ngram"}
            LLM(model, scheduler_cls=f"{here.folder}/piece.py:Piece", speculative_config=drafts, **settings)
        assert here.calls()["Scheduler.schedule"] > 20


@pytest.mark.parametrize("name", quick_first(list(SERVED), ["paged_attention"]))
def test_a_piece_in_the_engine_gives_the_same_tokens(model: str, tmp_path: Path, name: str) -> None:
    settings, sampling = SERVED[name]
    asked = json.dumps([model, settings, sampling, PROMPTS])
    with placed(get(name), reference(name, tmp_path)) as here:
        mine = python(ANSWERS, asked, **put_in(here))
        assert any(here.calls().values()) and name in here.report()
    shipped = LLM(model, device="cpu", max_model_len=100, **settings)
    params = SamplingParams(max_tokens=12, ignore_eos=True, **sampling)
    want = [each.outputs[0].token_ids for _ in range(2) for each in shipped.generate(PROMPTS, params)]
    assert json.loads(mine.splitlines()[-1]) == want


@pytest.mark.parametrize("name", quick_first(["adamw", "lora", "pipeline_schedule", "ring_all_reduce"], ["adamw"]))
def test_a_piece_in_training_gives_the_same_losses(tmp_path: Path, name: str) -> None:
    live = get(name).live
    assert live is not None
    settings = dict(live.settings)
    train = "from transect.cli import main; import sys; sys.argv[1:1] = ['train']; main()"
    if settings.get("task") == "lora":
        python(train, str(write_run(tmp_path / "base", 1, {})))
        settings["model"] = str(tmp_path / "base" / "run" / "last")
    with placed(get(name), reference(name, tmp_path)) as here:
        mine = python(train, str(write_run(tmp_path / "mine", 3, settings)), **put_in(here))
        ranks = 2 if "parallel" in settings else 1
        assert f"in {ranks} processes" in here.report() or "in one process" in here.report()
        assert len(list(here.folder.glob("calls.*"))) == ranks
    shipped = run_here("train", str(write_run(tmp_path / "shipped", 3, settings)))
    losses = [[float(each) for each in re.findall(r"loss ([\d.]+)", text)] for text in (mine, shipped.stdout)]
    assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1], abs=2e-4)


@pytest.mark.parametrize("name", quick_first(["rms_norm", "softmax", "gelu", "rope", "vector_add", "total"], 1))
def test_a_kernel_runs_in_the_place_of_the_packages_own(tmp_path: Path, name: str) -> None:
    live = get(name).live
    assert live is not None and live.runs == "ops"
    with placed(get(name), reference(name, tmp_path)) as here:
        python(OPERATORS.format(name=live.options[0]), **put_in(here), TRITON_INTERPRET="1")
        assert any(here.calls().values()), here.calls()


def test_an_autoscaler_runs_in_the_planners_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a morning of two minutes: five fleets serve it in turn."""
    monkeypatch.setattr(planned, "morning", partial(planned.morning, minutes=2))
    text = get("autoscaler").solution
    reference("autoscaler", tmp_path)
    shown = run_here("learn", "use", "autoscaler", "--dir", str(tmp_path))
    space: dict[str, Any] = {}
    exec(text, space)
    trace = planned.requests(planned.morning(0))
    _, late, hours, most = planned.scale(space["decide"], trace, planned.engine(planned.PLACES), planned.CAPACITY)
    assert f"| yours | {late:.1%} | {hours:.2f} | {most} |" in shown.stdout, shown.stderr
    assert "your autoscaler ran in one process" in shown.stdout and "decide" in shown.stdout


def test_a_router_plays_a_recorded_trace_in_the_planners_fleet(tmp_path: Path) -> None:
    reference("router", tmp_path)
    trace = tmp_path / "trace.csv"
    lines = [f"2024-05-10 00:00:{second:02}.0000000+00:00,{90 + 40 * second},{5 + second}" for second in range(12)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    shown = run_here("learn", "use", "router", "--dir", str(tmp_path), "--trace", str(trace)).stdout
    rows = [line.split("|")[2:4] for line in shown.splitlines() if line.startswith(("| yours", "| shipped"))]
    assert len(rows) == 2 and rows[0] == rows[1] and "Router.send 12 times" in shown, shown


def test_a_broken_piece_is_named_with_its_line(tmp_path: Path) -> None:
    path = reference("adamw", tmp_path)
    text = get("adamw").solution
    path.write_text(text.replace("    w.mul_(1 - lr * decay)\n", "    w.mul_(lr / 0)\n"))
    line = 1 + path.read_text().splitlines().index("    w.mul_(lr / 0)")
    failed = run_here("learn", "use", "adamw", "--dir", str(tmp_path), "--steps", "1")
    assert failed.returncode == 2
    assert f"adamw.py, step, line {line}: ZeroDivisionError" in failed.stderr, failed.stderr
    path.write_text("import nothing_at_all\n")
    failed = run_here("learn", "use", "adamw", "--dir", str(tmp_path), "--steps", "1")
    assert "it cannot be loaded, line 1: ModuleNotFoundError" in failed.stderr, failed.stderr


def test_a_rung_without_a_place_is_refused_with_the_reason(tmp_path: Path) -> None:
    for name, rung in all_rungs().items():
        assert bool(refusal(rung)) == (rung.live is None)
        assert not (rung.live and rung.apart), name
        for target in rung.live.pieces if rung.live else ():
            module = target.partition(":")[0]
            assert ":" not in target or module.startswith("transect."), target
    assert "has one pool for all sequences" in refusal(get("kv_cache"))
    with pytest.raises(ValueError, match=r"its idea lives in src/transect/"), placed(get("dot"), tmp_path / "dot.py"):
        pass


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU")
def test_a_kernel_is_refused_without_a_gpu(tmp_path: Path) -> None:
    reference("softmax", tmp_path)
    assert "runs on a GPU only" in run_here("learn", "use", "softmax", "--dir", str(tmp_path)).stderr


def test_a_piece_that_nothing_calls_is_no_proof(tmp_path: Path) -> None:
    with (
        placed(get("router"), reference("router", tmp_path)) as here,
        pytest.raises(ValueError, match="never called your router"),
    ):
        here.report()


def test_a_scheduler_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    assert scheduler_class(None) is Scheduler
    assert scheduler_class("transect.engine.scheduling.scheduler.Scheduler") is Scheduler
    (tmp_path / "other.py").write_text("class Other: pass\n")
    for name in ("nothing.at.all", f"{tmp_path}/gone.py:A", f"{tmp_path}/other.py:Missing"):
        with pytest.raises(ValueError, match=r"FILE\.py:Class"):
            scheduler_class(name)
    with pytest.raises(ValueError, match="subclass"):
        scheduler_class(f"{tmp_path}/other.py:Other")
