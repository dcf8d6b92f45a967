"""Ranks that share experts and have requests of their own, behind the face that a server has."""

import asyncio

import pytest
from tiny_checkpoints import make_model
from tiny_llm import save_tiny_llm_text

from transect.engine.config import EngineConfig
from transect.engine.frontends.replicas import start_engines
from transect.engine.scheduling.sampling_params import SamplingParams

PROMPTS = [[5, 6, 7 + index] for index in range(5)]


async def answers(config):
    """Tokens of all prompts at once, and the counters after them."""
    engine = await start_engines(config)

    async def one(index):
        params = SamplingParams(max_tokens=10, temperature=0.8, seed=index, ignore_eos=True)
        return [token async for u in engine.stream(PROMPTS[index], params, f"r{index}") for token in u.token_ids]

    try:
        found = await asyncio.gather(*(one(index) for index in range(len(PROMPTS))))
        return found, await engine.stats(), (await engine.health()).state
    finally:
        await engine.shutdown()


@pytest.mark.prove  # two engines, three processes
def test_a_server_with_shared_experts(tmp_path):
    make_model("mixtral").save_pretrained(tmp_path)
    save_tiny_llm_text(tmp_path)
    config = {"model": str(tmp_path), "device": "cpu", "dtype": "float32", "threads": 1, "num_kv_blocks": 64}
    alone, _, _ = asyncio.run(answers(EngineConfig(**config)))
    shared = EngineConfig(**config, data_parallel_size=2, enable_expert_parallel=True, mixed_step_limit="auto")
    found, stats, state = asyncio.run(answers(shared))
    assert found == alone and state == "ok"
    assert stats.finished["length"] == 5 and stats.running == 0 and stats.kv_blocks_total == 128
