"""Plans of a service: choices, arithmetic beside simulation, engines for a load, reasons, costs, the command."""

import json

import pytest
from commands import run_here

from transect.bench.lengths import Lengths
from transect.bench.traces.json_lines import write_lines
from transect.bench.traces.mix import Mix
from transect.costs.presets import preset
from transect.costs.steps import StepLoad
from transect.engine.scheduling.drafters.registry import SpeculativeConfig
from transect.plan.capacity import MixLoad, Shape, estimate, steady_step
from transect.plan.choices import choices
from transect.plan.drafting import drafting_model
from transect.plan.page import page_of
from transect.plan.report import as_json, lines
from transect.plan.serving import Demand, plan_serving
from transect.plan.target import LatencyTarget
from transect.spec.shapes import PRESETS

MIX = Mix(prompt=Lengths.parse("uniform:200-600"), output=Lengths.parse("uniform:20-60"))
LOAD, FEW = (MixLoad(MIX, count, seconds=1.0) for count in (60, 20))
TARGET = LatencyTarget.parse("ttft.p99=1s,itl.p99=30ms")
LLAMA = PRESETS["llama-3.1-8b"]
HEAD = drafting_model(SpeculativeConfig(method="eagle3", model="organisation/head"), LLAMA)
PRICES = {"h200": 3.0, "l4": 0.7, "a100-80gb": 1.5}


def ways(cards=("h200",), model=LLAMA, **options):
    options = {"tensor": (1,), "weights": ("bf16",), "caches": ("auto",), "context": 2048} | options
    return list(choices(model, [preset(card) for card in cards], **options))


@pytest.fixture(scope="module")
def plan():
    demand = Demand(load=LOAD, users=2000, think=20.0)
    return plan_serving(ways(("h200", "l4", "a100-80gb")), demand, TARGET, prices=PRICES, simulated=2)


def test_what_does_not_fit_is_refused_with_its_reason():
    (tight, why), (fits, none), (cut, uneven) = ways(model=PRESETS["llama-3.3-70b"], tensor=(1, 2, 3))
    assert "do not fit" in why and tight.kv_tokens == 0 and not none and fits.kv_tokens > 10_000
    assert uneven and cut.cards == 3
    assert "no coefficients for int3" in ways(weights=("int3",))[0][1]
    with pytest.raises(ValueError, match="no choice can serve"):
        plan_serving(ways(("l4",), PRESETS["llama-3.3-70b"]), Demand(load=LOAD, rate=1.0), TARGET)


def test_formats_and_layouts_change_memory_and_speed():
    plain, fp8 = (choice for choice, _ in ways(weights=("bf16", "fp8"), context=8192))
    one, two = (choice for choice, _ in ways(tensor=(1, 2), context=8192))
    ((half, _),) = ways(caches=("fp8",), context=8192)
    assert fp8.kv_tokens > plain.kv_tokens and half.kv_tokens == pytest.approx(2 * plain.kv_tokens, rel=0.01)
    assert two.cards == 2 and two.kv_tokens > 1.9 * one.kv_tokens
    load = StepLoad(64, 64_000, 0, 64, 0, 64)
    assert two.steps.seconds(load) < one.steps.seconds(load)
    for choice in (one, two):
        assert sum(choice.steps.parts(load).values()) == pytest.approx(choice.steps.seconds(load))
    assert str(two) == "2 x h200, tp 2, bf16 weights, bf16 KV"


def test_arithmetic_says_what_binds():
    ((choice, _),) = ways()
    shape = Shape.of(LOAD.at(1.0))
    rate, bound = estimate(choice.steps, choice.kv_tokens, shape, TARGET)
    assert bound == "itl" and steady_step(choice.steps, shape, rate)[0] == pytest.approx(0.03, rel=0.1)
    assert estimate(choice.steps, 1000, shape, TARGET)[1] == "kv"
    assert estimate(choice.steps, 10**9, shape, LatencyTarget.parse("itl=100s"))[1] == "compute"
    assert steady_step(choice.steps, shape, 1e4) is None


def test_a_plan_keeps_its_target_and_says_why_not_more(plan):
    best, other = plan.answers
    for answer in plan.answers:
        assert not TARGET.missed(answer.level.summary) and answer.missed and answer.cause
        assert answer.engines * answer.most.rate >= answer.rate
        assert answer.rate == pytest.approx(2000 / (20 + answer.level.summary["e2e"]["mean"]))
        assert answer.grown.rate == pytest.approx(1.5 * answer.rate / answer.engines, rel=0.02)
        assert [point.rate for point in answer.points] == sorted(point.rate for point in answer.points)
    cost = plan.cost(best)
    assert cost["dollars_per_hour"] <= plan.cost(other)["dollars_per_hour"]
    per_second = best.rate * 40 * 3600 / 1e6
    assert cost["dollars_per_million_output_tokens"] == pytest.approx(cost["dollars_per_hour"] / per_second, rel=0.15)
    assert cost["dollars_per_user_hour"] == cost["dollars_per_hour"] / 2000 and cost["joules_per_output_token"] > 0
    text = "\n".join(lines(plan, "title"))
    assert "1 x l4, tp 1, bf16 weights, bf16 KV: misses the target at any rate" in text
    assert "best: " in text and "next: " in text and "at 1.5 times the load" in text and "dollars" in text
    page = page_of(plan, "title & more")
    assert page.count("<svg") == 4 and "title &amp; more" in page and page.count("<polyline") == 8


def test_the_json_has_the_keys_of_the_load_generator(plan):
    found = json.loads(json.dumps(as_json(plan, {"model": "m"})))
    level = found["levels"][0]
    assert {"load", "load_unit", "requests", "ttft", "itl", "tpot", "e2e", "output_tokens_per_second"} <= set(level)
    assert {"mean", "p50", "p90", "p95", "p99", "max"} == set(level["ttft"])
    assert found["choices"][0]["level"]["ttft"] == level["ttft"] and found["settings"]["target"] == str(TARGET)


def test_the_command(tmp_path):
    few = ("--requests", "50", "--tp", "1", "--quantization", "bf16", "--output-tokens", "uniform:10-20")
    given = ("plan", "serving", "llama-3.1-8b", "--gpu", "l4", "--target", "ttft=3s,itl=150ms", *few)
    done = run_here(*given, "--rate", "4", "--json", "--price", "0.7")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["choices"][0]["gpu"] == "l4" and found["choices"][0]["requests_per_second"] == 4
    trace, page = tmp_path / "trace.jsonl", tmp_path / "plan.html"
    write_lines(MIX.generate(60.0, 60), trace)
    done = run_here(*given, "--trace", str(trace), "--page", str(page))
    assert done.returncode == 0, done.stderr
    assert "best: " in done.stdout and "not measured" in done.stdout and "<svg" in page.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rate", "1", "--users", "5"), "give one of --users, --rate and --trace"),
        (("--rate", "1", "--context", "64"), "give --context"),
        (("--rate", "1", "--tp", "two"), "must be numbers"),
        (("--rate", "1", "--gpu", "l4", "--gpu", "h200", "--price", "3"), "names no card"),
        (("--rate", "1", "--gpu", "l4", "--gpu", "h200", "--price", "l4=3"), "h200 is missing"),
        (("--rate", "1", "--target", "soon"), "not understood"),
    ],
)
def test_mistakes_are_explained(options, words):
    done = run_here("plan", "serving", "llama-3.1-8b", *options)
    assert done.returncode == 2 and words in done.stderr


def test_drafts_make_answers_sooner():
    """At a low rate, where drafts pay; the acceptance is given."""
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    means = []
    for drafting in (None, (speculation, 0.0), (speculation, 0.8)):
        demand = Demand(load=FEW, rate=2.0, speculation=drafting)
        plan = plan_serving(ways(), demand, TARGET, simulated=1)
        means.append(plan.answers[0].level.summary["e2e"]["mean"])
    assert means[2] < 0.7 * means[0] and means[1] < 1.05 * means[0]


def test_drafts_of_a_model_take_its_time():
    """A model of a size drafts; the smaller one is the faster, and a head the fastest of all."""
    means = {}
    for name, draft in (("", None), ("1b", PRESETS["llama-3.2-1b"]), ("3b", PRESETS["llama-3.2-3b"]), ("head", HEAD)):
        speculation = SpeculativeConfig(method="draft_model", model="x", num_speculative_tokens=4)
        drafting = None if draft is None else (speculation, 0.8)
        demand = Demand(load=FEW, rate=2.0, speculation=drafting, draft=draft)
        plan = plan_serving(ways(), demand, TARGET, simulated=1)
        means[name] = plan.answers[0].level.summary["e2e"]["mean"]
    assert means["head"] < means["1b"] < means["3b"] and means["1b"] < 0.9 * means[""]


def test_a_plan_with_drafts_from_the_command_line():
    drafts = ("--speculative-config", '{"method": "ngram"}')
    given = ("plan", "serving", "llama-3.2-1b", "--gpu", "l4", "--rate", "1", "--requests", "50", "--simulate", "1")
    few = ("--tp", "1", "--quantization", "bf16", "--target", "itl.p99=11ms")
    short = ("--prompt-tokens", "uniform:20-90", "--output-tokens", "uniform:10-20")
    done = run_here(*given, *few, *short, *drafts, "--acceptance", "0.7")
    assert done.returncode == 0, done.stderr
    for wrong, why in (
        (drafts, "belong together"),
        (("--acceptance", "0.5"), "belong together"),
        ((*drafts, "--acceptance", "1.5"), "from 0 to 1"),
        (("--speculative-config", '{"method": "draft_model", "model": "x"}', "--acceptance", "0.5"), "'x'"),
    ):
        done = run_here(*given, *wrong)
        assert done.returncode and why in done.stderr
