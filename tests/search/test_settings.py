"""Settings of searches: what is accepted, and what is refused by name."""

import random
import re

import pytest

from transect import Search
from transect.search.judges import ModelVerdict, RewardHead, judge_of
from transect.search.methods.registry import prefixed, search_methods
from transect.search.methods.steps import certainty, settled
from transect.search.settings import SearchBudget, search_from_words
from transect.text.outputs import Logprob


@pytest.mark.parametrize("name", sorted(search_methods()))
def test_settings_survive_a_round_trip(name):
    search = Search(name, n=4, budget={"tokens": 100, "seconds": 2})
    assert Search.of(search.to_dict()).to_dict() == search.to_dict()
    assert Search.of(search) is search and Search.of(name).method.name == name


def test_a_command_line_gives_the_same_search():
    search = search_from_words("adaptive", 16, "2000", '{"certainty": 0.9}')
    assert search.to_dict() == Search("adaptive", n=16, budget=2000, certainty=0.9).to_dict()
    assert search_from_words("majority", None, "1.5s", None).budget == SearchBudget(None, 1.5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("majority", None, "soon", None), "--budget takes tokens (2000) or seconds (5s), not 'soon'"),
        (("majority", None, None, "[]"), "--search-options takes a JSON object"),
        (("majority", None, None, "{"), "--search-options takes a JSON object"),
        (("majority", 0, None, None), "search.n must be a whole number of at least 1"),
        (("none", None, None, None), "search.method must be one of"),
        (("confident", None, None, '{"keep": 0}'), "search.keep must be a number above 0"),
        (("confident", None, None, '{"keep": true}'), "search.keep must be number, not True"),
        (("mixture", None, None, '{"adapters": "a"}'), "search.adapters must be strings, not 'a'"),
        (("beam", None, None, '{"step": ""}'), "search.step must be the text that ends a step"),
    ],
)
def test_words_at_fault_are_named(words, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        search_from_words(*words)


@pytest.mark.parametrize("budget", [0, True, 1.5, {}, {"tokens": "9"}, {"seconds": 0}, {"seconds": float("inf")}, "9"])
def test_budgets_at_fault_are_named(budget):
    with pytest.raises(ValueError, match=r"search\.budget must be"):
        Search("majority", budget=budget)


def test_prefixes():
    assert prefixed("bon-m")[0].name == "best_of_n" and prefixed("bon-m")[1] == "m"
    assert prefixed("moa-a-b")[1] == "a-b" and prefixed("bon-") is None and prefixed("bonm") is None
    every = [prefix for method in search_methods().values() for prefix in method.prefixes]
    assert len(set(every)) == len(every)


def test_certainty_is_the_chance_that_the_leader_of_a_vote_wins_it():
    assert certainty({}, 8) == pytest.approx(0.5) and certainty({"a": 3.0, "b": 3.0}, 9) == pytest.approx(0.5)
    assert certainty({"a": 4.0}, 5000) == pytest.approx(1 - 1 / 32, abs=1e-3)  # P(Beta(5, 1) > 1/2)
    assert certainty({"a": 2.0, "b": 1.0}, 1) == pytest.approx(1 - (2 / 5) / 2)  # a tie, if it is b's
    assert certainty({"a": 9.0, "b": 5.0}, 0) == pytest.approx(1)
    assert certainty({"a": 9.0, "b": 5.0, "c": 9.0}, 9) > certainty({"a": 9.0, "b": 5.0}, 9)  # fewer are contested


def test_a_vote_that_stops_early_has_the_answer_of_the_full_vote_as_often_as_it_says():
    """Answers of questions of all kinds, drawn from the prior that the certainty assumes."""
    rng = random.Random(1)
    same = votes = 0
    for _ in range(1500):
        weights = [rng.expovariate(1.0) for _ in range(3)]
        drawn = rng.choices("abc", weights, k=16)
        counts: dict[str, float] = {}
        for number, answer in enumerate(drawn, 1):
            counts[answer] = counts.get(answer, 0.0) + 1
            ranked = dict(sorted(counts.items(), key=lambda item: -item[1]))
            if certainty(ranked, 16 - number) >= 0.9:
                break
        full = {each: drawn.count(each) for each in drawn}
        same += full[next(iter(ranked))] == max(full.values())
        votes += number
    assert same >= 0.9 * 1500 and votes < 0.6 * 16 * 1500
    assert settled({"a": 3.0, "b": 1.0}, 1) and not settled({"a": 3.0, "b": 1.0}, 2) and not settled({}, 0)


def test_a_judge_that_is_none_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"search.score must be one of likelihood, verdict, mine, not 'yours'"):
        judge_of("yours", {"mine": ModelVerdict()})


def test_a_verdict_is_the_share_of_yes():
    position = {1: Logprob(-1.0, 1, " Yes"), 2: Logprob(-1.0, 2, "no"), 3: Logprob(-0.1, 3, "Maybe")}
    assert ModelVerdict().score(position) == 0.5
    assert ModelVerdict().score({3: position[3]}) == 0.5 and ModelVerdict().score({1: position[1]}) == 1.0


def test_reward_heads_are_read_from_files(tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    weight = np.arange(4, dtype=np.float32)
    save_file(
        {"base_model.model.score.weight": weight[None], "score.bias": np.ones(1)},
        tmp_path / "adapter_model.safetensors",
    )
    head = RewardHead.read(tmp_path)
    assert head.score(np.ones(4).tobytes()) == 7.0
    with pytest.raises(ValueError, match="has 4 inputs, and the model's hidden states 8"):
        head.check_size(8)
    save_file({"score.weight": np.ones((2, 4))}, tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match=r"must hold one tensor score.weight of shape \[1, hidden size\]"):
        RewardHead.read(tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match="cannot be read"):
        RewardHead.read(tmp_path / "none.safetensors")
