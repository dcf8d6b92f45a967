"""Every layout on two GPUs draws the tokens of one: experts cut or shared, stages, ranks with requests of their own
that share experts or nothing; in float32, with graphs, a step ahead."""

import gc

import pytest
import torch
from tiny_checkpoints import save_mxfp4
from tiny_llm import save_tiny_llm_text
from transformers import Qwen3MoeConfig

from transect import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LAYOUTS = {
    "tensor": {"tensor_parallel_size": 2},
    "experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "data": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "stages": {"pipeline_parallel_size": 2},
    "whole": {"data_parallel_size": 2},
}
PROMPTS = [[5, 6, 7], list(range(20, 90)), [9] * 33, [1, 2], [*range(20, 60), 3, 4, 5], [7] * 130]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, ignore_eos=True),
    SamplingParams(seed=3, top_p=0.9, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.5, frequency_penalty=0.5, logit_bias={7: 2.0}, max_tokens=16, ignore_eos=True),
]


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    Qwen3MoeConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, num_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=128, norm_topk_prob=True,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def run(shape, ranks=None, dtype="float32", **settings):
    """Tokens of all prompts, twice (the second time with prefix hits), and logprobs of the first."""
    llm = LLM(
        str(shape), load_format="dummy", dtype=dtype, max_num_seqs=16, max_model_len=512, num_kv_blocks=256, seed=3,
        ranks=ranks, cuda_graphs="lazy", **settings,
    )  # fmt: skip
    try:
        params = [PARAMS[i % len(PARAMS)] for i in range(len(PROMPTS))]
        found = [llm.generate(PROMPTS, params, use_tqdm=False) for _ in range(2)]
        tokens = [[list(choice.token_ids) for choice in each.outputs] for results in found for each in results]
        first = found[0][0].outputs[0]
        drawn = [entry[token].logprob for entry, token in zip(first.logprobs, first.token_ids, strict=True)]
        name = llm.submit([3] * 40, SamplingParams(max_tokens=400, ignore_eos=True))
        for _ in range(5):
            llm.step()
        llm.abort(name)
        while llm.has_work:
            llm.step()
        return tokens, drawn
    finally:
        llm.close()
        del llm
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def alone(shape):
    return run(shape)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus_draw_the_tokens_of_one(gpus, shape, alone, layout):
    tokens, drawn = run(shape, gpus, **LAYOUTS[layout])
    assert drawn == pytest.approx(alone[1], abs=1e-3)
    assert tokens == alone[0]


def test_stages_in_bfloat16(gpus, shape):
    """Nothing is added up in another order: the same bits."""
    assert run(shape, gpus, "bfloat16", pipeline_parallel_size=2) == run(shape, None, "bfloat16")


def test_experts_of_four_bits_stay_so_on_each(gpus, tmp_path):
    """Half of every expert of gpt-oss, in MXFP4: the logprobs of a CPU, which computes in float32."""
    save_mxfp4(tmp_path, intermediate_size=128)
    save_tiny_llm_text(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
    found = []
    spread = {"tensor_parallel_size": 2, "ranks": gpus, "dtype": "bfloat16", "cuda_graphs": "lazy"}
    for how in ({"device": "cpu", "dtype": "float32"}, spread):
        llm = LLM(str(tmp_path), max_num_seqs=8, max_model_len=96, num_kv_blocks=64, **how)
        if how is spread:
            experts = llm._core.executor._model.layers[0].mlp
            each = experts.experts_gate, experts.experts_up, experts.experts_down
            assert [weight.format.name for weight in each] == ["MXFP4"] * 3
        result = llm.generate([list(range(20, 70))], params, use_tqdm=False)[0]
        tokens = result.prompt_token_ids[1:]
        found.append([entry[t].logprob for entry, t in zip(result.prompt_logprobs[1:], tokens, strict=True)])
        llm.close()
    off = [abs(a - b) for a, b in zip(*found, strict=True)]
    assert sum(off) / len(off) < 0.08  # bfloat16 makes 0.016 on a CPU; without the other half of experts it is 0.9
