"""A table that embedding and head share: its gradient's two parts travel apart, and are that of one rank."""

import pytest
import torch
import torch.nn.functional as F
from parallel_runs import curve, same_runs
from thread_group import on_threads
from tiny_llm import save_tiny_llm
from training_runs import tiny_run

from transect.models.embedding import Embedding
from transect.parallel.table_rows import TableRows

VOCAB, DIM = 40, 6


def tied(seed=0):
    """A table, and the loss of tokens that it embeds and predicts."""
    embed = Embedding(VOCAB, DIM)
    with torch.no_grad():
        embed.weight.copy_(torch.randn(VOCAB, DIM, generator=torch.Generator().manual_seed(seed)))

    def loss(ids):
        return F.cross_entropy(embed(ids) @ embed.weight.T, ids.roll(-1), reduction="sum")

    return embed, loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(9, 4), (9, 0), (70, 3)], ids=["rows", "a rank has none", "more than the table"])
def test_two_parts_are_the_gradient_of_all_tokens(counts, dtype):
    """The same to the bit on every rank, tokens that come again and tokens of one rank alone included."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 7 + 5 * rank, (n,), generator=generator) for rank, n in enumerate(counts)]
    embed, loss = tied()
    for each in filter(len, ids):
        loss(each).backward()

    def work(group):
        mine, own_loss = tied()
        mine.weight.data = mine.weight.data.to(dtype)
        rows = TableRows("embed.weight", mine)
        if len(ids[group.rank]):
            with rows.apart():
                own_loss(ids[group.rank]).backward()
        assert rows.count == counts[group.rank]
        heads = torch.zeros_like(mine.weight) if mine.weight.grad is None else mine.weight.grad
        total = group.all_reduce(heads)
        alone = total.clone()
        rows.add(total, rows.exchange(group, counts, mine.weight.detach(), dtype))
        assert not torch.equal(total, alone)
        rows.clear()
        assert rows.count == 0
        return total

    one, two = on_threads(2, work)
    assert torch.equal(one, two)
    rough = dtype == torch.bfloat16
    torch.testing.assert_close(
        one.float(), embed.weight.grad, rtol=5e-2 if rough else 1e-4, atol=1.0 if rough else 1e-4
    )


def test_otherwise_the_gradient_is_the_weights():
    embed, loss = tied()
    same, own_loss = tied()
    rows = TableRows("embed.weight", same)
    ids = torch.arange(9) % 4
    loss(ids).backward()
    own_loss(ids).backward()
    assert rows.count == 0 and torch.equal(same.weight.grad, embed.weight.grad)


@pytest.mark.parametrize("zero", [0, 2])
def test_steps_are_those_of_one_rank(pair, tmp_path, zero):
    (tmp_path / "model").mkdir()
    save_tiny_llm(tmp_path / "model", tie_word_embeddings=True)
    how = {"steps": 4, "accumulate": 4, "data": {"seq_len": 32, "micro_batch": 64}}
    one = curve(None, tiny_run(tmp_path, run_dir=str(tmp_path / "one"), **how))
    two = curve(
        pair,
        tiny_run(tmp_path, run_dir=str(tmp_path / "two"), parallel={"data": 2, "zero": zero, "sums": "fused"}, **how),
    )
    same_runs(one, two)
