"""What programs written for vLLM pass to ``LLM``."""

import pytest

from transect.engine.config import EngineConfig
from transect.engine.frontends.vllm_arguments import engine_settings


def test_what_means_nothing_is_dropped_and_what_means_something_is_kept():
    given = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": None,
        "trust_remote_code": True,
        "enforce_eager": True,
        "swap_space": 4,
        "disable_log_stats": True,
        "enable_chunked_prefill": None,
        "kv_cache_dtype": "auto",
        "tokenizer_mode": "auto",
        "load_format": "safetensors",
        "num_gpu_blocks_override": 12,
        "max_logprobs": 20,
        "block_size": None,
        "dtype": "half",
        "max_model_len": 64,
        "seed": 0,
    }
    settings = engine_settings(given)
    assert settings == {
        "tensor_parallel_size": 2,
        "cuda_graphs": "off",
        "load_format": "auto",
        "num_kv_blocks": 12,
        "dtype": "half",
        "max_model_len": 64,
        "seed": 0,
        "kv_cache_dtype": "auto",
    }
    assert EngineConfig(model="m", **settings).dtype == "float16"
    assert "cuda_graphs" not in engine_settings({"enforce_eager": False})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"convert": "embed"}, "convert='embed' is not possible here: leave it out, or give 'auto' or 'none'"),
        ({"task": "embed"}, "task='embed' is not possible here"),
        ({"skip_tokenizer_init": 1}, "skip_tokenizer_init=1"),
        ({"max_logprobs": 50}, "requests may ask for up to 20"),
    ],
)
def test_what_cannot_be_done_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        engine_settings(given)


def test_what_does_not_exist_names_the_nearest():
    with pytest.raises(TypeError, match="no setting 'max_modle_len'; did you mean 'max_model_len'"):
        engine_settings({"max_modle_len": 5})
