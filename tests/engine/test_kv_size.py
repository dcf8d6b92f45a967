"""The size of the KV cache: from each of its units, from free memory, and what does not fit."""

from pathlib import Path

import pytest

from transect.engine.config import EngineConfig
from transect.engine.kv_size import DEFAULT_MOST_BYTES, SHARE_OF_FREE_MEMORY, KVSize, kv_size
from transect.hardware.host_memory import free_memory

PER_TOKEN = 1000
GIB = 2**30


def size(free=GIB, positions=4096, **settings):
    config = EngineConfig(model="x", **settings)
    return kv_size(config, model_positions=positions, bytes_per_token=PER_TOKEN, free_bytes=free)


def test_each_unit():
    assert size(num_kv_blocks=10) == KVSize(10, 160)
    assert size(kv_cache_tokens=161) == KVSize(11, 176)
    assert size(kv_cache_bytes=10 * 16 * PER_TOKEN + 15) == KVSize(10, 160)
    assert size(num_kv_blocks=10, block_size=4) == KVSize(10, 40)


def test_default_is_what_can_be_used_a_share_of_memory_or_the_bound():
    assert size(positions=64, max_num_seqs=3) == KVSize(12, 64)
    assert size(positions=10**5).num_blocks == GIB // SHARE_OF_FREE_MEMORY // (16 * PER_TOKEN)
    assert size(free=1000 * GIB, positions=10**6).num_blocks == DEFAULT_MOST_BYTES // (16 * PER_TOKEN)


def test_context_is_the_model_s_as_far_as_the_cache_holds_it():
    assert size(num_kv_blocks=1000).max_model_len == 4096
    assert size(num_kv_blocks=1000, max_model_len=100).max_model_len == 100
    assert size(num_kv_blocks=10).max_model_len == 160


@pytest.mark.parametrize(
    "settings,numbers",
    [
        ({"max_model_len": 5000}, ("5000", "4096")),
        (
            {"num_kv_blocks": 10**6},
            ("1000000 blocks", "15259 MiB", "1024 MiB", "67108 blocks (1073728 tokens) would fit"),
        ),
        ({"kv_cache_bytes": 100}, ("16 tokens",)),
        ({"num_kv_blocks": 10, "max_model_len": 161}, ("161", "160 tokens", "kv_cache_tokens")),
        ({"free": 100}, ("16 tokens",)),
    ],
)
def test_what_does_not_fit_says_so_with_numbers(settings, numbers):
    with pytest.raises(ValueError) as refused:
        size(**settings)
    for number in numbers:
        assert number in str(refused.value)


def test_free_memory_is_at_most_the_machine_s():
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(line for line in lines if line.startswith("MemTotal:"))
    assert 0 < free_memory() <= int(total.split()[1]) * 1024
