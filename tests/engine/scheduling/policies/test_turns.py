"""Sequences of a client with many take turns, so that steps stay short for the others."""

from msgspec import structs
from small_engine import request
from timed_device import Processor, engine

from transect.engine.scheduling.policies.budget import AUTO_RATIO
from transect.engine.scheduling.policies.turns import RECENT_STEPS


def of(client, name, weight=1.0, **options):
    return structs.replace(request(name, **options), client=client, weight=weight)


def crowded(heavy=40, light=1, weight=1.0, **limits):
    """Sequences that decode, of a client with many and of one with few."""
    core = engine(device=Processor, max_num_seqs=64, max_num_batched_tokens=256, **{"itl_target": 0.0} | limits)
    for number in range(light):
        core.add(of("light", f"light {number}", first=100 + number, max_tokens=2000))
    core.add(of("light", "lesson", first=99, max_tokens=25))  # a few rows take less time than many
    for _ in range(30):
        core.step()
    for number in range(heavy):
        core.add(of("heavy", f"heavy {number}", weight, first=200 + number, max_tokens=2000))
    while len(core.scheduler.waiting) or any(not seq.request.prompt_done for seq in core.scheduler.running):
        core.step()
    core.executor.batches.clear()
    return core


def rows(core, steps):
    """Sequences of each step by client."""
    clients = {seq.seq_id: seq.request.spec.client for seq in core.scheduler.running}
    first = len(core.executor.batches)
    for _ in range(steps):
        core.step()
    return [[clients[row.seq_id] for row in batch.rows] for _, batch in core.executor.batches[first:]]


def test_steps_stay_short_for_a_client_with_one_sequence_and_all_of_the_others_advance():
    core = crowded()
    before = {seq.request_id: seq.length for seq in core.scheduler.running}
    steps = rows(core, 60)
    alone = 8e-3 + 2e-3
    assert all("light" in step and 2 < len(step) < 41 for step in steps)
    assert all(8e-3 + 1e-3 * len(step) < 1.1 * 2 * alone for step in steps), "half of a step's time for each client"
    grown = {seq.request_id: seq.length - before[seq.request_id] for seq in core.scheduler.running}
    assert grown.pop("light 0") == 60
    assert max(grown.values()) - min(grown.values()) <= 6 and min(grown.values()) > 12


def test_nobody_pauses_beside_clients_with_as_many():
    assert all(len(step) == 40 for step in rows(crowded(heavy=20, light=20), 5))


def test_a_client_of_more_weight_has_more_rows():
    few, more = (rows(crowded(weight=weight), 10)[-1].count("heavy") for weight in (1.0, 8.0))
    assert few < more


def test_one_client_alone_never_pauses():
    core = crowded(light=0)
    rows(core, RECENT_STEPS)
    assert all(len(step) == 40 for step in rows(core, 5))


def test_steps_stay_short_for_a_client_whose_answer_has_just_ended():
    """Its next request waits for the end of the step under way."""
    core = crowded(light=0)
    reference = 8e-3 + 2e-3
    steps = rows(core, RECENT_STEPS // 2)
    assert all(len(step) > 2 and 8e-3 + 1e-3 * len(step) < 1.1 * AUTO_RATIO * reference for step in steps)


def test_steps_that_no_time_limits_have_all_rows():
    assert all(len(step) == 41 for step in rows(crowded(itl_target=None), 5))


def test_a_target_in_seconds_bounds_the_rows():
    assert all(len(step) == 41 for step in rows(crowded(itl_target=1.0), 5))
    assert all(8e-3 + 1e-3 * len(step) < 1.1 * 20e-3 for step in rows(crowded(itl_target=20e-3), 20))


def test_a_newcomer_finds_short_steps():
    """Its prompt counts as a sequence: the first token comes after steps in which few others take part."""
    core = crowded(light=0)
    core.add(of("new", "new", first=7, max_tokens=5))
    core.step()
    core.step()
    assert len(core.executor.batches[-1][1].rows) < 40
    assert core.scheduler.requests["new"].prompt_done


def test_answers_are_the_same():
    def outputs(**limits):
        core = crowded(heavy=12, light=1, **limits)
        found = {}
        while len(found) < 13 or any(len(each) < 20 for each in found.values()):
            for output in core.step():
                found.setdefault(output.request_id, []).extend(output.new_token_ids)
        return {name: tokens[:20] for name, tokens in found.items()}

    assert outputs() == outputs(itl_target=None)
