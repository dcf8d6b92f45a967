"""Who runs in which step: the budget, the order, static batches. The device checks every KV read on the way."""

import pytest
from small_engine import lengths, make, order_of_ends, recorded_batches, request, tokens_of


class TestBudget:
    def test_long_prompts_are_cut_into_chunks_of_the_budget(self):
        core = make()
        core.add(request("a", prompt=40))
        batches, _ = recorded_batches(core)
        assert [lengths(batch) for batch in batches] == [[16], [16], [8], [1], [1], [1]]
        assert [len(batch.rows[0].draws) for batch in batches] == [0, 0, 1, 1, 1, 1]

    def test_decodes_go_on_beside_a_long_prompt_and_the_prompt_gets_the_rest(self):
        core = make()
        core.add(request("short", max_tokens=8))
        core.step()
        core.add(request("long", prompt=40, first=2))
        batches, _ = recorded_batches(core)
        assert [lengths(batch) for batch in batches[:3]] == [[1, 15], [1, 15], [1, 10]]

    def test_decodes_that_come_later_do_not_starve_behind_an_earlier_prompt(self):
        core = make(max_prefill_chunk=8)
        core.add(request("long", prompt=50))
        core.add(request("short", prompt=3, first=2))
        batches, outputs = recorded_batches(core)
        assert [lengths(batch) for batch in batches[:5]] == [[8, 3], [8, 1], [8, 1], [8, 1], [8]]
        assert order_of_ends(outputs) == ["short", "long"]

    def test_a_prompt_moves_on_even_when_decodes_fill_the_budget(self):
        core = make(max_num_batched_tokens=4)
        for i in range(3):
            core.add(request(f"d{i}", prompt=1, first=i + 1, max_tokens=30))
        core.step()
        core.add(request("p", prompt=12, first=5))
        batches, _ = recorded_batches(core)
        assert all(lengths(batch) == [1, 1, 1, 1] for batch in batches[:12])
        assert batches[11].rows[3].draws

    def test_a_step_is_shorter_where_sequences_decode(self):
        core = make(max_mixed_tokens=6)
        core.add(request("long", prompt=20, max_tokens=8))
        core.add(request("next", prompt=20, first=2, max_tokens=1))
        batches, _ = recorded_batches(core)
        assert [lengths(batch) for batch in batches] == [[16], [4, 12], [1, 5], [1, 3], *[[1]] * 5]

    def test_a_sequence_that_draws_its_last_token_makes_no_step_shorter(self):
        core = make(lag=1, max_mixed_tokens=6)
        for i in range(3):
            core.add(request(f"r{i}", prompt=16, first=i + 1, max_tokens=1))
        batches, _ = recorded_batches(core)
        assert [lengths(batch) for batch in batches] == [[16]] * 3

    def test_many_requests_are_batched_in_one_step(self):
        core = make()
        for i in range(4):
            core.add(request(f"r{i}", prompt=3, first=i + 1))
        batches, _ = recorded_batches(core)
        assert [lengths(batch) for batch in batches] == [[3, 3, 3, 3]] + [[1, 1, 1, 1]] * 3

    def test_a_step_copies_no_token_lists(self):
        core = make()
        core.add(request("a", prompt=10, max_tokens=20))
        batches, _ = recorded_batches(core)
        (draw,) = batches[3].rows[0].draws
        assert batches[7].rows[0].draws[0] is draw
        assert batches[7].rows[0].output_token_ids is batches[3].rows[0].output_token_ids
        assert batches[7].rows[0].block_ids is batches[3].rows[0].block_ids

    def test_fresh_blocks_of_a_prompt_ascend_where_cached_ones_are_taken_from_their_end(self):
        core = make(num_blocks=16, max_num_batched_tokens=64)
        for n in range(1, 4):
            core.add(request(f"r{n}", prompt=40, first=n, max_tokens=1))
            batches, _ = recorded_batches(core)
            (row,) = batches[0].rows
            assert len(row.block_ids) == 10
            assert list(row.block_ids) == sorted(row.block_ids)


class TestOrder:
    def test_first_come_first_served(self):
        core = make(max_num_seqs=1)
        for name in "abc":
            core.add(request(name))
        assert order_of_ends(recorded_batches(core)[1]) == ["a", "b", "c"]

    def test_lower_priority_numbers_run_earlier(self):
        core = make(max_num_seqs=1, scheduling_policy="priority")
        for name, priority in (("a", 1), ("b", 0), ("c", -5), ("d", 0)):
            core.add(request(name, priority=priority))
        assert order_of_ends(recorded_batches(core)[1]) == ["c", "b", "d", "a"]

    def test_longest_first_begins_with_what_may_draw_most(self):
        core = make(max_num_seqs=1, longest_first=True, scheduling_policy="priority")
        for name, tokens, prompt in (("a", 2, 9), ("b", 7, 3), ("c", 7, 12), ("d", 30, 4)):
            core.add(request(name, prompt=prompt, max_tokens=tokens))
        core.add(request("urgent", max_tokens=1, priority=-1))
        assert order_of_ends(recorded_batches(core)[1]) == ["urgent", "d", "b", "c", "a"]

    def test_static_batches_are_taken_in_the_order_of_arrival_always(self):
        core = make(max_num_seqs=1, longest_first=True, batching="static")
        for name, tokens in (("a", 2), ("b", 7)):
            core.add(request(name, max_tokens=tokens))
        assert order_of_ends(recorded_batches(core)[1]) == ["a", "b"]

    def test_nobody_overtakes_a_head_that_does_not_fit_yet(self):
        core = make(num_blocks=10, max_num_batched_tokens=64)
        core.add(request("runs", prompt=20))
        core.step()
        core.add(request("large", prompt=24, first=2))
        core.add(request("small", prompt=2, first=3))
        core.step()
        assert core.stats().running == 1
        assert order_of_ends(recorded_batches(core)[1])[0] == "runs"

    def test_the_worst_rank_is_preempted_and_its_output_stays_the_same(self):
        alone = make()
        alone.add(request("late", prompt=8, first=2, max_tokens=12))
        want = tokens_of(recorded_batches(alone)[1], "late")
        core = make(num_blocks=6)
        core.add(request("early", prompt=8, max_tokens=12))
        core.add(request("late", prompt=8, first=2, max_tokens=12))
        _, outputs = recorded_batches(core)
        assert core.stats().preemptions == 1
        assert order_of_ends(outputs) == ["early", "late"]
        assert tokens_of(outputs, "late") == want

    def test_priority_beats_arrival_when_somebody_must_go(self):
        core = make(num_blocks=6, scheduling_policy="priority")
        core.add(request("early", prompt=8, max_tokens=12, priority=1))
        core.add(request("urgent", prompt=8, first=2, max_tokens=12, priority=0))
        assert order_of_ends(recorded_batches(core)[1]) == ["urgent", "early"]

    @pytest.mark.parametrize("lag", [0, 1])
    def test_preempted_sequences_find_their_own_prefix_again(self, lag: int):
        core = make(lag, num_blocks=9)
        core.add(request("early", prompt=8, max_tokens=16))
        core.add(request("late", prompt=16, first=2, max_tokens=8))
        batches, outputs = recorded_batches(core)
        assert core.stats().preemptions == 1
        again = [row for batch in batches[2:] for row in batch.rows if row.num_tokens > 1]
        assert again[0].start > 0
        assert len(tokens_of(outputs, "late")) == 8


class TestStaticPolicy:
    def test_a_batch_runs_to_its_end_before_the_next_begins(self):
        core = make(batching="static", max_num_seqs=2)
        for i, max_tokens in enumerate((2, 6, 3, 1)):
            core.add(request(f"r{i}", prompt=3, first=i + 1, max_tokens=max_tokens))
        batches, outputs = recorded_batches(core)
        assert [lengths(batch) for batch in batches] == [[3, 3], [1, 1], [1], [1], [1], [1], [3, 3], [1], [1]]
        assert order_of_ends(outputs) == ["r0", "r1", "r3", "r2"]

    def test_arrivals_and_priorities_do_not_change_a_running_batch(self):
        core = make(batching="static", scheduling_policy="priority", max_num_seqs=2)
        core.add(request("a", max_tokens=5))
        core.step()
        core.add(request("b", first=2))
        core.add(request("c", first=3, priority=-1))
        core.step()
        assert core.stats().running == 1
        assert order_of_ends(recorded_batches(core)[1]) == ["a", "b", "c"]

    def test_a_batch_takes_only_what_surely_fits_to_the_end(self):
        core = make(batching="static", num_blocks=6)
        for i in range(3):
            core.add(request(f"r{i}", prompt=4, first=i + 1, max_tokens=9))
        core.step()
        assert core.stats().running == 2
        recorded_batches(core)
        assert core.stats().preemptions == 0

    def test_continuous_needs_fewer_steps_for_the_same_work(self):
        steps = {}
        for policy in ("static", "continuous"):
            core = make(batching=policy, max_num_seqs=2)
            for i in range(8):
                core.add(request(f"r{i}", prompt=3, first=i % 7, max_tokens=2 if i % 2 else 12))
            steps[policy] = len(recorded_batches(core)[0])
        assert steps["continuous"] < steps["static"]
