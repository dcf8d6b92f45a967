"""Layouts, ranked: what fits comes first, reasons are true, and what is refused names what would fit."""

from dataclasses import replace

import pytest

from transect.cli import main
from transect.costs.machine import Machine
from transect.costs.memory.training_plan import TrainingPlan
from transect.costs.memory.training_ranks import training_ranks
from transect.costs.presets import preset
from transect.plan import layouts
from transect.plan.layouts import rank, spreads, what_would
from transect.spec.shapes import PRESETS

H100 = Machine.of(preset("h100-80gb"))
LLAMA_1B, LLAMA_8B = PRESETS["llama-3.2-1b"], PRESETS["llama-3.1-8b"]
PLAN = TrainingPlan(precision="mixed", seq_len=4096, merged=True)


def test_every_layout_once_and_all_ranks_used():
    found = list(spreads(8, H100))
    assert len(found) == len(set(found)) and all(spread.ranks == 8 for spread in found)
    assert {spread.zero for spread in found if spread.data == 8} == {0, 1, 2, 3}
    schedules = {(s.schedule, s.chunks) for s in found if s.pipeline > 1}
    assert schedules == {("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved", 8)}
    assert all(s.schedule == "1f1b" for s in found if s.pipeline == 1)
    assert all(s.tensor * s.context <= 8 for s in spreads(32, H100))
    assert {(s.tensor, s.pipeline, s.context) for s in spreads(8, H100, axes=["data"])} == {(1, 1, 1)}


def test_the_best_is_the_fastest_of_what_fits():
    found = rank(LLAMA_8B, PLAN, 8, H100, 8 * 32768)
    assert found.best is not None and len(found.fitting) > 10
    rates = [each.time.tokens_per_second for each in found.fitting]
    assert rates == sorted(rates, reverse=True)
    for each in found.fitting[:5]:
        needed = max(stage.estimate.needed for stage in training_ranks(LLAMA_8B, each.plan, each.spread))
        assert needed == each.estimate.needed <= H100.memory_bytes
        assert each.time.tokens == pytest.approx(8 * 32768, rel=0.3)
    assert all(other.estimate.needed > H100.memory_bytes for other in found.others)
    assert any(other.spread.data == 8 and not other.spread.zero for other in found.others)  # 16 bytes a number
    reasons = found.reasons()
    assert reasons and all("slower" in line or "faster" in line for line in reasons)


def test_shorter_waits_win_where_stages_wait():
    found = rank(LLAMA_8B, PLAN, 8, H100, 8 * 32768, axes=["pipeline"])
    assert found.best is not None and found.best.spread.schedule == "interleaved"
    assert 'schedule = "interleaved", chunks = ' in found.best.settings and "interleaved" in str(found.best.spread)
    plain = next(each for each in found.fitting if each.spread.schedule == "1f1b")
    assert plain.time.bubble > found.best.time.bubble
    assert any("cannot be cut into" in why for _, why in found.refused)


def test_one_gpu_that_is_enough_needs_no_advice():
    found = rank(LLAMA_1B, PLAN, 1, H100, 32768)
    assert found.best is not None and found.best.spread.ranks == 1 and found.reasons() == []


def test_where_nothing_fits_what_would_does():
    found = rank(LLAMA_8B, PLAN, 1, H100, 32768)
    assert found.best is None
    lines = what_would(LLAMA_8B, PLAN, found, H100, 32768)
    assert any(line.startswith("devices with") for line in lines) and any("--offload" in line for line in lines)
    gpus = next(int(line.split()[1]) for line in lines if line.startswith("--gpus"))
    assert rank(LLAMA_8B, PLAN, gpus, H100, 32768).best is not None
    assert rank(LLAMA_8B, replace(PLAN, task="lora"), 1, H100, 32768).best is not None
    assert any("--task lora" in line for line in lines)


def test_devices_that_could_never_do_are_not_tried(monkeypatch):
    """Each number of devices takes seconds; 1 GB a device is too little even if 64 share every byte."""
    tried = []

    def counted(config, plan, gpus, *rest, **options):
        tried.append(gpus)
        return rank(config, plan, gpus, *rest, **options)

    monkeypatch.setattr(layouts, "rank", counted)
    found = rank(LLAMA_8B, PLAN, 1, H100, 32768, budget=10**9)
    assert not any("--gpus" in line for line in what_would(LLAMA_8B, PLAN, found, H100, 32768)) and set(tried) == {1}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--gpu", "epyc", "--gpus", "1"), "change the settings"),
        (("--gpus", "16", "--axes", "tensor"), "within hosts of 8"),
    ],
)
def test_where_no_layout_can_be_memory_is_not_the_reason(capsys, arguments, why):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "training", "llama-3.2-1b", *arguments])
    said = capsys.readouterr().err
    assert stopped.value.code == 1 and said.startswith("no layout can be used") and why in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "a100"), "'a100' is the beginning of a100-40gb, a100-80gb"),
        (("--gpu", "tpu"), "no preset"),
        (("--axes", "data,depth"), "not depth"),
        (("--tokens", "100"), "less than one sequence"),
        (("--gpus", "5000"), "between 1 and"),
        (("--memory", "much"), "80GB"),
        (("--set", "parallel.data=2"), "--set parallel.data: this is chosen for each layout"),
        (("--set", "data.seq_len=9"), "give that"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "training", "llama-3.2-1b", *arguments])
    said = capsys.readouterr()
    assert stopped.value.code == 2 and message in said.err and said.err.count("\n") == 1


def test_the_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "training", "llama-3.2-1b", "--gpus", "2", "--gpu", "h200", "--axes", "data"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0 and "best: dp 2" in out and "[parallel] data = 2" in out
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "training", "llama-3.1-8b", "--gpus", "1", "--memory", "40GB"])
    said = capsys.readouterr()
    assert stopped.value.code == 1 and "nothing fits" in said.err and "--gpus" in said.err
