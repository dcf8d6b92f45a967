"""The cost arithmetic against what the operators of a running model declare, call by call."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest
import torch
from tiny_checkpoints import tiny_values

from transect.costs.model import Row, _layer_products, kv_bytes_per_token, least_products, step_cost, weight_bytes
from transect.costs.storage import Storage
from transect.costs.work import Cost
from transect.models.context import PagedContext
from transect.models.decoder import Decoder
from transect.ops.opset import OPERATORS, resolve_ops
from transect.ops.registry import get
from transect.spec.families.registry import families
from transect.spec.hf import from_hf
from transect.spec.model import ModelConfig
from transect.spec.moe import MoEConfig
from transect.spec.weights import parameter_count

SMOLLM2 = ModelConfig("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192, tied_embeddings=True)
NOT_EXACT = {"gemma2", "gemma3_text", "gpt_oss", "llama4_text", "smollm3"}
"""Families whose gates are not the SwiGLU operator that is counted, or whose layers without rotation count one."""
CONFIGS = {name: from_hf(tiny_values(name)) for name in families() if name not in NOT_EXACT}


@pytest.mark.parametrize("name", CONFIGS)
def test_step_cost_is_the_sum_of_the_operators(name: str) -> None:
    config = CONFIGS[name]
    rows = [Row(1, 9), Row(5, 5), Row(7, 12), Row(1, 1)]
    declared: dict[str, Cost] = defaultdict(lambda: Cost(0, 0, 0))

    def recording(operator: str, function):
        def call(*args, **options):
            declared[operator] += get(operator).cost(*args, **options)
            return function(*args, **options)

        return call

    ops = resolve_ops()
    ops = dataclasses.replace(ops, **{operator: recording(operator, getattr(ops, operator)) for operator in OPERATORS})
    decoder = Decoder(config, ops=ops).init_weights().requires_grad_(False)
    caches = [torch.zeros(config.n_layers, 16, config.n_kv_heads, 4, config.head_dim) for _ in range(2)]
    starts = torch.tensor([0, *(row.new for row in rows)]).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor([row.length for row in rows], dtype=torch.int32)
    context = PagedContext(*caches, torch.arange(16, dtype=torch.int32).view(4, 4)[:, :3], starts, lengths, ops)
    decoder(torch.zeros(14, dtype=torch.int64), context.positions(), context)

    single = Storage(linear=32, embed=32, head=32, norm=32, activation=32, kv=32)
    counted = step_cost(config, rows, storage=single)
    assert set(counted) == set(declared) | {"embed", "head"}
    for operator, cost in declared.items():
        assert dataclasses.astuple(counted[operator]) == pytest.approx(dataclasses.astuple(cost), rel=1e-12), operator
    head = get("linear").cost(torch.zeros(4, config.dim), decoder.head.weight)
    assert counted["head"] == head


def together(costs: Mapping[str, Cost] | Sequence[Cost]) -> Cost:
    return sum(costs.values() if isinstance(costs, Mapping) else costs, Cost(0, 0, 0))


def test_decode_reads_the_weights_once_and_never_the_table_twice() -> None:
    """One token of SmolLM2 at 5 bits reads the layers' 106M weights and the 28M of the head: the table is gathered."""
    storage = Storage(linear=5, embed=8.5, head=8.5, norm=32)
    costs = step_cost(SMOLLM2, [Row(1, 512)], storage=storage)
    assert parameter_count(SMOLLM2) == 134_515_008
    assert weight_bytes(SMOLLM2, storage) == pytest.approx(106_168_320 * 5 / 8 + 28_311_552 * 8.5 / 8 + 35_136 * 4)
    weights_read = costs["linear"].bytes_read + costs["head"].bytes_read
    assert weights_read == pytest.approx(weight_bytes(SMOLLM2, storage), rel=0.01)
    assert costs["embed"].bytes_read == 576 * 8.5 / 8
    assert costs["paged_attention"].bytes_read == pytest.approx(512 * kv_bytes_per_token(SMOLLM2), rel=0.01)
    assert together(costs).flops == pytest.approx(2 * 134_479_872 + 4 * 512 * 576 * 30, rel=0.01)
    copied = dataclasses.replace(storage, head_copied=True)
    assert weight_bytes(SMOLLM2, copied) - weight_bytes(SMOLLM2, storage) == 28_311_552 * 8.5 / 8


def test_layers_that_are_alike_are_counted_once_and_multiplied() -> None:
    """A model whose first layer is dense: its products are those of its layers, one by one."""
    moe = MoEConfig(experts=8, per_token=2, expert_dim=96, dense_layers=(0,))
    config = dataclasses.replace(SMOLLM2, n_layers=5, moe=moe)
    storage = Storage(linear=4.25, matrices=(("attention.q", 8.0),))
    alone = [_layer_products(config, layer, 7, storage) for layer in range(5)]
    assert alone[0] != alone[1] == alone[4]
    found = least_products(config, 7, 2, storage)["linear"]
    assert found.flops == pytest.approx(together(alone).flops) and found.bytes == pytest.approx(together(alone).bytes)


def test_batch_shares_the_weights() -> None:
    """Sixteen decode rows need far less than sixteen times the bytes, and prefill turns bound by arithmetic."""
    one, many = (together(step_cost(SMOLLM2, [Row(1, 64)] * rows)) for rows in (1, 16))
    assert many.flops == 16 * one.flops
    assert many.bytes < 2 * one.bytes
    prefill = together(step_cost(SMOLLM2, [Row(512, 512)]))
    assert prefill.intensity > 50 * one.intensity


def test_row_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="between 1 and all 4"):
        Row(5, 4)
    with pytest.raises(ValueError, match="between 1"):
        Row(0, 4)


def test_cost_needs_no_torch() -> None:
    program = "import sys, transect.costs.model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
