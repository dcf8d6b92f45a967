"""Searches in the shipping scheduler on the checking device: KV blocks, ends within a step, engines that fail."""

import dataclasses
import math
import random

import pytest
from kv_checker import Broken
from search_runs import tree_of
from small_engine import make

from transect import Search
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.search.local import LocalSearch
from transect.search.machine import SearchRun
from transect.search.tree import Drop, Extend, Tree

BLOCK = 4
PROMPT = [1, 2, 3, 4, 5, 6, 7] * 3


class Digits:
    """Token i is the digit i."""

    special_ids = frozenset()
    drops_leading_space = False

    def token_bytes(self, token):
        return b"01234567"[token : token + 1]

    def token_text(self, token):
        return self.token_bytes(token).decode()

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(self.token_text, ids))


class CoreLLM:
    """The part of an ``LLM`` that searches use, over an engine without a model."""

    chat_template = None
    tokenizer = Digits()

    def __init__(self, core, step=None):
        self.core, self._count = core, 0
        self._step = step or (lambda core: core.step())
        self.blocks, self.rows, self.aborts = [], [], []
        submit = core.executor.submit

        def record(batch):
            self.rows.append({row.seq_id for row in batch.rows})
            self.blocks.append(core.stats().kv_blocks_used)
            return submit(batch)

        core.executor.submit = record

    def submit(self, ids, params, priority=0, lora=None, pooling=None):
        name = str(self._count)
        self._count += 1
        self.core.add(Request(name, tuple(ids), params, priority, pooling=pooling))
        return name

    def step(self):
        return self._step(self.core)

    def abort(self, name, choice=None):
        self.aborts.append((name, choice, len(self.rows)))
        self.core.abort(name, choice)

    @property
    def has_work(self):
        return self.core.has_work


def search_in(llm, search, **params):
    params = SamplingParams(**{"max_tokens": 12, "seed": 3} | params)
    tree = Tree(None, "question")
    run = SearchRun(search, tree, PROMPT, params, seed=1, max_model_len=64, decode=llm.tokenizer.decode)
    LocalSearch(llm, [run], {}).run()
    return run


@pytest.mark.parametrize("lag", [0, 1])
def test_64_branches_hold_the_prompt_once_and_64_own_parts(lag):
    llm = CoreLLM(make(lag, num_blocks=512, max_num_seqs=64, max_num_batched_tokens=64))
    search_in(llm, Search("best_of_n", n=64), max_tokens=10)
    whole, rest = divmod(len(PROMPT), BLOCK)
    own = math.ceil((rest + 10) / BLOCK)  # each has a copy of the block in which the prompt ends
    assert max(llm.blocks) <= whole + 64 * own
    assert max(llm.blocks) > 64 * (own - 1)
    assert llm.core.stats().kv_blocks_used == 0


def steps_with_losers(tree, options):
    """Three branches of three tokens, and two that are dropped when these have ended."""
    branches = tree.fork(tree.root, 5)
    yield [*(Extend(branch, max_tokens=3) for branch in branches[:3]), *(Extend(branch) for branch in branches[3:])]
    yield [Drop(branch) for branch in tree.alive]


@pytest.mark.parametrize("lag", [0, 1])
def test_no_step_that_is_planned_later_has_a_loser(lag):
    """``lag`` steps are under way when the last token of a winner is known."""
    llm = CoreLLM(make(lag, num_blocks=256, max_num_seqs=16))
    search = Search("best_of_n")
    search.method = dataclasses.replace(search.method, steps=steps_with_losers)
    run = search_in(llm, search, max_tokens=30)
    assert [branch.state for branch in run.tree.branches] == ["ended"] * 3 + ["dropped"] * 2
    assert all(len(branch.tokens) == 3 for branch in run.tree.branches)
    losers = {3, 4}
    at = {at for _, choice, at in llm.aborts if choice is not None}.pop()
    assert losers <= llm.rows[at - lag - 1] and not any(rows & losers for rows in llm.rows[at:])
    assert len(llm.rows) <= 3 + math.ceil(len(PROMPT) / 16) + lag


@pytest.mark.parametrize("method", ["majority", "adaptive", "beam", "confident"])
def test_a_search_whose_engine_fails_in_the_middle_has_the_same_tree(method):
    """Steps raise at random; the engine takes them back, and draws the same tokens again."""
    options = {"beam": {"n": 6, "step": "3", "step_tokens": 5}, "confident": {"n": 8, "warmup": 3, "window": 2}}
    extract = {} if method == "beam" else {"extract": "text"}
    search = Search(method, budget=70, **options.get(method, {"n": 8}), **extract)
    expected = tree_of(search_in(CoreLLM(make(num_blocks=256, max_num_seqs=16)), search))
    for turn in range(6):
        rng = random.Random(turn)
        core = make(1, num_blocks=256, max_num_seqs=16)
        core.executor.breaks = lambda step, where, rng=rng: Broken("planned") if rng.random() < 0.1 else None

        def step(core):
            try:
                return core.step()
            except Broken:
                return []

        assert tree_of(search_in(CoreLLM(core, step), search)) == expected


def test_text_of_branches_is_that_of_their_tokens():
    run = search_in(CoreLLM(make(num_blocks=256, max_num_seqs=16)), Search("best_of_n", n=4))
    assert all(branch.text == "".join(map(str, branch.tokens)) for branch in run.tree.branches)
