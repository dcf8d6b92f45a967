"""Where ranks read each other's logits, and which steps leave them there. On real ranks: ``test_gpus.py``."""

from types import SimpleNamespace

import pytest
import torch

from transect.engine.executors.gpu.device_sampling import measure_logprobs
from transect.engine.executors.gpu.runner import GPURunner
from transect.engine.executors.gpu.step_plan import Variant
from transect.models.decoder import Decoder
from transect.models.weights.weight import Ungathered
from transect.ops.opset import resolve_ops
from transect.parallel import spread_logits
from transect.parallel.group import Group
from transect.parallel.spread_logits import offsets
from transect.spec.layouts.shards import vocabulary_part
from transect.spec.model import ModelConfig

TINY = ModelConfig(
    architecture="llama", vocab_size=512, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, ffn_dim=32,
    max_position=64,
)  # fmt: skip


def test_ids_of_the_whole_row_lead_into_the_part_that_has_them():
    memory = torch.arange(3 * 4 * 128, dtype=torch.float32).view(3, 4, 128)  # ranks, rows, share
    addresses = [part.data_ptr() for part in memory]
    for rank in range(3):
        away = offsets(addresses, rank, 128, 4)
        for row, token in ((0, 0), (3, 127), (1, 128), (2, 383)):
            place = rank * 512 + row * 128 + away[token // 128] + token
            assert memory.view(-1)[place] == memory[token // 128, row, token % 128]


@pytest.mark.parametrize(("vocab", "ranks"), [(128256, 2), (151936, 2), (152064, 4), (128256, 8), (32000, 4)])
def test_parts_of_real_vocabularies_are_whole_groups(vocab, ranks):
    parts = [vocabulary_part(vocab, rank, ranks) for rank in range(ranks)]
    assert all(part.start % 128 == 0 for part in parts) and parts[-1].stop == vocab
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 128 * ranks


class Memory:
    def __init__(self, nbytes):
        self.own, self.addresses, self.freed = (
            SimpleNamespace(nbytes=nbytes, address=4096),
            [4096, 4096 + nbytes],
            False,
        )


def test_memory_is_kept_for_the_next_engine_and_grows(monkeypatch):
    made = []

    def make(world, group, nbytes):
        made.append(Memory(nbytes))
        return made[-1]

    monkeypatch.setattr(spread_logits, "shared_memory", make)
    monkeypatch.setattr(spread_logits, "free_memory", lambda world, memory: setattr(memory, "freed", True))
    monkeypatch.setattr(spread_logits, "memory_at", lambda address, nbytes: torch.zeros(nbytes).byte())
    world = SimpleNamespace(logits={}, device=torch.device("cpu"))
    group = Group((0, 1), 1, None)
    first = spread_logits.spread_logits(world, group, 512, 8, torch.bfloat16)
    assert first.kept.shape == (8, 256) and first.away.tolist() == [-2048, -256]
    spread_logits.spread_logits(world, group, 512, 4, torch.bfloat16)
    assert len(made) == 1
    spread_logits.spread_logits(world, group, 512, 8, torch.float32)
    assert [each.own.nbytes for each in made] == [4096, 8192] and made[0].freed and not made[1].freed
    assert "not whole groups" in spread_logits.spread_logits(world, group, 130, 8, torch.float32)


def test_only_plain_draws_leave_logits_where_they_are():
    """Adjusted or masked logits and logprobs need whole rows, on every rank alike."""
    model = Decoder(TINY, "cpu", torch.float32, ops=resolve_ops("cpu")).requires_grad_(False)
    caches = model.new_kv_cache(5, 16, torch.float32)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    runner = GPURunner(model, *caches, **limits)
    asked, spread = [], object()
    runner._part = Ungathered(lambda x: x[:, :7], spread)

    def sampler(logits_RV, fields, drawn, state, adjusts, wants_logprobs, masks=None, spread=None):
        asked.append((logits_RV.shape[1], spread))
        return measure_logprobs(logits_RV, drawn.token[: len(logits_RV)]) if wants_logprobs else None

    runner._sampler = sampler
    for variant in (Variant(), Variant(logprobs=True), Variant(adjust=True), Variant(masked=True)):
        runner.compile(2, 1, 2, variant)
    assert asked == [(7, spread), (512, None), (512, None), (512, None)]
