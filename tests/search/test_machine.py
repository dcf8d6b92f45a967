"""The state machine of a search: the tree depends on tokens alone; budgets, drops, forks."""

import random
import re

import pytest
from effort import proving
from search_runs import Drive, start, tree_of

from transect import Search
from transect.search.judges import Program, RewardHead
from transect.search.methods.registry import search_methods
from transect.search.prices import BranchPrice

TURNS = 60 if proving() else 12


def story(prompt, choice, seed):
    """Answers of several lengths and lines, from the numbers of a branch alone."""
    rng = random.Random(f"{prompt} {choice} {seed}")
    lines = ["".join(rng.choice("abc 4") for _ in range(rng.randint(1, 9))) for _ in range(rng.randint(1, 4))]
    return "\n".join([*lines, f"answer: {rng.choice('3445')}"])


SETTINGS = {
    "adaptive": {"n": 12, "wave": 3},
    "beam": {"n": 6, "width": 2, "score": "length"},
    "confident": {"n": 12, "warmup": 4, "window": 4},
    "refine": {"n": 2, "score": "length"},
    "best_of_n": {"n": 6, "score": "length"},
}
JUDGES = {"length": Program(lambda question, answer: float(len(answer)))}


@pytest.mark.parametrize("method", sorted(search_methods()))
@pytest.mark.parametrize("budget", [None, 60])
def test_the_tree_is_the_same_at_any_speed(method, budget):
    """Branches advance in lockstep, or each at its own random speed: as in an engine that preempts or is replaced."""
    search = Search(method, budget=budget, **SETTINGS.get(method, {}))
    expected = tree_of(Drive(start(search, judges=JUDGES), story).all())
    for turn in range(TURNS):
        assert tree_of(Drive(start(search, judges=JUDGES), story, random.Random(turn)).all()) == expected


def test_branches_that_begin_together_are_choices_of_one_request():
    drive = Drive(start(Search("best_of_n", n=16)), story)
    drive.all()
    (submit,) = drive.submits
    assert submit.params.n == 16 and submit.params.logprobs == 0


def test_a_branch_that_goes_on_has_a_request_and_a_seed_of_its_own():
    drive = Drive(start(Search("beam", n=4, width=2)), story)
    drive.all()
    seeds = [submit.params.seed for submit in drive.submits]
    assert len(set(seeds)) == len(seeds) > 1
    for submit in drive.submits[1:]:
        assert submit.params.n == 2  # two beams, two continuations each
        assert bytes(submit.prompt_token_ids).startswith(b"2+2?")


def test_a_decided_vote_drops_the_rest_before_the_next_step():
    """Three short answers agree, and two long ones cannot change the vote."""
    drive = Drive(start(Search("majority", n=5)), lambda prompt, choice, seed: "4" if choice < 3 else "9" * 50)
    run = drive.all()
    assert drive.steps == 1 and {each.choice for each in drive.aborts} == {3, 4}
    assert [branch.state for branch in run.tree.branches] == ["ended"] * 3 + ["dropped"] * 2
    assert run.result.votes == {"4": 3.0} and run.result.text == "4"


def test_a_budget_of_tokens_is_kept_to_the_token():
    run = Drive(
        start(Search("majority", n=4, budget=25)), lambda prompt, choice, seed: "x" * (choice + 3) + "4" * 60
    ).all()
    assert run.tree.tokens in range(25, 25 + 4)
    assert run.result.ended_by == "tokens" and run.result.branch.finish_reason == "length"


def test_a_budget_that_ends_all_branches_keeps_the_complete_answers():
    run = Drive(
        start(Search("majority", n=4, budget=30)), lambda prompt, choice, seed: "x" * 60 if choice else "4"
    ).all()
    assert run.result.text == "4" and run.result.branch.finish_reason == "stop"


def test_seconds_end_a_search_with_what_there_is():
    run = start(Search("best_of_n", n=3))
    drive = Drive(run, lambda prompt, choice, seed: "4" * 30)
    drive.perform()
    for _ in range(5):
        drive.step()
    run.end()
    assert run.result.ended_by == "seconds" and run.result.text == "44444"


def test_seconds_before_any_token_are_an_error_that_says_so():
    run = start(Search("best_of_n", n=3))
    with pytest.raises(ValueError, match="no answer: its budget was spent before a branch had a token"):
        run.end()


def test_unlikely_branches_are_dropped_in_the_step_in_which_they_become_so():
    """Digits are unlikely. The warm-up has none, so a window of four digits is below its floor."""
    replies = ["abcdefgh answer: x"] * 4 + ["abcd 1234567890 answer: 7"] * 2
    count = iter(range(10))
    search = Search("confident", n=6, warmup=4, window=4, certainty=1)
    drive = Drive(start(search), lambda prompt, choice, seed: replies[next(count)])
    run = drive.all()
    late = run.tree.branches[4:]
    assert [branch.state for branch in late] == ["dropped"] * 2
    assert all(branch.text == "abcd 1" for branch in late)
    assert list(run.result.votes) == ["x"]


def test_a_reward_head_reads_the_prompt_and_the_answer():
    import numpy as np

    head = RewardHead(np.array([0.0, 1.0]))
    run = Drive(
        start(Search("best_of_n", n=3, score="head"), judges={"head": head}),
        lambda prompt, choice, seed: "4" * choice + ".",
    ).all()
    assert [branch.scores["head"] for branch in run.tree.branches] == [0.0, 1.0, 2.0]
    assert run.result.branch.id == 2


def test_a_judge_that_fails_leaves_the_likelihood():
    broken = {"broken": Program(lambda question, answer: None)}
    run = Drive(
        start(Search("best_of_n", n=3, score="broken"), judges=broken),
        lambda prompt, choice, seed: "1" * (3 - choice) + "x" * 9,
    ).all()
    assert run.result.branch.scores == {"broken": None}


def test_refine_asks_in_the_words_of_the_conversation():
    seen = []

    def reply(prompt, choice, seed):
        seen.append(prompt)
        return "Yes" if "Reply with Yes" in prompt else "better" if "Write your final answer" in prompt else "draft"

    run = Drive(start(Search("refine", rounds=2)), reply).all()
    assert run.result.text == "draft"  # all have the same verdict, and the first wins a tie
    texts = [branch.text for branch in run.tree.branches if branch.tokens]
    assert texts == ["draft", "draft", "better", "draft", "better"]
    assert sum("Reply with Yes" in prompt for prompt in seen) == 3
    assert re.search(r"\[user\]2\+2\?\[assistant\]draft\[user\]Check your answer", seen[1])


def test_a_mixture_shows_the_proposals_of_all_adapters():
    seen = []

    def reply(prompt, choice, seed):
        seen.append(prompt)
        return "all" if "Proposal 4" in prompt else f"p{choice}"

    run = Drive(start(Search("mixture", n=2, adapters=["a", "b"])), reply).all()
    assert run.result.text == "all" and "Proposal 3: p0\n\nProposal 4: p1" in seen[-1]
    assert [branch.adapter for branch in run.tree.branches[:4]] == ["a", "a", "b", "b"]


def test_a_beam_ends_with_a_complete_answer():
    """The longest beginning is kept after each line."""
    drive = Drive(start(Search("beam", n=4, width=1, score="length"), judges=JUDGES), story)
    run = drive.all()
    assert run.result.branch.complete and "answer:" in run.result.text.splitlines()[-1]
    kept = [branch for branch in run.tree.branches if branch.state == "ended"]
    assert len(kept) < len(run.tree.branches)


def test_a_prompt_that_fills_the_context_has_no_answer():
    with pytest.raises(ValueError, match="no answer"):
        Drive(start(Search("best_of_n", n=2), max_model_len=4), story).all()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"n": 2}, "n must be 1 with a search"),
    ],
)
def test_parameters_that_do_not_fit_a_search_are_refused(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        start(Search("majority"), **fields)
    if "n" not in fields:
        start(Search("majority", n=1), **fields)


def test_methods_that_ask_need_a_conversation():
    with pytest.raises(ValueError, match=r"search.method refine asks the model about its answers: give messages"):
        start(Search("refine"), messages=None)


def adaptive_run(price, seconds=0.9):
    """Waves of four branches of 20 tokens, without a decision of the vote; a step takes what the price says."""
    search = Search("adaptive", n=16, wave=4, certainty=1.0, budget={"seconds": seconds})
    drive = Drive(start(search), lambda prompt, choice, seed: f"answer: {seed % 97}{choice}".ljust(20, "."))
    drive.run.costs.price = price
    while not drive.run.done:
        drive.perform()
        if not drive.run.done:
            rows = len(drive.left)
            drive.run.costs.spent_s += 0.01 + 0.002 * rows
            drive.step()
    return drive.run


def test_a_branch_is_forked_only_if_it_ends_within_the_seconds():
    run = adaptive_run(BranchPrice(step_s=0.01, row_s=0.002, free_blocks=100, block_size=16))
    assert run.result.ended_by == "cost" and len(run.tree.branches) == 8  # two waves of 0.36 s; a third is too long
    forks = run.result.to_dict()["forks"]
    assert [each["branches"] for each in forks] == [4, 1]
    assert forks[0] | {"ms": 360.0, "step_ms": 10.0, "row_ms": 2.0, "kv_blocks": 8} == forks[0]
    assert all(branch.complete for branch in run.tree.branches)  # none was cut
    smaller = adaptive_run(BranchPrice(step_s=0.01, row_s=0.002, free_blocks=100, block_size=16), seconds=0.65)
    assert [each["branches"] for each in smaller.result.to_dict()["forks"]] == [2, 1]
    full = adaptive_run(BranchPrice(step_s=0.0, row_s=1e-6, free_blocks=3, block_size=16))
    assert full.result.to_dict()["forks"][0]["branches"] == 1  # a branch fills two blocks of the three


def test_without_a_price_or_a_budget_of_seconds_nothing_is_held_back():
    run = adaptive_run(None)
    assert len(run.tree.branches) == 16 and run.result.ended_by == "method" and run.result.to_dict()["forks"] == []
    search = Search("adaptive", n=8, wave=4, certainty=1.0)
    drive = Drive(start(search), lambda prompt, choice, seed: f"answer: {seed % 97}{choice}")
    drive.run.costs.price = BranchPrice(1.0, 1.0, 1, 16)
    assert len(drive.all().tree.branches) == 8 and "forks" not in drive.run.result.to_dict()
