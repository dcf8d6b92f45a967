"""Fleets on a virtual clock: what requests get, the router, engines that start, drain and fail, prefixes."""

import pytest

from transect.bench.lengths import Lengths
from transect.bench.traces.asked import Asked, Piece
from transect.bench.traces.mix import Mix
from transect.costs.steps import StepLoad
from transect.engine.scheduling.policies.scaling import Backlog, Concurrency, Fixed, Forecast, Queue, Scaler, Seen
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.plan.capacity import MixLoad, Shape, highest_rate, simulate, summary_of
from transect.plan.disturbances import HangUp, Kill, Leave, Roll, RouterDeath
from transect.plan.drills import DRILLS, FleetTimes, p99, predict
from transect.plan.fleet import EngineModel, Fleet
from transect.plan.requests import Tokens, shared_tokens, shares_prefixes
from transect.plan.target import LatencyTarget

MIX = Mix(prompt=Lengths.parse("uniform:20-60"), output=Lengths.parse("uniform:10-30"))


def seconds(load):
    return 2e-3 + 1e-4 * load.tokens + 1e-7 * (load.keys + load.pairs)


def of_batch(batch):
    return seconds(StepLoad.of((row.start, row.num_tokens) for row in batch.rows))


def model(**changes):
    limits = {"num_blocks": 400, "max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 512, "seed": 0}
    times = {"intake": 1e-3, "outlet": 2e-3}
    return EngineModel(scheduler=SchedulerConfig(**limits | changes), seconds=of_batch, by_load=seconds, **times)


def test_every_request_is_answered_in_full():
    asked = MIX.generate(50.0, 80)
    run = Fleet(model()).run(asked)
    assert [record.output_tokens for record in run.records] == [each.output_tokens for each in asked]
    for record, each in zip(run.records, asked, strict=True):
        assert record.due == each.at and record.ended == record.moments[-1] and record.moments[0] > each.at + 3e-3
        assert record.moments == sorted(record.moments)
    assert run.prefix_hits == 0 and run.seconds == max(record.ended for record in run.records)
    summary = summary_of(run, warm=0.5)
    assert summary["requests"] == 40 and 0 < summary["kv_usage"]["max"] < 1 and 0 < summary["busy_share"] <= 1


def test_a_lone_request_takes_the_steps_of_its_tokens():
    (record,) = Fleet(model()).run([Asked(0.0, 50, 3)]).records
    prompt = seconds(StepLoad.of([(0, 50)]))
    decodes = [seconds(StepLoad.of([(start, 1)])) for start in (50, 51)]
    assert record.ttft == pytest.approx(1e-3 + prompt + 2e-3) and record.gaps == pytest.approx(decodes)


def test_more_engines_answer_sooner_and_share_the_load():
    asked = MIX.generate(120.0, 200)
    waits = [summary_of(Fleet(model(), engines).run(asked))["ttft"]["p90"] for engines in (1, 2, 4)]
    assert waits[0] > 2 * waits[1] > 2 * waits[2]


def test_prefixes_are_found_where_the_router_sends_them():
    system = [Asked(0.02 * n, 96, 8, (Piece(f"system {n % 2}", 80),)) for n in range(60)]
    assert shares_prefixes(system) and not shares_prefixes(MIX.generate(1.0, 20))
    run = Fleet(model(), 2).run(system)
    assert run.prefix_hits > 0.6
    turns = [Asked(0.0, 32, 16, (Piece("a", 32),), "a's answer")]
    turns.append(Asked(5.0, 64, 4, (Piece("a", 32), Piece("a's answer", 16), Piece("b", 16))))
    assert Fleet(model()).run(turns).prefix_hits == 32 / 96  # the last token of an answer has no KV
    tokens = Tokens()
    first, second = (tokens.request(str(number), each).prompt_token_ids for number, each in enumerate(turns))
    assert second[:32] == first and set(second[32:48]) == {tokens.answer(turns[0])}
    assert shared_tokens(turns) == pytest.approx(48 / 96)


def test_a_killed_engine_loses_no_request():
    asked = MIX.generate(60.0, 150)
    whole = Fleet(model(), 3).run(asked)
    run = Fleet(model(), 3, kills=[Kill(at=1.0, engine=1, back=5.0, notice=0.1)]).run(asked)
    assert [record.output_tokens for record in run.records] == [each.output_tokens for each in asked]
    assert all(record.moments == sorted(record.moments) for record in run.records)
    assert max(max(record.gaps, default=0) for record in run.records) > 0.1
    assert summary_of(run)["itl"]["max"] > summary_of(whole)["itl"]["max"]
    assert run.sizes[3:5] == [(1.0, 2), (1.0, 3)]


def test_begun_requests_of_a_killed_engine_rank_before_those_that_wait():
    asked = [Asked(0.0, 20, 40) for _ in range(24)]
    run = Fleet(model(max_num_seqs=4), 2, kills=[Kill(at=0.1, engine=1, back=float("inf"))]).run(asked)
    moved = [record for record in run.records if record.moments[0] < 0.1 < record.moments[-1]]
    waited = [record for record in run.records if record.moments[0] > 0.1]
    assert len(moved) == 8 and len(waited) == 16
    assert max(record.ended for record in moved) < min(record.ended for record in waited)


def test_until_a_failure_is_noticed_requests_go_to_the_silent_engine():
    asked = MIX.generate(250.0, 500)
    quick, slow = (
        Fleet(model(), 3, kills=[Kill(at=0.5, engine=0, back=2.0, notice=notice)]).run(asked) for notice in (0.0, 1.0)
    )

    def stuck(run):
        return sum(record.ttft > 0.3 for record in run.records if 0.5 < record.due < 1.2)

    assert stuck(slow) > 3 > 0 == stuck(quick)  # they are sent on at 1.5 s
    assert [record.output_tokens for record in slow.records] == [each.output_tokens for each in asked]


def test_an_engine_that_never_comes_back_leaves_a_queue_on_the_others():
    asked = MIX.generate(330.0, 600)
    runs = [Fleet(model(), 3, kills=[Kill(0.3, 0, back)]).run(asked) for back in (0.1, 0.6, float("inf"))]
    times = [p99(run) for run in runs]
    assert times[0] < times[1] < times[2]
    assert [size for _, size in runs[2].sizes] == [1, 2, 3, 2]


def test_a_roll_replaces_every_engine_and_a_leaving_one_finishes():
    asked = MIX.generate(60.0, 400)
    run = Fleet(model(), 2, events=[Roll(1.0, start_s=0.5)]).run(asked)
    assert len(run.records) == 400 and run.dropped == 0
    assert [size for _, size in run.sizes] == [1, 2, 3, 2, 3, 2]  # new before old
    gone = Fleet(model(), 2, events=[Leave(1.0, 0)]).run(asked)
    late = Fleet(model(), 2, events=[Leave(1.0, 0, limit=0.01)]).run(asked)
    ends = [[at for at, size in each.sizes if size == 1][-1] for each in (gone, late)]
    assert ends[0] > 1.01 and ends[1] == pytest.approx(1.01) and len(late.records) == len(gone.records) == 400


def test_a_dead_router_and_clients_that_leave_drop_requests():
    asked = MIX.generate(60.0, 240)
    run = Fleet(model(), 2, events=[RouterDeath(1.0, back=1.0)]).run(asked)
    refused = sum(1.0 < each.at + 1e-3 < 2.0 for each in asked)
    assert refused < run.dropped < refused + 20 and len(run.records) + run.dropped == 240
    number = next(n for n, each in enumerate(asked) if each.at > 1.0)
    left = Fleet(model(), 2, events=[HangUp(asked[number].at + 2e-3, frozenset({number}))]).run(asked)
    assert left.dropped == 1 and len(left.records) == 239


def test_drills_are_predicted_from_the_times_of_a_fleet():
    asked = MIX.generate(330.0, 600)
    times = FleetTimes(noticed=0.02, engine=0.4, replica=0.5, hung_after=0.2, lost_after=0.3, router=0.4)
    found = predict(model(), 3, asked, times, at=0.3)
    assert list(found) == list(DRILLS)
    assert found["kill"].lost == pytest.approx(0.47) and found["stopped"].lost == pytest.approx(0.72)
    assert found["stopped"].added_p99 > found["kill"].added_p99 > 0.02
    assert all(found[name].added_p99 == found[name].lost == 0 for name in ("controller", "blind"))
    assert found["router"].dropped > 100 and sum(each.dropped for each in found.values()) == found["router"].dropped
    long = [*asked, Asked(asked[-1].at, 20, 400)]
    left = predict(model(), 3, long, times, at=0.3, drills=["cancelled"], leaving={600: long[-1].at + 0.1})["cancelled"]
    assert left.dropped == 1 and left.added_p99 > 0  # the calm run is without those that leave
    with pytest.raises(ValueError, match="no drill 'fire'"):
        predict(model(), 3, asked, times, at=0.3, drills=["fire"])


def test_engines_come_and_go():
    quiet, busy = MIX.generate(5.0, 100), MIX.generate(100.0, 1500, seed=1)
    asked = [*quiet, *(Asked(20.0 + each.at, each.prompt_tokens, each.output_tokens) for each in busy)]
    asked += [Asked(45.0 + each.at, each.prompt_tokens, each.output_tokens) for each in MIX.generate(5.0, 200)]
    scaler = Scaler(Concurrency(each=8.0), most=6, patience=5.0)
    run = Fleet(model(), scaler=scaler, interval=1.0, start_s=2.0).run(asked)
    sizes = [size for _, size in run.sizes]
    assert len(run.records) == len(asked) and sizes[0] == 1 and max(sizes) >= 2 and sizes[-1] < max(sizes)
    assert run.engine_seconds < max(sizes) * run.seconds
    worse = Fleet(model()).run(asked)
    assert summary_of(run)["ttft"]["p99"] < summary_of(worse)["ttft"]["p99"]


def test_queued_tokens_over_the_measured_rate_bring_engines():
    asked = MIX.generate(400.0, 600)
    alone = Fleet(model()).run(asked)
    scaler = Scaler(Backlog(target_s=0.3), most=6, patience=5.0)
    run = Fleet(model(), scaler=scaler, interval=0.2, start_s=0.2).run(asked)
    assert 2 < max(size for _, size in run.sizes) <= 6
    assert summary_of(run)["ttft"]["p99"] < 0.5 * summary_of(alone)["ttft"]["p99"]


def test_scaling_policies():
    def seen(at=0.0, ready=2, starting=0, waiting=0, running=0, kv=0.5, rate=0.0):
        return Seen(at, ready, starting, waiting, running, kv, rate)

    assert Fixed(3).wanted(seen()) == 3 and Concurrency(8.0).wanted(seen(waiting=8, running=16)) == 3
    queue = Queue(long=1.0, idle=0.3)
    assert [queue.wanted(seen(waiting=w, kv=kv)) for w, kv in ((3, 0.9), (0, 0.5), (0, 0.1))] == [3, 2, 1]
    forecast = Forecast(capacity=10.0, ahead=60.0, headroom=0.0, smoothing=1.0, trend=1.0)
    assert forecast.wanted(seen(rate=20.0)) == 2
    assert forecast.wanted(seen(at=10.0, rate=25.0)) == pytest.approx((25 + 0.5 * 60) / 10)
    calm = Scaler(Concurrency(1.0), most=4, patience=30.0)
    wants = [calm.engines(seen(at=at, ready=ready, running=running)) for at, ready, running in
             ((0, 1, 9), (10, 4, 2), (20, 4, 1), (45, 4, 1))]  # fmt: skip
    assert wants == [4, 4, 4, 1]
    with pytest.raises(ValueError, match="1 <= least <= most"):
        Scaler(Fixed(), 3, 2)


def test_the_highest_rate_is_where_the_target_breaks():
    target, load = LatencyTarget.parse("ttft.p99=200ms,itl=20ms"), MixLoad(MIX, 150, seconds=1.0)
    best, worst = highest_rate(model(), load, target, 20.0)
    assert not target.missed(best.summary) and target.missed(worst.summary)
    assert best.rate < worst.rate < 1.03 * best.rate
    again = simulate(model(), load, best.rate)
    assert again.summary == best.summary  # the same requests, the same clock
    assert highest_rate(model(), load, LatencyTarget.parse("ttft=1ms"), 20.0)[0] is None


def test_targets():
    target = LatencyTarget.parse("ttft.p90=1s, itl=50ms")
    assert str(target) == "ttft.p90=1000ms,itl.p99=50ms" and target.limit("itl") == 0.05 and target.limit("e2e") is None
    summary = {"ttft": {"p90": 2.0}, "itl": {"p99": 0.2}}
    assert target.missed(summary) == ["itl.p99", "ttft.p90"] and target.ratios(summary)["ttft.p90"] == 2
    for text in ("ttft", "ttft.p91=1s", "first=1s", "ttft=1m"):
        with pytest.raises(ValueError, match="not understood"):
            LatencyTarget.parse(text)


def test_shapes():
    shape = Shape.of([Asked(0, 10, 4), Asked(1, 30, 8)], hits=0.5)
    assert (shape.prompt, shape.computed, shape.output) == (20, 10, 6)
