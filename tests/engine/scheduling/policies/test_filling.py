"""Steps that are filled up with prompt tokens: when, and that nothing ends later for it."""

import pytest
from small_engine import lengths, make, recorded_batches, request

FILL = 8


def steps(outputs: list[int], fill: int | None, prompt: int = 12, lag: int = 0, **limits):
    """The batches of requests that are all there at the start."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "num_blocks": 200} | limits
    core = make(lag=lag, fill_tokens=fill, longest_first=True, **limits)
    for index, tokens in enumerate(outputs):
        core.add(request(str(index), prompt=prompt, first=index + 1, max_tokens=tokens))
    return recorded_batches(core)[0]


@pytest.mark.parametrize("lag", [0, 1])
def test_prompts_come_little_by_little_where_short_outputs_can_wait(lag):
    outputs = [40, 30, 20, 14, 9, 5]
    plain, filled = steps(outputs, None, lag=lag), steps(outputs, FILL, lag=lag)
    assert [sum(lengths(batch)) for batch in plain][:3] == [48, 28, 6]
    sizes = [sum(lengths(batch)) for batch in filled]
    assert sizes[0] == 48, "nobody decodes yet"
    assert max(sizes[1:]) == FILL and sizes.count(FILL) >= 4
    assert len(filled) == len(plain), "as many steps as the longest output has tokens"
    assert sum(sizes) == sum(sum(lengths(batch)) for batch in plain)


@pytest.mark.parametrize("outputs", [[20] * 6, [20] * 5 + [21], [3] * 6])
def test_outputs_of_one_length_are_begun_at_once(outputs):
    """Whoever began later would end later."""
    assert [lengths(batch) for batch in steps(outputs, FILL)] == [lengths(batch) for batch in steps(outputs, None)]


def test_more_tokens_than_the_steps_have_room_for_are_not_put_off():
    outputs = [12, 11, 10, 9, 8, 7]
    assert [lengths(batch) for batch in steps(outputs, FILL)] == [lengths(batch) for batch in steps(outputs, None)]


def test_more_requests_than_places_are_not_put_off():
    outputs = [40, 30, 20, 14, 9, 5]
    few = {"max_num_seqs": 5}
    assert max(sum(lengths(batch)) for batch in steps(outputs, FILL, **few)[1:2]) > FILL


def test_a_step_in_which_nobody_decodes_is_as_large_as_any():
    assert [lengths(batch) for batch in steps([60, 1], FILL, prompt=40)][:2] == [[40, 8], [1, FILL - 1]]
    assert lengths(steps([60], FILL, prompt=60, max_model_len=200)[0]) == [48]


def test_where_every_step_is_no_larger_there_is_nothing_to_fill():
    outputs = [40, 30, 20, 14, 9, 5]
    bounded = [lengths(batch) for batch in steps(outputs, None, max_mixed_tokens=FILL)]
    assert [lengths(batch) for batch in steps(outputs, FILL, max_mixed_tokens=FILL)] == bounded


def test_each_choice_of_a_request_counts():
    """Six choices of one request leave no room for the other's prompt to come little by little."""

    def sizes(choices: int):
        core = make(fill_tokens=FILL, longest_first=True, max_num_seqs=8, max_num_batched_tokens=48, num_blocks=200)
        core.add(request("many", prompt=40, max_tokens=20, n=choices))
        core.add(request("late", prompt=40, first=2, max_tokens=2))
        return [sum(lengths(batch)) for batch in recorded_batches(core)[0]][:2]

    assert sizes(1) == [48, FILL]
    assert sizes(6) == [48, 6 + 32]


def test_it_may_be_switched_off_between_steps():
    core = make(fill_tokens=FILL, longest_first=True, max_num_seqs=8, max_num_batched_tokens=48, num_blocks=200)
    core.scheduler.budget.fill_tokens = None
    for index, tokens in enumerate([40, 30, 20, 14, 9, 5]):
        core.add(request(str(index), prompt=12, first=index + 1, max_tokens=tokens))
    assert [sum(lengths(batch)) for batch in recorded_batches(core)[0]][:2] == [48, 28]


def test_fewer_tokens_than_sequences_are_refused():
    with pytest.raises(ValueError, match=r"fill_tokens \(3\) must be at least max_num_seqs \(4\)"):
        make(fill_tokens=3)
