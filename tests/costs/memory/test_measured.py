"""The account of a GPU's memory, what it advises when a cache does not fit, and the settings of a GPU."""

import re

import pytest
import torch

from transect.costs.memory.measured import MemoryAccount, refusal
from transect.costs.units import GIB
from transect.engine.config import EngineConfig
from transect.engine.device import device_for
from transect.engine.executors.gpu.step_sizes import row_buckets
from transect.engine.frontends.llm import LLM

PER_TOKEN = 131072


def account(utilization=0.9, weights=15 * GIB, total=24 * GIB, step=GIB):
    return MemoryAccount(
        total=total,
        usable=int(total * utilization),
        others=GIB // 2,
        weights=weights,
        tables=GIB // 16,
        largest_step=step,
        graphs=GIB // 2,
    )


def test_lines_add_up_to_the_total():
    made = account()
    sizes = [float(line.split()[0]) for line in made.lines(made.for_cache)]
    assert sum(sizes[:-1]) == pytest.approx(sizes[-1], abs=0.05)


def test_each_advice_is_enough():
    length = 45000
    needed = length * PER_TOKEN
    made = account()
    assert made.for_cache < needed
    text = refusal(made, needed, length, PER_TOKEN)
    share = float(re.search(r"gpu_memory_utilization to ([\d.]+)", text).group(1))
    assert account(share).for_cache >= needed > account(share - 0.02).for_cache
    fits = int(re.search(r"max_model_len to (\d+)", text).group(1))
    assert fits * PER_TOKEN <= made.for_cache < (fits + 1) * PER_TOKEN
    assert "5.49 GiB" in text and "weights" in text


def test_no_advice_that_cannot_help():
    text = refusal(account(weights=23 * GIB), 10 * GIB, 81920, PER_TOKEN)
    assert "gpu_memory_utilization" not in text.splitlines()[0]
    assert "max_model_len" not in text.splitlines()[0] and "smaller model" in text


def test_limits_follow_the_device():
    assert EngineConfig(model="x").limits("cpu") == (64, 256)
    assert EngineConfig(model="x").limits("cuda") == (256, 8192)
    assert EngineConfig(model="x").for_server().limits("cuda") == (512, 8192)
    assert EngineConfig(model="x", max_num_seqs=9000).limits("cuda") == (9000, 9000)
    assert EngineConfig(model="x", max_num_batched_tokens=10).limits("cuda") == (10, 10)
    assert row_buckets(20) == [32, 16, 8, 4, 2, 1]


@pytest.mark.parametrize(
    "settings", [{"device": "tpu"}, {"cuda_graphs": "maybe"}, {"gpu_memory_utilization": 0.0}, {"max_num_seqs": 0}]
)
def test_settings_out_of_range(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        EngineConfig(model="x", **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_gpu_that_is_not_there():
    assert device_for(EngineConfig(model="x"))[0].type == "cpu"
    with pytest.raises(ValueError, match="torch sees no CUDA GPU; give device='cpu'"):
        LLM("llama-3.1-8b", load_format="dummy", device="cuda")
