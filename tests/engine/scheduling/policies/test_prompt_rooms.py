"""Prompts of one client beside streams of others: they get their part of each step."""

import itertools
import statistics

import pytest
from msgspec import structs
from small_engine import request
from timed_device import Card, Processor, engine

from transect.engine.scheduling.policies.budget import AUTO_RATIO
from transect.engine.scheduling.policies.turns import FREE_STEPS, LEAST, RECENT_STEPS, Rooms, part_of_room


def of(client, name, weight=1.0, **options):
    return structs.replace(request(name, **options), client=client, weight=weight)


def beside_streams(clients, prompts, weight=1.0, **limits):
    """Run prompts of one client beside a stream of each of some others. Returns the time of each step over that of its
    decodes, and the number of steps."""
    core = engine(device=Processor, **{"max_num_seqs": 64, "max_num_batched_tokens": 256, "itl_target": 0.0, **limits})
    for number in range(clients):
        core.add(of(f"stream {number}", f"stream {number}", first=100 + number, max_tokens=3000))
    for number in range(4):
        core.add(of("lesson", f"lesson {number}", first=50 + number, prompt=10 * number + 1, max_tokens=9))
    while len(core.scheduler.requests) > clients or core.scheduler.budget.rooms._debts:
        core.step()
    for number, tokens in enumerate(prompts):
        core.add(of("heavy", f"heavy {number}", weight, first=200 + number, prompt=tokens, max_tokens=1))
    ratios, left = [], sum(prompts)
    while len(core.scheduler.requests) > clients:
        core.step()
        load = core.executor.load
        taken = load.tokens - clients
        if limit := core.scheduler.budget.rooms.limited.get("heavy"):
            assert taken >= min(limit, left), "it gets its part"
        left -= taken
        keys = sum(row.start + 1 for row in core.executor.batches[-1][1].rows if row.num_tokens == 1)
        ratios.append(core.executor.seconds(load.tokens) / (8e-3 + 1e-3 * clients + 3.7e-6 * keys))
    return ratios


@pytest.mark.parametrize("prompts", [[600], [30] * 20], ids=["one long prompt", "many short ones"])
def test_prompts_of_one_client_soon_get_the_least_part_beside_many(prompts):
    ratios = beside_streams(4, prompts)
    after = ratios[2 * FREE_STEPS : -1]
    assert max(ratios[:4]) > 1.8, "at first they may take the whole room"
    assert len(after) > 20 and sorted(after)[len(after) * 9 // 10] < 1.2 * (1 + LEAST * (AUTO_RATIO - 1))


def test_a_short_prompt_takes_the_whole_room():
    assert len(beside_streams(4, [60])) <= 6


def test_a_client_of_more_weight_has_more_room():
    assert len(beside_streams(4, [600], weight=8.0)) < len(beside_streams(4, [600])) / 1.5


def test_a_client_alone_is_not_limited():
    """Its prompts slow its own streams down, up to the ratio."""
    core = engine(device=Processor, max_num_batched_tokens=256, itl_target=0.0)
    core.add(request("stream", prompt=4, max_tokens=3000))
    for _ in range(30):
        core.step()
    core.add(request("long", prompt=1000, first=7, max_tokens=2))
    while "long" in core.scheduler.requests:
        core.step()
        assert not core.scheduler.budget.rooms._debts


def test_parts_sum_up_to_a_share_of_time():
    assert part_of_room(1, 2, 2.5) == pytest.approx(1 / 1.5), "half of the time of a step: as much as its decodes"
    assert part_of_room(1, 3, 2.5) == pytest.approx(0.5 / 1.5) and part_of_room(1, 100, 2.5) == LEAST
    assert part_of_room(3, 4, 2.5) == part_of_room(2, 2, 2.5) == 1.0


def test_debts_are_paid_by_steps_and_forgotten():
    rooms = Rooms()
    assert not rooms.of_step({"a": 1.0, "b": 1.0}, "ab", AUTO_RATIO)
    rooms.planned({"a": 1.0, "b": 0.2})
    assert rooms._debts == {"a": 1.0, "b": 0.2}
    for _ in range(4):
        rooms.planned({})
    assert not rooms._debts


def test_prompts_that_have_begun_leave_the_step_to_those_of_a_client_that_owes_less():
    core = engine(device=Processor, max_num_seqs=64, max_num_batched_tokens=256, itl_target=0.0)
    core.add(of("stream", "stream", first=5, max_tokens=3000))
    for _ in range(30):
        core.step()
    for number in range(20):
        core.add(of("heavy", f"heavy {number}", first=200 + number, prompt=60, max_tokens=1))
    for _ in range(6):
        core.step()
    core.add(of("light", "light", first=7, prompt=8, max_tokens=5))
    core.step()
    assert core.scheduler.requests["light"].prompt_done
    assert len(core.executor.batches[-1][1].rows) == 2 and core.scheduler.budget.rooms.limited["heavy"] == 0.0
    core.step()
    assert len(core.executor.batches[-1][1].rows) > 2


def test_steps_stay_short_for_clients_whose_answers_have_just_ended():
    """Without this bound their next requests would wait for a full step."""
    core = engine(device=Processor, max_num_batched_tokens=256, max_num_seqs=16, itl_target=0.0)
    for number in range(8):
        core.add(of("lesson", f"lesson {number}", first=50 + number, prompt=5 * number + 1, max_tokens=8))
    for name in ("a", "b"):
        core.add(of(name, name, first=ord(name), max_tokens=60))
    while core.has_work:
        core.step()
    core.add(of("heavy", "heavy", first=7, prompt=3000, max_tokens=1))
    for _ in range(RECENT_STEPS - 1):
        core.step()
        alone, context = 11e-3, 3.7e-6 * core.executor.load.context
        assert core.executor.seconds(core.executor.load.tokens) < 1.15 * max(
            AUTO_RATIO * alone, alone + 2 * (context + 1e-3)
        )
    for _ in range(3):
        core.step()
    assert core.executor.load.tokens == 256


def test_a_client_alone_has_full_steps_after_its_answers():
    core = engine(device=Processor, max_num_batched_tokens=256, itl_target=0.0)
    core.add(of("a", "stream", first=1, max_tokens=60))
    while core.has_work:
        core.step()
    core.add(of("a", "long", first=7, prompt=1000, max_tokens=1))
    core.step()
    assert core.executor.load.tokens == 256


def test_streams_beside_many_sequences_and_long_prompts_on_a_gpu():
    """Reads of a long context are learned apart from the keys of rows. Otherwise chunks of few tokens are taken to be
    cheap: most steps have one, and the client gets less for it."""
    limits = {"num_blocks": 20_000, "max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 8192}
    core = engine(1, Card, itl_target=0.0, **limits)
    for number in range(4):
        core.add(of(f"stream {number}", f"stream {number}", first=100 + number, max_tokens=8000))
    for _ in range(300):
        core.step()
    for number in range(200):
        core.add(of("heavy", f"heavy {number}", first=200 + number, prompt=16, max_tokens=2000))
    core.add(of("heavy", "long 0", first=7, prompt=7168, max_tokens=1))
    batches, began, ended = core.executor.batches, core.executor.clock.now(), 0
    batches.clear()
    while core.executor.clock.now() < began + 6.0:
        for output in core.step():
            if output.request_id.startswith("long") and output.finish_reason:
                ended += 1
                core.add(of("heavy", f"long {ended}", first=7 + ended, prompt=7168, max_tokens=1))
    later = batches[len(batches) // 3 :]
    ratios = sorted((after[0] - before[0]) / 4.06e-3 for before, after in itertools.pairwise(later))
    assert sum(ratios) / len(ratios) < 1.5 and ratios[len(ratios) * 99 // 100] < 3.0, "a read takes as long as decodes"
    assert ended >= 3 and sum(len(batch.rows) for _, batch in later) > 15 * len(later)


@pytest.mark.parametrize("start", [0, 120])
def test_scores_count_in_their_clients_part_with_all_their_work(start):
    """Without the time of their log-probabilities each step took 2.5 times as long as its decodes; and tokens before
    the first that is scored have none."""
    core = engine(device=Processor, itl_target=0.0, num_blocks=4000, max_num_seqs=64, max_num_batched_tokens=256)
    core.add(of("stream", "stream", first=100, max_tokens=3000))
    for _ in range(200):
        core.step()
    for number in range(64):
        scored = {"prompt_logprobs": 0, "prompt_logprobs_start": start}
        core.add(of("heavy", f"heavy {number}", first=200 + number, prompt=160, max_tokens=1, **scored))
    ratios = []
    while len(core.scheduler.requests) > 1:
        core.step()
        length, tokens = len(core.executor.batches), core.executor.load.tokens
        ratios.append(core.executor.seconds(tokens) / (9e-3 + 3.7e-6 * length))
    assert statistics.mean(ratios[100:]) < 2.1, "half of the time is for each client"
    work = 64 * (160 + 160 - start)  # a token, and its log-probability, take 1 ms each
    assert len(ratios) == pytest.approx(work / 11.6, rel=0.1), "and the client gets its half"
