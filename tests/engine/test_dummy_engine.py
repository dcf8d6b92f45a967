"""Engines on random weights: token ids in, token ids out, and a clear word where text would be needed."""

import json

import pytest

from transect import LLM, SamplingParams
from transect.engine.config import EngineConfig
from transect.engine.frontends.async_engine import AsyncEngine

SHAPE = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return str(tmp_path)


def test_llm_takes_token_ids_only(directory):
    llm = LLM(directory, load_format="dummy", threads=1, max_num_seqs=2)
    (result,) = llm.generate([[3, 4, 5]], PARAMS)
    tokens = result.outputs[0].token_ids
    assert len(tokens) == 5 and result.outputs[0].text == "".join(f" {token}" for token in tokens)
    with pytest.raises(ValueError, match="no tokenizer: give the prompt as token ids"):
        llm.generate("some text", PARAMS)
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "x"}])
    other = LLM(directory, load_format="dummy", threads=1, max_num_seqs=2, seed=1).generate([[3, 4, 5]], PARAMS)
    assert other[0].outputs[0].token_ids != tokens


async def test_the_engine_process_finds_the_shape_again(directory):
    async with await AsyncEngine.start(model=directory, load_format="dummy", threads=1, max_num_seqs=2) as engine:
        updates = [update async for update in engine.stream([3, 4, 5], PARAMS, "a")]
    assert sum(len(update.token_ids) for update in updates) == 5


def test_load_format_is_checked():
    with pytest.raises(ValueError, match="load_format must be auto or dummy"):
        EngineConfig(model="x", load_format="gguf")
