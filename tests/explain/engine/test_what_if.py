"""A counterfactual replay predicts what the changed run does: checked against runs whose steps take known times."""

import dataclasses
import json
import random

import msgspec
import pytest
from commands import run_here
from decision_logs import log_for

from transect.costs.fitting import FittedSteps
from transect.costs.steps import StepLoad
from transect.engine.decision_setup import _plain
from transect.engine.executors.runner import CompletedStep
from transect.engine.scheduling.batch import StepResult
from transect.engine.scheduling.clock import VirtualClock
from transect.engine.scheduling.core import EngineCore
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler import Scheduler
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.explain.engine.calibration import calibrated, drift, measured_steps
from transect.explain.engine.log import build
from transect.explain.engine.rates import rates_for
from transect.explain.engine.simulate import recorded
from transect.explain.engine.what_if import parse, what_if
from transect.explain.engine.work import StepWork
from transect.spec.shapes import PRESETS

LIMITS = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 8, "max_model_len": 200, "seed": 0}


class Lawful:
    """A device on which a step takes 2 ms, and 0.1 ms a token up to 32 tokens, then 0.3 ms for each further one."""

    def __init__(self, clock):
        self.clock, self.random = clock, random.Random(1)

    def submit(self, batch):
        tokens, keys = batch.num_tokens, sum(row.end for row in batch.rows)
        seconds = 2e-3 + 1e-4 * min(tokens, 32) + 3e-4 * max(0, tokens - 32) + 1e-6 * keys
        self.clock.advance(seconds * self.random.uniform(0.97, 1.03))
        return CompletedStep(StepResult({draw.seq_id: 7 for row in batch.rows for draw in row.draws}))


def run(file=None, **limits):
    """Sixty requests that come at random, as a log."""
    clock, rng = VirtualClock(), random.Random(0)
    scheduler = Scheduler(SchedulerConfig(**(LIMITS | {"max_num_batched_tokens": 64} | limits)), clock)
    core = EngineCore(scheduler, Lawful(clock))
    core.decisions = log_for(core, file=file)
    arrivals, at = [], 0.0
    for number in range(60):
        at += rng.expovariate(40)
        prompt = tuple(rng.randrange(9999) for _ in range(rng.randrange(4, 120)))
        params = SamplingParams(max_tokens=rng.randrange(4, 40), ignore_eos=True)
        arrivals.append((at, Request(str(number), prompt, params, arrival_time=at)))
    while arrivals or core.has_work:
        if not core.has_work:
            clock.advance(max(0.0, arrivals[0][0] - clock.now()))
        while arrivals and arrivals[0][0] <= clock.now():
            core.add(arrivals.pop(0)[1])
        core.step()
    core.decisions.close()
    return build(core.decisions.ring.records())


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    file = tmp_path_factory.mktemp("log") / "run.bin"
    return run(file), file


def test_step_times_are_learnt(log):
    work = StepWork.of(log[0].header, None)
    model, (errors, followed) = calibrated(log[0], work)
    assert errors.median < 0.05 and errors.p99 < 0.15 and followed.p99 < 0.15
    assert drift(model, *measured_steps(log[0], work)) is None
    slower = [2 * seconds for seconds in measured_steps(log[0], work)[1]]
    assert drift(model, measured_steps(log[0], work)[0], slower).startswith("StepTimeDrift")


@pytest.mark.parametrize("change", [{"max_num_batched_tokens": 16}, {"max_num_seqs": 3}, {"num_blocks": 55}])
def test_a_change_is_predicted(log, change):
    """Within a tenth of what a run with that change measures."""
    found = what_if(log[0], StepWork.of(log[0].header, None), [f"{k}={v}" for k, v in change.items()])
    truth = recorded(run(**change))
    for kind in ("ttft", "itl"):
        for name in ("p50", "p99"):
            assert getattr(found.predicted, kind)[name] == pytest.approx(getattr(truth, kind)[name], rel=0.1)
    assert found.predicted.tokens_per_second == pytest.approx(truth.tokens_per_second, rel=0.1)
    assert found.predicted.output_tokens == truth.output_tokens == found.measured.output_tokens


def on_a_gpu(log):
    """The same log, as if it were of an 8B model on an H200."""
    header = msgspec.structs.replace(
        log.header,
        model=_plain(PRESETS["llama-3.1-8b"]),
        device={"kind": "cuda", "name": "NVIDIA H200", "dtype": "bfloat16"},
    )
    return dataclasses.replace(log, header=header)


@pytest.mark.parametrize(
    ("change", "faster"),
    [
        ("preset=l4", 0.3),
        ("preset=b200", 1.2),
        ("quantization=int4", 1.5),
        ("quantization=fp8", 1.2),
        ("batching=static", 0.0),
    ],
)
def test_another_device_format_or_policy(log, change, faster):
    """Step times are scaled by the floors: less bandwidth takes longer, fewer bytes take less."""
    seen = on_a_gpu(log[0])
    work = StepWork.of(seen.header, rates_for(seen.header, "h200"))
    found = what_if(seen, work, [change])
    scale = found.same.itl["p50"] / found.predicted.itl["p50"]
    if not faster:
        assert found.predicted.ttft["p50"] > 1.5 * found.same.ttft["p50"] and not found.warnings
        return
    assert scale > faster if faster > 1 else scale < faster
    assert any("scaled by the floors" in warning for warning in found.warnings)
    with pytest.raises(ValueError, match="one of int4, fp8, int8, null"):
        what_if(seen, work, ["quantization=int5"])


def test_the_command(log):
    done = run_here("explain", "replay", str(log[1]), "--set", "max_num_seqs=3")
    assert done.returncode == 0 and "TTFT p99" in done.stdout and "changed: max_num_seqs=3" in done.stdout
    found = json.loads(run_here("explain", "replay", str(log[1]), "--set", "max_num_seqs=3", "--json").stdout)
    assert found["predicted"]["ttft"]["p50"] > found["measured"]["ttft"]["p50"]
    for setting, words in (
        ("max_num_seqs", "name=value"),
        ("max_seqs=3", "no such setting"),
        ("max_num_seqs=0", "at least 1"),
        ("max_num_batched_tokens=2", "max_num_seqs"),
        ("preset=h200", "scales by floors"),
    ):
        failed = run_here("explain", "replay", str(log[1]), "--set", setting)
        assert failed.returncode == 2 and words in failed.stderr


def test_settings_are_json_or_text():
    assert parse(["a=1", "b=static", "c=null", "d=0.5"]) == {"a": 1, "b": "static", "c": None, "d": 0.5}


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="at least 20 steps"):
        FittedSteps.fit([StepLoad(1, 1, 1, 1)] * 5, [1.0] * 5)
