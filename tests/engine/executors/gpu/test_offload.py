"""Layers that stream to a GPU: the same tokens as layers that are there, whichever of copy and kernels is late."""

import pytest
import torch

from transect.engine.frontends.llm import LLM
from transect.engine.scheduling.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LATE = 4_000_000
"""Clock cycles, about 2 ms: longer than a layer of this model computes, and than it is copied."""
SETTINGS = {
    "load_format": "dummy", "max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 256, "seed": 0,
    "kv_cache_tokens": 8192, "cuda_graphs": "off",
}  # fmt: skip
PROMPTS = [[index + 1] * (20 + 9 * index) for index in range(8)]
PARAMS = [
    SamplingParams(temperature=0.0 if index % 2 else 1.0, seed=index, max_tokens=12, ignore_eos=True)
    for index in range(8)
]


def run(llm):
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, PARAMS)]


def two_runs(llm):
    """The tokens of two runs. The second finds its prompts in the prefix cache, so its steps have other shapes, which
    round in other ways: it may draw other tokens than the first, with or without layers that stream."""
    return [run(llm) for _ in range(2)]


@pytest.fixture(scope="module", params=[None, "int4", "fp8"])
def expected(request):
    llm = LLM("qwen3-0.6b", quantization=request.param, **SETTINGS)
    try:
        return request.param, two_runs(llm)
    finally:
        llm.close()


@pytest.mark.parametrize("where", ["host", "file"])
@pytest.mark.parametrize("gib", [0.2, 1000.0])
def test_the_same_tokens(expected, where, gib, tmp_path):
    quantization, wanted = expected
    folder = str(tmp_path) if where == "file" else None
    llm = LLM("qwen3-0.6b", quantization=quantization, cpu_offload_gb=gib, offload_folder=folder, **SETTINGS)
    assert two_runs(llm) == wanted
    llm.close()


@pytest.mark.parametrize("late", ["copies", "kernels"])
def test_nobody_overtakes(expected, late):
    """A layer that is computed before it is there, or overwritten before it was computed, gives other tokens."""
    quantization, wanted = expected
    llm = LLM("qwen3-0.6b", quantization=quantization, cpu_offload_gb=1000.0, **SETTINGS)
    stream = llm._core.executor._model.offloaded
    send, arrive = stream._homes.send, stream._arrive

    def late_copy(place, slot):
        torch.cuda._sleep(LATE)
        send(place, slot)

    def late_kernels(place):
        arrive(place)
        torch.cuda._sleep(LATE)

    if late == "copies":
        stream._homes.send = late_copy
    else:
        stream._arrive = late_kernels
    assert run(llm) == wanted[0]
    llm.close()
