"""Choose the number of drafts, given step times and acceptance."""

import itertools
import math
import random
from collections import Counter
from itertools import repeat
from typing import Any

import pytest
from effort import quick_first
from small_engine import lengths, make, recorded_batches, request, tokens_of
from timed_device import engine

from transect.costs.learning import StepTimes
from transect.costs.steps import StepLoad
from transect.engine.scheduling.arrivals import Arrivals
from transect.engine.scheduling.drafters.drafter import Guess
from transect.engine.scheduling.drafters.registry import SpeculativeConfig
from transect.engine.scheduling.policies.speculation import EACH_SECONDS, Acceptance, Speculation
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.engine.scheduling.simulation import SimulatedEngine

MOST = 8


class Planted:
    """Guesses that are right at a given share of the positions of a text that is known."""

    def __init__(self, chance: float, texts: dict[int, list[int]]) -> None:
        self.texts = texts
        chances = random.Random(1)
        self.wrong = {seq_id: [chances.random() >= chance for _ in text] for seq_id, text in texts.items()}

    def guess(self, seq_id: int, prompt: tuple[int, ...], output: list[int], most: int) -> Guess:
        now = slice(len(output), len(output) + most)
        pairs = zip(self.texts[seq_id][now], self.wrong[seq_id][now], strict=True)
        tokens = tuple(token + wrong for token, wrong in pairs)
        return Guess(tokens, (1.0,) * len(tokens), 4)

    def ended(self, seq_id: int, output: list[int]) -> None:
        pass


def tokens_per_second(
    chance: float,
    rows: int,
    each: float,
    *,
    host: float = 0.0,
    fixed: int | None = None,
    tokens: int = 1200,
    noise: float = 0.0,
    seed: int = 0,
) -> float:
    """Decode ``rows`` sequences on a device whose steps take 1 + each * rows, drafting as the policy says, or a
    ``fixed`` number. After steps with drafts the host takes ``host`` before the next. ``noise``: standard deviation of
    the logarithm of measured times; the tokens per second are of the times without."""
    measured = random.Random(seed)
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=fixed or MOST, adaptive=fixed is None)
    times = StepTimes()
    speculation = Speculation(config, times)
    state = SchedulerConfig(num_blocks=64, max_model_len=4096, seed=1)
    arrivals = Arrivals(state)
    sequences = [arrivals.state(request(f"r{i}"), 4096, 0.0).choices[0] for i in range(rows)]
    texts = {seq.seq_id: [seq.seq_id * 1000 + i for i in range(tokens + 64)] for seq in sequences}
    speculation.drafter = Planted(chance, texts)
    seconds, made = 0.0, 0
    while min(len(seq.output_token_ids) for seq in sequences) < tokens:
        for seq in sequences:
            seq.length = seq.prompt_len + len(seq.output_token_ids)
        drafts = {} if fixed == 0 else speculation.drafts(sequences, 64)
        count = rows + sum(map(len, drafts.values()))
        keys = sum(seq.length for seq in sequences)
        took = 1.0 + each * count
        cycle = took + host * bool(drafts)
        off_by = math.exp(measured.gauss(0.0, noise))
        times.learn(StepLoad(count, keys), took * off_by)
        speculation.timed(StepLoad(count, keys), cycle * off_by, bool(drafts))
        seconds += cycle
        for seq in sequences:
            text, known = texts[seq.seq_id], len(seq.output_token_ids)
            right = 0
            for draft in drafts.get(seq.seq_id, ()):
                if draft != text[known + right]:
                    break
                right += 1
            seq.output_token_ids.extend(text[known : known + right + 1])
            made += right + 1
    return made / seconds


CHANCES = list(itertools.product([0.0, 0.3, 0.6, 0.9, 1.0], [0.02, 0.2, 1.0], [1, 6]))


@pytest.mark.parametrize(("chance", "each", "rows"), quick_first(CHANCES, CHANCES[::5]))
def test_never_below_off_and_near_the_best_fixed_number(chance: float, rows: int, each: float):
    """Times are those of a model, so they are exact; the fixed numbers know nothing but are the best of eight."""
    chosen = tokens_per_second(chance, rows, each)
    off = rows / (1.0 + each * rows)
    best = max(off, *(tokens_per_second(chance, rows, each, fixed=count) for count in (1, 2, 4, 8)))
    assert chosen >= 0.98 * off
    assert chosen >= 0.95 * best


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
def test_time_of_the_host_that_drafts_expose_counts(chance: float):
    """With as much time on the host as on the device, drafts must bring twice the tokens."""
    host, rows, each = 1.5, 6, 0.08
    chosen = tokens_per_second(chance, rows, each, host=host)
    off = rows / (1.0 + each * rows)
    best = max(off, *(tokens_per_second(chance, rows, each, host=host, fixed=count) for count in (1, 2, 4, 8)))
    assert chosen >= 0.98 * off
    assert chosen >= 0.95 * best


@pytest.mark.parametrize("chance", [0.6, 0.9])
def test_noise_of_measured_times_costs_little(chance: float):
    """Other work on the machine makes steps longer by chance; the best of many sizes is not the luckiest one."""
    rows, each = 16, 0.2
    runs = [tokens_per_second(chance, rows, each, noise=0.2, tokens=600, seed=seed) for seed in range(3)]
    assert sum(runs) / len(runs) >= 0.97 * rows / (1.0 + each * rows)


class Wrong:
    """Guesses that no draw of ``timed_device`` equals."""

    def guess(self, seq_id: int, prompt: tuple[int, ...], output: list[int], most: int) -> Guess:
        return Guess((2,) * most, (1.0,) * most, 4)

    def ended(self, seq_id: int, output: list[int]) -> None:
        pass


@pytest.mark.parametrize("rows", [1, 16, 256])
def test_where_drafts_do_not_pay_steps_are_those_without(rows: int):
    """After a trial or two the same rows begin at the same times, one step ahead of their tokens."""
    found = []
    for speculation in (None, SpeculativeConfig(method="ngram")):
        core = engine(lag=1, max_num_seqs=4 * rows, max_num_batched_tokens=4 * rows + 16, speculation=speculation)
        if speculation is not None:
            core.scheduler.speculation.drafter = Wrong()
        for number in range(rows):
            core.add(request(f"r{number}", max_tokens=60))
        while core.has_work:
            core.step()
        last = core.executor.batches[-40:]
        found.append([(round(began - last[0][0], 9), batch.again, lengths(batch)) for began, batch in last])
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [4, 64])
def test_a_head_that_does_not_pay_takes_one_percent_of_the_time_and_hardly_any_choices(rows: int):
    """Steps of 1 ms on a device, which the host must not hold up; a step of the head takes half of that."""
    config = SchedulerConfig(
        num_blocks=4096,
        max_num_seqs=4 * rows,
        max_model_len=1024,
        seed=0,
        speculation={"method": "eagle3", "model": "head"},
    )
    simulated = SimulatedEngine(config, lambda batch: 1e-3, lag=1, acceptance=0.2, drafter=lambda load: 5e-4)
    core, speculation, calls = simulated.core, simulated.scheduler.speculation, Counter()
    for owner, name in ((speculation, "_chosen"), (speculation, "timed"), (core, "_learn")):
        inner = getattr(owner, name)
        setattr(owner, name, lambda *given, inner=inner, name=name: calls.update([name]) or inner(*given))
    for number in range(rows):
        simulated.add(Request(str(number), (number + 1,) * 9, SamplingParams(max_tokens=900)), [repeat(5)])
    simulated.run()
    steps = simulated.device.steps
    assert steps > 850 and speculation.drafted > 0
    assert calls["_chosen"] * EACH_SECONDS * speculation._considered < 0.01 * simulated.clock.time
    assert calls["timed"] <= calls["_learn"] < 0.4 * steps
    assert 0 < speculation._probes <= 3 + 0.01 * steps / 2


LIST = [token for item in range(10, 42) for token in (item // 10, item % 10, 90, 91, 92, 93)]
"""Items of a list with numbers of two digits: of six tokens of an item one is new, the others repeat."""


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize(("device", "host"), [(0.7e-3, 0.5e-3), (0.9e-3, 1e-3), (3.5e-3, 0.5e-3)])
def test_answers_that_repeat_in_part_are_not_slower_one_step_ahead(method: str, device: float, host: float):
    """Drafts expose the host's work for two steps: their own, and the one after."""

    def seconds(speculation: dict[str, str] | None) -> float:
        config = SchedulerConfig(num_blocks=64, max_model_len=512, seed=1, speculation=speculation)
        simulated = SimulatedEngine(config, lambda batch: device * (1 + 0.004 * batch.num_tokens), lag=1, host=host)
        simulated._looks_ahead = True
        for turn in range(4):
            if turn == 3:
                began = simulated.clock.time
            simulated.add(Request(str(turn), (7, 8, 9), SamplingParams(max_tokens=len(LIST))), [iter(LIST)])
            simulated.run()
        assert simulated.scheduler.speculation is None or simulated.scheduler.speculation.drafted > 0
        return simulated.clock.time - began

    assert seconds({"method": method}) <= 1.02 * seconds(None)


@pytest.mark.parametrize(("rows", "chance", "host"), [(1, 0.3, 5e-4), (1, 0.6, 5e-3), (4, 0.3, 5e-4), (16, 0.6, 2e-3)])
def test_where_most_drafts_are_right_the_exposed_step_is_paid_once(rows: int, chance: float, host: float):
    """Steps of an 8B model on a GPU: what a run of steps with drafts exposes counts once for the whole run."""

    def seconds(speculation: dict[str, Any] | None) -> float:
        config = SchedulerConfig(num_blocks=64 * rows, max_num_seqs=64, seed=1, speculation=speculation)
        device = lambda batch: 3.7e-3 + 3.2e-5 * batch.num_tokens  # noqa: E731
        simulated = SimulatedEngine(config, device, lag=1, host=host, acceptance=chance if speculation else None)
        simulated._looks_ahead = True
        for turn in range(4):
            began = simulated.clock.time
            for row in range(rows):
                params = SamplingParams(max_tokens=128, ignore_eos=True)
                simulated.add(Request(f"{turn}-{row}", (row, 8, 9), params), [iter(range(300, 900))])
            simulated.run()
        return simulated.clock.time - began

    chosen = seconds({"method": "ngram", "num_speculative_tokens": 8})
    fixed = [{"method": "ngram", "num_speculative_tokens": count, "adaptive": False} for count in (2, 4, 8)]
    assert 0.95 * chosen <= min(map(seconds, [None, *fixed]))


def test_steps_one_ahead_wait_for_tokens_only_where_drafts_may_pay():
    """A text without repeats takes the time of an engine without drafts, and no step is planned late."""

    def seconds(speculation: dict[str, str] | None) -> float:
        config = SchedulerConfig(num_blocks=64, max_model_len=512, seed=1, speculation=speculation)
        simulated = SimulatedEngine(config, lambda batch: 1e-3, lag=1, host=8e-4)
        simulated._looks_ahead = True
        simulated.add(Request("a", (7, 8, 9), SamplingParams(max_tokens=400)), [iter(range(10, 500))])
        simulated.run()
        return simulated.clock.time

    assert seconds({"method": "ngram"}) == pytest.approx(seconds(None))


def test_wrong_guesses_count_as_much_as_they_were_expected_to_be_right():
    sure, unsure = Acceptance(), Acceptance()
    for acceptance, share in ((sure, 1.0), (unsure, 0.1)):
        for hits in (4, 0) * 6:
            acceptance.add(hits, True, (share if not hits else 1.0, 1.0, 1.0, 1.0, 0.1))
    assert unsure.rate(0.5) > 0.7 > sure.rate(0.5)


def test_acceptance_is_known_before_the_first_draft():
    """Guesses are marked while step times are still unknown and nothing is drafted."""
    times = StepTimes()
    speculation = Speculation(SpeculativeConfig(method="ngram", prompt_lookup_min=1), times)
    seq = Arrivals(SchedulerConfig(num_blocks=8, seed=1)).state(request("a", max_tokens=40), 60, 0.0).choices[0]
    for token in [7, 8] * 10:
        assert speculation.drafts([seq], 8) == {}
        seq.output_token_ids.append(token)
        seq.length += 1
    for tokens in (1, 2, 4, 8):
        times.learn(StepLoad(tokens, 20), 1.0 + 0.01 * tokens)
    assert len(speculation.drafts([seq], 8)[seq.seq_id]) == 8
    assert speculation.worthwhile


def test_drafts_stay_within_the_room_and_the_longest_answer():
    times = StepTimes()
    for tokens in (1, 2, 4, 8):
        times.learn(StepLoad(tokens, 20), 1.0 + 0.01 * tokens)
    for adaptive in (True, False):
        speculation = Speculation(SpeculativeConfig(method="ngram", prompt_lookup_min=1, adaptive=adaptive), times)
        config = SchedulerConfig(num_blocks=8, seed=1)
        seq = Arrivals(config).state(request("a", max_tokens=40), 16, 0.0).choices[0]
        for token in [7] * 6:
            speculation.drafts([seq], 8)
            seq.output_token_ids.append(token)
            seq.length += 1
        assert seq.length == 12
        assert len(speculation.drafts([seq], 8)[seq.seq_id]) == 3  # positions 13 to 15 are drawn after them
        assert len(speculation.drafts([seq], 2)[seq.seq_id]) == 2
        assert speculation.drafts([seq], 0) == {}


@pytest.mark.parametrize("lag", [0, 1])
def test_an_engine_counts_what_it_drafted(lag: int):
    """The tokens are those of an engine that drafts nothing, in fewer steps."""
    spec = SpeculativeConfig(method="ngram", prompt_lookup_min=1, adaptive=False, num_speculative_tokens=3)
    runs = {}
    for name, speculation in (("off", None), ("on", spec)):
        core = make(lag, speculation=speculation, max_num_seqs=8)
        core.add(request("a", max_tokens=50))
        _, outputs = recorded_batches(core)
        runs[name] = tokens_of(outputs, "a"), core.stats()
    assert runs["on"][0] == runs["off"][0]
    stats = runs["on"][1]
    assert stats.drafted_tokens > sum(stats.accepted_at.values()) > 0
    assert stats.steps < runs["off"][1].steps
    assert runs["off"][1].drafted_tokens == 0
