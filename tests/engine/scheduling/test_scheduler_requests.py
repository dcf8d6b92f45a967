"""The life of a request in the scheduler: refusals, choices, ends, aborts, the prefix cache, seeds and times.

The device checks every KV read on the way.
"""

import re
from typing import Any

import pytest
from kv_checker import CheckingExecutor
from small_engine import make, order_of_ends, recorded_batches, request, tokens_of

from transect.engine.scheduling.batch import StepResult
from transect.engine.scheduling.clock import VirtualClock
from transect.engine.scheduling.policies.admission import QueueFull
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams


class TestRefusals:
    def test_prompt_longer_than_the_context(self):
        with pytest.raises(ValueError, match=r"64 tokens, but the context length is 64 .* shorten the prompt"):
            make().add(request("a", prompt=64))

    def test_more_choices_than_places(self):
        with pytest.raises(ValueError, match="n is 5, but the engine runs 4 sequences at most: lower n"):
            make().add(request("a", n=5))

    @pytest.mark.parametrize(("prompt", "advice"), [(10, "at most 7"), (17, "shorten the prompt")])
    def test_larger_than_the_pool(self, prompt: int, advice: str):
        numbers = rf"prompt of {prompt} tokens and up to 20 .* need \d+ KV blocks of 4 tokens, but the cache has 4"
        with pytest.raises(ValueError, match=f"{numbers}.*{advice}"):
            make(num_blocks=4).add(request("a", prompt=prompt, max_tokens=20))

    def test_exactly_the_pool_is_taken_and_runs(self):
        core = make(num_blocks=4)
        core.add(request("a", prompt=10, max_tokens=7))
        assert len(tokens_of(recorded_batches(core)[1], "a")) == 7

    def test_refused_requests_leave_nothing_behind(self):
        core = make(num_blocks=4)
        with pytest.raises(ValueError, match="KV blocks"):
            core.add(request("a", max_tokens=30))
        assert not core.has_work
        core.add(request("a"))
        assert core.stats().waiting == 1

    def test_an_id_in_use(self):
        core = make()
        core.add(request("a"))
        with pytest.raises(ValueError, match="'a' is in use"):
            core.add(request("a"))
        recorded_batches(core)
        core.add(request("a"))

    def test_a_full_queue_says_when_to_come_again(self):
        core = make(max_queue=2, max_num_seqs=1)
        core.add(request("a"))
        core.step()
        core.add(request("b"))
        core.add(request("c"))
        with pytest.raises(QueueFull, match="2 requests wait already") as full:
            core.add(request("d"))
        assert full.value.retry_after == 1.0

    def test_the_estimate_follows_the_pace_of_admissions(self):
        core = make(max_queue=4, max_num_seqs=1)
        clock = core.scheduler.clock
        assert isinstance(clock, VirtualClock)
        for i in range(4):
            core.add(request(f"r{i}", max_tokens=1))
        for _ in range(2):
            core.step()
            clock.advance(10.0)
        core.add(request("r4"))
        core.add(request("r5"))
        with pytest.raises(QueueFull) as full:
            core.add(request("r6"))
        assert full.value.retry_after == 20.0  # half of four, at one in ten seconds

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
            ({"max_num_batched_tokens": 3}, "max_num_batched_tokens (3) must be at least max_num_seqs (4)"),
            ({"max_mixed_tokens": 3}, "max_mixed_tokens (3) must be at least max_num_seqs (4)"),
            ({"max_queue": 0}, "max_queue must be at least 1, or None"),
            ({"max_model_len": 1}, "room for a prompt and an output token, got 1"),
            ({"watermark": 1.0}, "watermark must be in [0, 1), got 1.0"),
            ({"batching": "random"}, 'batching must be "continuous" or "static"'),
            ({"scheduling_policy": "random"}, 'scheduling_policy must be "fcfs" or "priority"'),
        ],
    )
    def test_impossible_limits(self, change: dict[str, Any], message: str):
        with pytest.raises(ValueError, match=re.escape(message)):
            make(**change)

    @pytest.mark.parametrize(
        ("prompt", "message"), [((), "empty"), ((1, -1), "-1"), ((1, "a"), "'a'"), ((2**31,), "2")]
    )
    def test_prompts_that_are_none(self, prompt: tuple, message: str):
        with pytest.raises(ValueError, match=message):
            Request("a", prompt, SamplingParams())

    def test_priority_must_be_whole(self):
        with pytest.raises(ValueError, match=r"priority must be a whole number .* got 0.5"):
            Request("a", (1,), SamplingParams(), 0.5)  # type: ignore[arg-type]


class TestChoices:
    def test_choices_share_the_prompt_and_copy_only_the_partial_block(self):
        core = make()
        core.add(request("a", prompt=10, n=3, max_tokens=5))
        batches, _ = recorded_batches(core)
        assert [len(draw_row.draws) for draw_row in batches[0].rows] == [3]
        assert [len(batch.block_copies) for batch in batches] == [0, 2, 0, 0, 0]
        firsts = {tuple(row.block_ids[:2]) for row in batches[1].rows}
        thirds = {row.block_ids[2] for row in batches[1].rows}
        assert len(firsts) == 1
        assert len(thirds) == 3

    def test_nothing_is_copied_when_the_prompt_fills_its_blocks(self):
        core = make()
        core.add(request("a", prompt=8, n=3))
        assert not any(batch.block_copies for batch in recorded_batches(core)[0])

    def test_choices_of_one_seed_differ_by_their_number(self):
        core = make()
        core.add(request("a", n=4, max_tokens=12))
        _, outputs = recorded_batches(core)
        assert len({tuple(tokens_of(outputs, "a", i)) for i in range(4)}) > 1

    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("steps", [0, 1, 2, 3])
    def test_choice_zero_can_be_aborted_at_any_time_without_the_others(self, lag: int, steps: int):
        core = make(lag)
        core.add(request("a", prompt=30, n=3))
        outputs = [output for _ in range(steps) for output in core.step()]
        core.abort("a", 0)
        outputs += recorded_batches(core)[1]
        ends = {output.index: output.finish_reason for output in outputs if output.finish_reason}
        assert ends == {0: "abort", 1: "length", 2: "length"}
        assert len(tokens_of(outputs, "a", 1)) == 4
        assert core.stats().kv_blocks_used == 0


class TestEnds:
    @pytest.mark.parametrize("lag", [0, 1])
    def test_stop_token_ends_at_once_and_is_the_last_token(self, lag: int):
        plain = make(lag)
        plain.add(request("a", max_tokens=20))
        tokens = tokens_of(recorded_batches(plain)[1], "a")
        stop = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
        core = make(lag)
        core.add(request("a", max_tokens=20, stop_token_ids=[stop]))
        _, outputs = recorded_batches(core)
        assert tokens_of(outputs, "a") == tokens[: tokens.index(stop) + 1]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)

    @pytest.mark.parametrize("lag", [0, 1])
    def test_eos_ends_without_a_stop_reason_unless_ignored(self, lag: int):
        everything = tuple(range(8))
        core = make(lag)
        core.add(request("a", eos=everything))
        core.add(request("b", eos=everything, ignore_eos=True))
        _, outputs = recorded_batches(core)
        ends = {o.request_id: (o.finish_reason, o.stop_reason) for o in outputs if o.finish_reason}
        assert ends == {"a": ("stop", None), "b": ("length", None)}
        assert len(tokens_of(outputs, "a")) == 1

    def test_min_tokens_masks_what_would_end_it(self):
        core = make()
        core.add(request("a", eos=(0,), min_tokens=2, stop_token_ids=[3], max_tokens=9))
        (batch, *_), _ = recorded_batches(core)
        (draw,) = batch.rows[0].draws
        assert [draw.masked_at(position) for position in (6, 7, 8)] == [(0, 3), (0, 3), ()]

    @pytest.mark.parametrize("lag", [0, 1])
    def test_max_tokens_is_exact_and_nothing_is_computed_beyond(self, lag: int):
        core = make(lag)
        core.add(request("a", max_tokens=5))
        batches, outputs = recorded_batches(core)
        assert len(batches) == 5
        assert len(tokens_of(outputs, "a")) == 5
        assert outputs[-1].finish_reason == "length"

    @pytest.mark.parametrize("lag", [0, 1])
    def test_the_context_length_ends_what_max_tokens_does_not(self, lag: int):
        core = make(lag)
        core.add(request("a", prompt=60, max_tokens=None))
        core.add(request("b", prompt=60, first=2, max_tokens=100))
        _, outputs = recorded_batches(core)
        assert [len(tokens_of(outputs, name)) for name in "ab"] == [4, 4]

    def test_a_failed_draw_ends_only_its_sequence_and_distrusts_its_blocks(self):
        core = make()
        assert isinstance(core.executor, CheckingExecutor)
        core.executor.fails = lambda seq_id, position: "not finite" if (seq_id, position) == (0, 10) else None
        core.add(request("bad", prompt=8))
        core.add(request("good", prompt=8, first=2))
        _, outputs = recorded_batches(core)
        ends = {o.request_id: (o.finish_reason, o.error) for o in outputs if o.finish_reason}
        assert ends == {"bad": ("error", "not finite"), "good": ("length", None)}
        assert len(tokens_of(outputs, "bad")) == 2
        core.add(request("bad again", prompt=9))
        core.add(request("good again", prompt=9, first=2))
        _, outputs = recorded_batches(core)
        assert {o.request_id: o.num_cached_tokens for o in outputs} == {"bad again": 0, "good again": 8}


class TestAbort:
    def test_blocks_are_back_at_once_when_no_step_is_in_flight(self):
        core = make()
        core.add(request("a", prompt=12))
        core.step()
        assert core.stats().kv_blocks_used == 3
        core.abort("a")
        assert core.stats().kv_blocks_used == 0
        assert core.has_work
        (output,) = core.step()
        assert (output.finish_reason, output.new_token_ids) == ("abort", [])
        assert not core.has_work

    def test_blocks_are_back_after_the_step_in_flight(self):
        core = make(lag=1)
        core.add(request("a", prompt=12))
        core.step()
        core.abort("a")
        assert core.stats().kv_blocks_used == 3
        (output,) = core.step()
        assert output.finish_reason == "abort"
        assert core.stats().kv_blocks_used == 0
        assert not core.has_work

    def test_unknown_and_ended_requests_are_no_error(self):
        core = make()
        core.abort("nobody")
        core.add(request("a"))
        recorded_batches(core)
        core.abort("a")
        core.abort("a", 7)
        assert not core.has_work

    def test_a_waiting_request_leaves_the_queue(self):
        core = make(max_num_seqs=1)
        core.add(request("a"))
        core.add(request("b"))
        core.step()
        core.abort("b")
        assert core.stats().waiting == 0
        assert order_of_ends(recorded_batches(core)[1]) == ["b", "a"]


class TestPrefixCache:
    def test_a_second_request_computes_only_what_is_new(self):
        core = make()
        core.add(request("a", prompt=14))
        recorded_batches(core)
        core.add(request("b", prompt=16))
        batches, outputs = recorded_batches(core)
        assert (batches[0].rows[0].start, batches[0].rows[0].num_tokens) == (12, 4)
        assert {output.num_cached_tokens for output in outputs} == {12}
        stats = core.stats()
        assert (stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.prompt_tokens) == (30, 12, 30)

    def test_the_last_prompt_token_is_always_computed(self):
        core = make()
        for name in "ab":
            core.add(request(name, prompt=12))
            batches, _ = recorded_batches(core)
        assert (batches[0].rows[0].start, batches[0].rows[0].num_tokens) == (8, 4)

    def test_blocks_are_shared_while_their_first_user_still_runs(self):
        core = make()
        core.add(request("a", prompt=12, max_tokens=20))
        core.step()
        core.add(request("b", prompt=12, max_tokens=2))
        batches, _ = recorded_batches(core)
        assert batches[0].rows[0].block_ids[:2] == batches[0].rows[1].block_ids[:2]

    def test_outputs_can_be_found_too(self):
        core = make()
        core.add(request("a", prompt=7, max_tokens=6))
        prompt = request("a", prompt=7).prompt_token_ids
        tokens = tokens_of(recorded_batches(core)[1], "a")
        core.add(Request("b", (*prompt, *tokens, 1), SamplingParams(max_tokens=1)))
        _, outputs = recorded_batches(core)
        assert outputs[0].num_cached_tokens == 12

    def test_prompt_logprobs_skip_nothing_and_come_once(self):
        core = make()
        core.add(request("a", prompt=30))
        recorded_batches(core)
        core.add(request("b", prompt=30, prompt_logprobs=2, n=2))
        batches, outputs = recorded_batches(core)
        rows = [row for batch in batches for row in batch.rows]
        assert rows[0].start == 0
        assert [row.prompt_logprobs for row in rows[:3]] == [2, 2, None]
        assert [row.scored for row in rows[:2]] == [range(1, 17), range(17, 30)]
        carried = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
        assert len(carried) == 1
        assert carried[0][0] is None
        prompt = request("b", prompt=30).prompt_token_ids
        assert [entry.token_id for entry in carried[0][1:] if entry is not None] == list(prompt[1:])

    @pytest.mark.parametrize(("start", "cached"), [(0, 0), (4, 0), (5, 4), (24, 20), (25, 24), (29, 28)])
    def test_tokens_before_the_first_scored_one_may_be_cached(self, start, cached):
        """The token before it is computed, because it predicts it."""
        core = make()
        core.add(request("a", prompt=30))
        recorded_batches(core)
        core.add(request("b", prompt=30, prompt_logprobs=0, prompt_logprobs_start=start))
        batches, outputs = recorded_batches(core)
        rows = [row for batch in batches for row in batch.rows]
        assert rows[0].start == outputs[0].num_cached_tokens == cached
        assert sum(batch.scored for batch in batches) == 30 - max(start, 1)
        prompt, entries = request("b", prompt=30).prompt_token_ids, outputs[0].prompt_logprobs
        assert [entry and entry.token_id for entry in entries] == [
            token if at >= max(start, 1) else None for at, token in enumerate(prompt)
        ]

    def test_chunks_before_the_first_scored_token_request_nothing(self):
        core = make()
        core.add(request("a", prompt=40, prompt_logprobs=1, prompt_logprobs_start=33))
        rows = [row for batch in recorded_batches(core)[0] for row in batch.rows]
        assert [(row.end, row.prompt_logprobs, row.scored) for row in rows[:3]] == [
            (16, None, range(0)),
            (32, None, range(0)),
            (40, 1, range(33, 40)),
        ]

    def test_a_first_scored_position_beyond_the_prompt_is_refused(self):
        request("a", prompt=30, prompt_logprobs=0, prompt_logprobs_start=29)
        with pytest.raises(ValueError, match="prompt_logprobs_start is 30, but the prompt has 30 tokens: give at most"):
            request("a", prompt=30, prompt_logprobs=0, prompt_logprobs_start=30)

    def test_nothing_is_cached_when_it_is_off(self):
        core = make(enable_prefix_caching=False)
        for name in "ab":
            core.add(request(name, prompt=12))
            _, outputs = recorded_batches(core)
        assert {output.num_cached_tokens for output in outputs} == {0}
        assert core.stats().kv_blocks_cached == 0


class TestSeedsAndTimes:
    def seeds(self, seed: int | None) -> list[int]:
        core = make(seed=seed)
        for name in "ab":
            core.add(request(name, seed=None))
        return [row.draws[0].seed for row in recorded_batches(core)[0][0].rows]

    def test_requests_without_a_seed_get_different_ones_that_the_engine_seed_repeats(self):
        assert self.seeds(5) == self.seeds(5)
        assert self.seeds(5) != self.seeds(6)
        assert len(set(self.seeds(5))) == 2
        assert self.seeds(None) != self.seeds(None)

    def test_negative_seeds_are_taken_modulo_two_to_the_64(self):
        core = make()
        core.add(request("a", seed=-1))
        assert recorded_batches(core)[0][0].rows[0].draws[0].seed == 2**64 - 1

    def test_times_tell_queue_wait_first_token_and_end(self):
        core = make(max_num_seqs=1)
        clock = core.scheduler.clock
        assert isinstance(clock, VirtualClock)
        core.add(request("a", max_tokens=2))
        core.add(request("b", max_tokens=2))
        outputs = []
        while core.has_work:
            outputs += core.step()
            clock.advance(1.0)
        times = [output.times for output in outputs if output.request_id == "b" and output.times is not None]
        assert [(t.arrival, t.first_scheduled, t.first_token, t.finished) for t in times] == [
            (0.0, 2.0, 2.0, None),
            (0.0, 2.0, 2.0, 3.0),
        ]

    def test_arrival_may_be_given(self):
        core = make()
        core.add(Request("a", (1,), SamplingParams(max_tokens=1), arrival_time=-3.5))
        (output,) = recorded_batches(core)[1]
        assert output.times is not None
        assert output.times.arrival == -3.5


def test_results_must_come_in_order():
    core = make()
    scheduler = core.scheduler
    scheduler.add(request("a"))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    with pytest.raises(AssertionError, match="out of order"):
        scheduler.commit(second, StepResult({0: 1}))
