"""A greedy conversation with SmolLM2 in float32: the same text on a GPU as on the processor."""

import gc

import pytest
import torch

from transect.checkpoints.resolve import resolve
from transect.engine.frontends.llm import LLM
from transect.engine.scheduling.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
QUESTIONS = ("Name three rivers of Europe.", "Which of them is the longest?", "Write a short poem about it.")


def conversation(model: str, device: str) -> list[str]:
    """The answers, each given with all that was said before it."""
    llm = LLM(model, device=device, dtype="float32", max_model_len=1024, kv_cache_tokens=2048)
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        [answer] = llm.chat(messages, SamplingParams(max_tokens=80, temperature=0.0))
        messages.append({"role": "assistant", "content": answer.outputs[0].text})
    del llm
    gc.collect()
    return [message["content"] for message in messages if message["role"] == "assistant"]


def test_the_same_text_as_on_the_processor():
    try:
        model = str(resolve("smollm2-135m").path)
    except ValueError as error:  # machines with a GPU may have no network
        pytest.skip(f"smollm2-135m cannot be had here: {error}")
    expected = conversation(model, "cpu")
    found = conversation(model, "cuda")
    print("\n".join(expected))
    assert found == expected and all(len(text) > 10 for text in found)
