"""Rows of different adapters on a GPU: each has the bits that it has alone in the deterministic mode, and a step gives
the same bits every time it is run, though its launches overlap."""

import dataclasses

import pytest
import torch
from gpu_engine import BLOCK, gpu_model

from transect.models.context import PagedContext
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack
from transect.models.row_adapters import TensorAdapters
from transect.models.weights.row_adapted import RowAdapted
from transect.spec.shapes import PRESETS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SLOTS, LENGTH = 4, 40


def adapted_model(*, deterministic: bool) -> Decoder:
    """Two layers at the widths of an 8B model, with random adapters on all matrices."""
    config = dataclasses.replace(PRESETS["llama-3.1-8b"], n_layers=2, max_position=256, vocab_size=1024)
    model = gpu_model(config, torch.bfloat16, deterministic=deterministic, std=0.02)
    model.adapters = TensorAdapters(model, SLOTS, 16, ("q", "k", "v", "o", "gate", "up", "down"))
    model.stack = FusedStack(model, max_positions=config.max_position)
    for module in model.modules():
        if isinstance(module, RowAdapted):
            for factor in (module.a, module.b):
                factor.copy_(torch.randn(factor.shape, device="cuda") / 50)
            module.scale.fill_(2.0)
    return model


class Decodes:
    """Decode steps of rows, each at the end of ``LENGTH`` tokens of its own."""

    def __init__(self, model: Decoder, rows: int) -> None:
        self.model, count = model, -(-LENGTH // BLOCK)
        self.caches = model.new_kv_cache(rows * count, BLOCK, torch.bfloat16)
        for cache in self.caches:
            cache.normal_()
        self.tables = torch.arange(rows * count, device="cuda", dtype=torch.int32).view(rows, count)
        self.tokens = torch.arange(rows, device="cuda") % 1024
        self.slots = torch.arange(rows, device="cuda", dtype=torch.int32) % (SLOTS + 1) - 1

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of these rows in one step."""
        slots = self.slots[rows]
        self.model.adapters.rows.slots_T = slots if bool((slots >= 0).any()) else None
        starts = torch.arange(len(rows) + 1, device="cuda", dtype=torch.int32)
        lengths = torch.full((len(rows),), LENGTH, device="cuda", dtype=torch.int32)
        context = PagedContext(*self.caches, self.tables[rows], starts, lengths, self.model.ops, max_query_len=1)
        hidden = self.model(self.tokens[rows], torch.full((len(rows),), LENGTH - 1, device="cuda"), context)
        return self.model.head(hidden).clone()


@torch.inference_mode()
def test_a_row_has_the_bits_that_it_has_alone():
    decodes = Decodes(adapted_model(deterministic=True), 300)
    everyone = torch.arange(300, device="cuda")
    together = decodes.logits(everyone)
    for count in (2, 17, 64, 256):
        assert torch.equal(decodes.logits(everyone[:count]), together[:count]), f"{count} rows"
    for row in range(10):
        alone = decodes.logits(everyone[row : row + 1])
        assert torch.equal(alone[0], together[row]), f"row {row}, slot {int(decodes.slots[row])}"
    assert not torch.equal(together[0], together[5])


@torch.inference_mode()
def test_overlapping_launches_give_the_same_bits_every_time():
    decodes = Decodes(adapted_model(deterministic=False), 64)
    rows = torch.arange(64, device="cuda")
    first = decodes.logits(rows)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        decodes.logits(rows)
        torch.cuda.synchronize()
        slots, starts = decodes.slots[rows], torch.arange(65, device="cuda", dtype=torch.int32)
        lengths, positions = starts[1:] * 0 + LENGTH, torch.full((64,), LENGTH - 1, device="cuda")
        decodes.model.adapters.rows.slots_T = slots
        context = PagedContext(*decodes.caches, decodes.tables, starts, lengths, decodes.model.ops, max_query_len=1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = decodes.model.head(decodes.model(decodes.tokens, positions, context))
        for _ in range(100):
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(found, first)
