"""On a GPU: families that the fused layers do not know, or whose attention changes scores, draw the tokens of a CPU.
Mixtures of experts have the same bits in any batch where that is asked for."""

import pytest
import torch
from tiny_checkpoints import make_model
from tiny_llm import save_tiny_llm_text

from transect import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 96, "num_kv_blocks": 64, "seed": 3}
PROMPTS = [[5, 6, 7], list(range(20, 70)), [9] * 33, [1, 2]]
PARAMS = [SamplingParams(temperature=float(i % 2), seed=i, max_tokens=16, ignore_eos=True) for i in range(4)]


def drawn(llm, prompts=PROMPTS, params=PARAMS):
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("family", ["llama4_text", "gemma2", "gemma3_text", "granite", "gpt_oss", "olmo2", "smollm3"])
def test_the_tokens_are_those_of_a_cpu(family, tmp_path):
    """With sinks, soft-capped scores and chunks, in CUDA graphs, a second time with prefix hits."""
    make_model(family).save_pretrained(tmp_path)
    save_tiny_llm_text(tmp_path)
    found = []
    for device in ("cpu", "cuda"):
        llm = LLM(str(tmp_path), device=device, dtype="float32", cuda_graphs="lazy", **SETTINGS)
        found.append([drawn(llm), drawn(llm)])
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_mixtures_have_the_same_bits_in_any_batch(family, tmp_path):
    make_model(family).save_pretrained(tmp_path)
    save_tiny_llm_text(tmp_path)
    llm = LLM(
        str(tmp_path), device="cuda", dtype="bfloat16", deterministic=True, enable_prefix_caching=False,
        cuda_graphs="lazy", **SETTINGS,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)

    def logprobs(prompts):
        results = llm.generate(prompts, params, use_tqdm=False)
        return [[{t: v.logprob for t, v in entry.items()} for entry in each.outputs[0].logprobs] for each in results]

    together = logprobs(PROMPTS)
    assert [logprobs([prompt])[0] for prompt in PROMPTS] == together
    llm.close()
