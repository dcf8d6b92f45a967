"""A profile that is fitted on a sweep of a server with known step times predicts other loads on it."""

import json
import random
from itertools import repeat

import msgspec
import pytest
from commands import run_here
from decision_logs import log_for

from transect.bench.lengths import Lengths
from transect.bench.levels import Level, Result
from transect.bench.load import Record
from transect.bench.traces.asked import Asked
from transect.bench.traces.json_lines import write_lines
from transect.bench.traces.mix import Mix
from transect.costs.steps import StepLoad
from transect.costs.warmth import Slowdown
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.engine.scheduling.simulation import SimulatedEngine
from transect.explain.engine.log import build
from transect.plan.calibrate import profile, sweep
from transect.plan.capacity import summary_of
from transect.plan.fleet import EngineModel, Fleet
from transect.plan.profile import MeasuredChoice, Profile

INTAKE, OUTLET, HOST = 4e-3, 2e-3, 5e-4
LIMITS = SchedulerConfig(
    num_blocks=300, max_num_seqs=8, max_num_batched_tokens=96, max_model_len=400, itl_target=0.0, seed=0
)  # fmt: skip


def seconds(load):
    """A device on which a step takes 4 ms, and its tokens, rows and positions some time each."""
    return 4e-3 + 1.5e-4 * load.tokens + 2e-4 * load.rows + 2e-7 * (load.keys + load.pairs)


def of_batch(batch):
    return seconds(StepLoad.of((row.start, row.num_tokens) for row in batch.rows))


def measured(parts, warming=None):
    """The decision log and the clients' records of requests, as lists of (second, prompt tokens, output tokens)."""
    engine = SimulatedEngine(LIMITS, of_batch, host=HOST, warming=warming)
    engine.core.decisions = log_for(engine.core)
    results, number = [], 0
    for part in parts:
        records, names = [], {}
        for at, prompt, outputs in part:
            engine.run(at + INTAKE)
            params = SamplingParams(max_tokens=outputs, ignore_eos=True)
            engine.add(Request(str(number), (number + 7,) * prompt, params, arrival_time=at), [repeat(number)])
            records.append(Record(at, at, input_tokens=prompt, output_tokens=outputs))
            names[str(number)] = records[-1]
            number += 1
        engine.run()
        for line in engine.done:
            record = names[line.request_id]
            record.moments = [moment + OUTLET for moment in line.moments]
            record.ended = record.moments[-1]
        engine.done.clear()
        results.append(Result(Level("at a time", 1, []), {"seconds": engine.clock.time}, records))
    return build(engine.core.decisions.ring.records()), results


def sweep_of(warming=None):
    rng = random.Random(3)
    alone = [(1.5 * number, rng.randrange(8, 90), rng.randrange(4, 20)) for number in range(12)]
    crowd = [(20 + 0.12 * number, rng.randrange(8, 120), rng.randrange(4, 30)) for number in range(120)]
    return measured([alone, crowd], warming)


@pytest.fixture(scope="module")
def made():
    log, results = sweep_of()
    return profile(log, results, None, "a model", {"commit": "none"})


def test_a_sweep_tells_step_times_and_what_is_outside(made, tmp_path):
    assert made.intake == pytest.approx(INTAKE, rel=0.05) and made.outlet == pytest.approx(OUTLET, rel=0.05)
    assert made.errors["median"] < 0.02 and made.errors["p99"] < 0.06
    made.write(tmp_path / "p.json")
    again = Profile.read(tmp_path / "p.json")
    assert again.engine.scheduler == made.engine.scheduler and again.steps["host_seconds"] == 0
    load = StepLoad(5, 600, 0, 5, 0, 5)
    # A virtual device has the host's time within the step.
    assert again.times.seconds(load) == pytest.approx(seconds(load) + HOST, rel=0.05)
    choice = MeasuredChoice.of(again)
    assert choice.kv_tokens == 4800 and choice.cards == 1 and "measured" in str(choice)
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(ValueError, match="make one with"):
        Profile.read(tmp_path / "p.json")


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
@pytest.mark.parametrize("rate", [4.0, 9.0])
def test_loads_that_were_not_fitted_are_predicted(made, burstiness, rate):
    mix = Mix(prompt=Lengths.parse("uniform:20-90"), output=Lengths.parse("uniform:8-30"), burstiness=burstiness)
    asked = mix.generate(rate, 150, seed=5)
    truth = EngineModel(
        scheduler=LIMITS, seconds=of_batch, by_load=seconds, host=HOST, intake=INTAKE, outlet=OUTLET
    )  # fmt: skip
    expected, found = (summary_of(Fleet(model).run(asked)) for model in (truth, made.engine))
    for name, share in (("ttft", "p50"), ("ttft", "p90"), ("itl", "p99"), ("e2e", "p50")):
        assert found[name][share] == pytest.approx(expected[name][share], rel=0.06)


def test_a_queue_of_a_simulated_server_has_no_limit(made):
    bounded = msgspec.structs.replace(made, header=made.header | {"scheduler": made.header["scheduler"] | {
        "max_queue": 2, "max_queue_bytes": 10_000, "max_queue_wait": 0.5,
    }})  # fmt: skip
    asked = [Asked(0.0, 60, 8)] * 60
    assert len(Fleet(bounded.engine).run(asked).records) == 60


def test_a_slowdown_by_recent_work_is_found_on_a_gpu_alone(made):
    log, results = sweep_of(Slowdown(0.2, 5000.0))
    assert profile(log, results, None, "m", {}).warming == {} == made.warming
    log.header.device["kind"] = "cuda"
    found = profile(log, results, None, "m", {})
    assert found.engine.warming is not None and 0.1 <= found.engine.warming.gain <= 0.2
    plain, _ = sweep_of()
    plain.header.device["kind"] = "cuda"
    assert profile(plain, results, None, "m", {}).warming == {}


def test_a_profile_has_what_the_engine_learned_and_the_time_outside_by_rows(made):
    engine = made.engine.start(0.0, prefixes=False)
    load = StepLoad(5, 600, 0, 5, 0, 5)
    assert engine.scheduler.times.predict(load) == pytest.approx(seconds(load), rel=0.2)
    rows = [each for each, _ in made.outlets]
    assert rows == sorted(rows) and made.engine.outlet_of(10**6) == made.outlets[-1][1]
    assert made.engine.outlet_of(4) == pytest.approx(OUTLET, rel=0.05)
    moments = [0.01 * number for number in range(20)]
    shown = made.engine.shown(moments, 4, number=7)
    assert shown == sorted(shown) and shown == made.engine.shown(moments, 4, number=7)
    assert shown[0] == pytest.approx(made.engine.outlet_of(4))


def test_requests_that_come_at_once_reach_the_engine_one_after_the_other(made):
    run = Fleet(made.engine).run([Asked(1.0, 20, 4), Asked(1.0, 20, 4), Asked(5.0, 20, 4)])
    first, second, later = (each.ttft for each in run.records)
    assert second >= first + 0.9 * INTAKE and later == pytest.approx(first, rel=0.2)


def test_a_sweep_has_levels_of_growing_concurrency():
    levels = sweep(8, 512, 3)
    assert [level.value for level in levels] == [1, 2, 4, 8] and [len(level.work) for level in levels] == [3, 6, 12, 24]
    assert max(len(each.prompt) + each.output_tokens for level in levels for each in level.work) <= 512


def test_a_failed_request_or_a_short_sweep_is_refused():
    log, results = measured([[(0.0, 10, 5)]])
    with pytest.raises(ValueError, match="at least 20 steps"):
        profile(log, results, None, "m", {})
    results[0].records[0].error = "http 500"
    with pytest.raises(ValueError, match="1 requests of the sweep failed"):
        profile(log, results, None, "m", {})


def test_the_commands(made, tmp_path):
    made.write(tmp_path / "p.json")
    options = (
        "--profile",
        str(tmp_path / "p.json"),
        "--rate",
        "3",
        "--target",
        "ttft=1s,itl=100ms",
        "--requests",
        "60",
    )
    lengths = ("--prompt-tokens", "uniform:20-90", "--output-tokens", "uniform:8-30")
    done = run_here("plan", "serving", "llama-3.2-1b", *options, *lengths)
    assert done.returncode == 0 and "predicted from" in done.stdout and "above the floor" in done.stdout, done.stderr
    trace = tmp_path / "in.jsonl"
    write_lines([Asked(float(at), 30, 4) for at in range(6)], trace)
    done = run_here("plan", "workload", str(tmp_path / "out.jsonl"), "--trace", str(trace), "--trace-start", "2")
    assert done.returncode == 0 and "4 requests in 3.0 s" in done.stdout
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 4


def test_drills_of_a_fleet_file_are_predicted(made, tmp_path):
    made.write(tmp_path / "p.json")
    (tmp_path / "f.toml").write_text('[engine]\nmodel = "m"\nhung-after = 1.0\n[replicas]\nmin = 3\n')
    given = ("--profile", str(tmp_path / "p.json"), "--seconds", "5", "--start", "1")
    lengths = ("--prompt-tokens", "uniform:20-90", "--output-tokens", "uniform:8-30")
    done = run_here("plan", "drills", str(tmp_path / "f.toml"), *given, *lengths, "--rate", "40", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kill"]["lost"] == pytest.approx(1.1) and found["stopped"]["lost"] == pytest.approx(2.15)
    assert found["stopped"]["added_p99"] > 0.3 > found["roll"]["added_p99"] and found["router"]["dropped"] > 50
    done = run_here("plan", "drills", str(tmp_path / "f.toml"), *given, *lengths, "--rate", "5")
    assert done.returncode == 0 and "dropped  drill" in done.stdout and "the router is killed" in done.stdout
    done = run_here("plan", "drills", str(tmp_path / "f.toml"), *given, "--rate", "10", "--replicas", "1")
    assert done.returncode != 0
