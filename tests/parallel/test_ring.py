"""Training where ranks share the tokens of a micro-batch: attention in a ring, and the steps of one rank."""

import pytest
import torch
from parallel_jobs import ring_attention
from parallel_runs import STEPS, curve, same_runs
from training_runs import tiny_run

from transect.parallel.ring_pairs import own_tokens, visible
from transect.spec.layouts.refusals import RunSettings, refusal
from transect.spec.layouts.spread import Spread
from transect.spec.shapes import PRESETS
from transect.train.loop.crew import check

torch.set_num_threads(1)
HOW = {"steps": STEPS, "accumulate": 2, "eval_every": STEPS // 2, "data": {"seq_len": 64, "micro_batch": 130}}


@pytest.mark.parametrize("window", [None, 1, 5, 30])
@pytest.mark.parametrize("ends", [[0, 48], [0, 1, 20, 21, 47, 48], [0, 6, 12, 18, 24, 30, 36, 42, 48], [0, 25, 48]])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_pair_of_a_query_and_a_key_is_seen_once(ranks, ends, window):
    index = torch.arange(ends[-1])
    document = torch.bucketize(index, torch.tensor(ends[1:]), right=True)
    distance = index[:, None] - index
    expected = (document[:, None] == document) & (distance >= 0) & (distance < (window or 99))
    found = torch.zeros_like(expected, dtype=torch.int64)
    own = [torch.cat([index[part] for part in own_tokens(ends[-1], rank, ranks)]) for rank in range(ranks)]
    for rank in range(ranks):
        for other in range(ranks):
            for queries, keys, ahead, back in visible(ends, rank, other, ranks, window):
                q, k = own[rank][queries], own[other][keys]
                assert ahead is None or ahead == q[0] - k[0]
                apart = q[:, None] - k
                seen = torch.ones_like(apart) if ahead is None else (apart >= 0) & (apart < (back or 99))
                found[q[:, None], k] += seen
    assert torch.equal(found, expected.long())


def test_ranks_have_about_as_much_to_do():
    work = []
    for rank in range(4):
        pairs = [part for other in range(4) for part in visible([0, 4096], rank, other, 4)]
        whole = sum((q.stop - q.start) * (k.stop - k.start) / (1 if ahead is None else 2) for q, k, ahead, _ in pairs)
        work.append(whole)
    assert max(work) == pytest.approx(min(work), rel=0.01)


@pytest.mark.parametrize("window", [None, 7])
def test_attention_and_its_gradients_are_those_of_one_rank(pair, window):
    given = {"ends": [0, 5, 6, 29, 40], "window": window}
    pair.call("parallel_jobs:ring_attention", given)
    for found, expected in ring_attention(pair.world, given):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one rank to compare with."""
    tmp_path = tmp_path_factory.mktemp("alone")
    return tmp_path, curve(None, tiny_run(tmp_path, **HOW))


def test_steps_are_those_of_one_rank(pair, alone):
    """Fifty with ``--prove``."""
    tmp_path, one = alone
    config = tiny_run(tmp_path, run_dir=str(tmp_path / "ring"), parallel={"context": 2}, **HOW)
    same_runs(one, curve(pair, config))


def test_adapters_chats_and_recomputed_layers_are_trained(pair, tmp_path):
    how = {"task": "lora", "steps": 3, "checkpointing": "full", "data": {"seq_len": 32, "micro_batch": 70}}
    one, _ = curve(None, tiny_run(tmp_path, **how))
    two, _ = curve(pair, tiny_run(tmp_path, run_dir=str(tmp_path / "ring"), parallel={"context": 2}, **how))
    assert [loss for loss, _ in two] == pytest.approx([loss for loss, _ in one], abs=1e-5)


def test_what_cannot_go_round_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"set parallel\.context to 1, parallel\.data to 2"):
        check(tiny_run(tmp_path, objective="dpo", parallel={"context": 2}))
    with pytest.raises(ValueError, match="samples are drawn by one rank"):
        check(tiny_run(tmp_path, samples={"prompts": ["a"]}, parallel={"context": 2}))
    assert refusal(RunSettings(), Spread(context=2), PRESETS["llama-3.2-1b"]) is None
