"""The account of an engine's memory: the cache gets what is left, and advice is enough."""

import re
from dataclasses import replace

import pytest

from transect.costs.memory.serving import ServingPlan, kept_for_graphs, largest_step, serving
from transect.costs.model import weight_bytes
from transect.costs.units import GIB
from transect.spec.shapes import PRESETS

LLAMA_8B = PRESETS["llama-3.1-8b"]
PLAN = ServingPlan(weights=int(weight_bytes(LLAMA_8B)), graphs=9)


def test_the_cache_gets_what_is_left():
    found = serving(LLAMA_8B, PLAN, 80 * GIB)
    assert found.fits and found.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    fixed = PLAN.weights + largest_step(LLAMA_8B, PLAN) + kept_for_graphs(LLAMA_8B.vocab_size, 256, 9)
    fixed += 4 * 128 * PLAN.context  # angles
    left = int(80 * GIB * 0.9) - fixed
    assert found.cache_tokens == left // (16 * found.kv_bytes_per_token) * 16
    assert found.sequences == found.cache_tokens // PLAN.context
    assert found.account.peak <= 0.9 * 80 * GIB


def test_no_more_than_all_sequences_can_use():
    few = replace(PLAN, max_num_seqs=2, context=100)
    assert serving(LLAMA_8B, few, 80 * GIB).cache_tokens == 2 * 112  # whole blocks
    assert serving(LLAMA_8B, few).cache_tokens == 2 * 112
    limited = replace(PLAN, most_cache=GIB)
    assert serving(LLAMA_8B, limited, 80 * GIB).cache_tokens == GIB // 131072


def test_advice_is_enough():
    long = replace(PLAN, context=131072)
    found = serving(LLAMA_8B, long, 24 * GIB)
    assert not found.fits
    shorter = int(re.search(r"context to (\d+)", found.change)[1])
    assert serving(LLAMA_8B, replace(long, context=shorter), 24 * GIB).fits
    tight = serving(LLAMA_8B, PLAN, 17 * GIB)
    assert "max_num_batched_tokens to 512" in tight.change
    assert "smaller model" in serving(LLAMA_8B, PLAN, 8 * GIB).change


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_share_of_the_device(share):
    found = serving(LLAMA_8B, replace(PLAN, share=share), 80 * GIB)
    assert found.account.needed <= 80 * GIB
