"""The offline protocols on a tiny random model."""

import json

import pytest

from transect import LLM
from transect.bench.offline import decode_steps, prefill_seconds, run_all
from transect.bench.workload import Work

SHAPE = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def llm(request, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    settings = {"threads": 1, "max_num_seqs": 3, "num_kv_blocks": 12, "enable_prefix_caching": False}
    return LLM(str(tmp_path), load_format="dummy", max_num_batched_tokens=8, async_scheduling=request.param, **settings)


def test_decode_counts_only_steps_of_the_whole_batch(llm):
    prompts = [[1] * 10, [2] * 9, [3] * 8]  # prefill takes several steps, in which the first ones decode already
    decoded = decode_steps(llm, prompts, 5, spare=8)
    assert len(decoded.steps) == 5 and sum(decoded.steps) == pytest.approx(decoded.seconds)
    assert decoded.per_token == pytest.approx(decoded.seconds / 5)
    assert len(decoded.middle) == 3 and min(decoded.middle) > 10
    assert not llm.has_work and llm.stats().kv_blocks_used == 0


def test_decode_where_not_all_can_run(llm):
    with pytest.raises(ValueError, match="did not run 4 sequences at once"):
        decode_steps(llm, [[1] * 8] * 4, 5, spare=2)


def test_prefill_draws_one_token_each(llm):
    before = llm.stats().generation_tokens
    assert prefill_seconds(llm, [[1] * 8, [2] * 5]) > 0
    assert llm.stats().generation_tokens == before + 2 and not llm.has_work


def test_run_all(llm):
    work = [Work((1, 2, 3), 7), Work((4,), 2), Work((5, 6), 9), Work((7,) * 20, 1)]
    seconds, steps = run_all(llm, work)
    assert seconds > 0 and steps >= 9
    assert llm.stats().generation_tokens == 19
