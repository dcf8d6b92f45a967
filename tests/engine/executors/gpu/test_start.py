"""With empty caches an engine's kernels are compiled by other processes, and none by the engine itself."""

import json
import os
import subprocess
import sys

import pytest
import torch

from transect.hardware.cores import usable_cores

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.prove,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(usable_cores() < 4, reason="with fewer than 4 cores the engine compiles alone"),
]

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}

SCRIPT = """
import json, random, sys, time
from transect.engine.frontends.llm import LLM
from transect.engine.scheduling.sampling_params import SamplingParams
import triton

compiled = []

def heard(*, src, metadata, metadata_group, times, cache_hit):
    if not cache_hit:
        compiled.append(src.name)

triton.knobs.compilation.listener = heard
limits = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.2}
llm = LLM(sys.argv[1], load_format="dummy", seed=0, **limits, **json.loads(sys.argv[2]))
rng = random.Random(0)
kinds = [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50}, {"temperature": 1.0, "min_p": 0.1}]
for number in range(60):
    prompt = [rng.randrange(32000) for _ in range(rng.choice((1, 5, 40, 130, 700)))]
    llm.submit(prompt, SamplingParams(max_tokens=rng.randint(1, 8), ignore_eos=True, **kinds[number % 3]))
while llm.has_work:
    llm.step()
print(json.dumps(compiled))
"""


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ({}, {}),
        (QWEN3, {}),
        ({}, {"deterministic": True}),
        (QWEN3, {"dtype": "float32"}),
        ({}, {"quantization": "int4"}),
        (QWEN3, {"quantization": "int4", "dtype": "float32"}),
    ],
    ids=["llama", "qwen3", "deterministic", "float32", "int4", "int4 float32"],
)
def test_the_engine_compiles_nothing_itself(shape, settings, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | shape))
    places = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TRANSECT_CACHE": str(tmp_path / "transect")}
    for start in ("caches empty", "caches filled"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path), json.dumps(settings)],
            env=os.environ | places,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads(done.stdout.splitlines()[-1]) == []
        assert ("kernels compiled" in done.stderr) == (start == "caches empty"), done.stderr[-3000:]
