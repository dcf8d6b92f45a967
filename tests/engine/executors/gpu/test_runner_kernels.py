"""``GPURunner`` on the Triton kernels, in the interpreter: steps filled up to the sizes that a GPU gets."""

import dataclasses
import math
import random

import pytest
import torch
from effort import proving, quick_first
from runner_fuzz import assert_same, random_arrivals, run_workload

from transect.engine.executors.gpu.runner import GPURunner
from transect.engine.executors.runner import Runner
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack
from transect.ops.lang.jit import INTERPRETED
from transect.ops.opset import OPERATORS, resolve_ops, with_dependent_launch
from transect.ops.registry import get
from transect.spec.model import ModelConfig

VOCAB, BLOCK = 61, 4
TINY = ModelConfig(
    architecture="qwen3",
    vocab_size=VOCAB,
    dim=16,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    head_dim=16,
    ffn_dim=32,
    max_position=128,
    qk_norm=True,
)


@pytest.mark.skipif(
    not INTERPRETED, reason="Triton's interpreter is chosen before its import, on machines without a GPU"
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "options",
    quick_first(
        [{"whole_prompts": (2, 0), "prune_last_layer": True}, {"graph_tokens": 9, "copy_kernels": True}, {}], 1
    ),
)
def test_padding_is_never_seen(options):
    """Rows, tokens and draws that belong to nobody, beside caches whose unowned slots hold NaN."""
    torch.set_num_threads(1)
    plain = Decoder(TINY, dtype=torch.float32, ops=resolve_ops("cpu", batch_invariant=True)).requires_grad_(False)
    plain.init_weights(0.3, torch.Generator().manual_seed(0))
    kernels = {name: get(name).implementations.get("triton") for name in OPERATORS}
    loaded = {name: kernel.load() for name, kernel in kernels.items() if kernel is not None}
    ops = with_dependent_launch(dataclasses.replace(resolve_ops("cpu"), **loaded), False)
    model = Decoder(TINY, dtype=torch.float32, ops=ops).requires_grad_(False)
    model.load_state_dict(plain.state_dict())
    model.stack = FusedStack(model, max_positions=TINY.max_position)
    rng = random.Random(3)
    config = SchedulerConfig(
        num_blocks=24, block_size=BLOCK, max_num_seqs=5, max_num_batched_tokens=20, max_model_len=60, seed=1
    )
    arrivals = random_arrivals(rng, VOCAB, 4 if proving() else 3, longest_prompt=24)
    caches = plain.new_kv_cache(config.num_blocks, BLOCK, torch.float32)
    expected, _ = run_workload(Runner(plain, *caches), config, arrivals, lag=0)
    padded = model.new_kv_cache(config.num_blocks + 1, BLOCK, torch.float32)
    for cache in padded:
        cache.fill_(math.nan)
        cache[:, -1] = 0
    limits = {"max_num_seqs": 5, "max_num_batched_tokens": 20, "max_model_len": 60}
    runner = GPURunner(model, *padded, **limits, pad_tokens=16, **options)
    plan_ragged, apart = runner._planner._ragged, []

    def every_token_has_a_row(batch, memory, adapters):
        plan = plan_ragged(batch, memory, adapters)
        if plan.whole is not None:  # attention multiplies values past the end of a prompt with 0: none may be NaN
            apart.append(plan)
            assert plan.layout.numpy(memory).start[-1] == plan.layout.tokens
        return plan

    plan_decode, padding = runner._planner._decode, []

    def padding_has_no_length(rows, group, memory):
        plan = plan_decode(rows, group, memory)
        lengths = memory.fields(plan.layout).length[len(rows) :]
        padding.extend(lengths)
        assert not lengths.any()
        return plan

    runner._planner._ragged, runner._planner._decode = every_token_has_a_row, padding_has_no_length
    found, _ = run_workload(runner, config, arrivals, lag=1)
    assert_same(expected, found, arrivals)
    assert bool(apart) == ("whole_prompts" in options)
    assert padding
