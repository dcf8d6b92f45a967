"""``dtype="float16"`` on a GPU: near what the processor computes exactly."""

import pytest
from tiny_llm import save_tiny_llm

from transect import LLM, SamplingParams

pytestmark = pytest.mark.gpu


def test_logprobs_are_those_of_float32_to_a_half_s_precision(tmp_path):
    save_tiny_llm(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    prompts = [[5, 6, 7], list(range(40, 90))]
    exact = LLM(str(tmp_path), device="cpu", dtype="float32", native=False).generate(prompts, params)
    half = LLM(str(tmp_path), device="cuda", dtype="float16").generate(prompts, params)
    for one, other in zip(exact, half, strict=True):
        found = other.outputs[0].logprobs[0]
        shared = [token for token in one.outputs[0].logprobs[0] if token in found]
        assert shared
        for token in shared:
            assert found[token].logprob == pytest.approx(one.outputs[0].logprobs[0][token].logprob, abs=0.05)
