"""A greedy conversation with SmolLM2 in float32: the same text on a GPU as on the processor."""

import gc

import pytest
import torch

from transect.engine.llm import LLM
from transect.engine.sampling_params import SamplingParams

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


def test_the_same_text_as_on_the_processor(smollm2):
    expected = conversation(str(smollm2.path), "cpu")
    found = conversation(str(smollm2.path), "cuda")
    print("\n".join(expected))
    assert found == expected and all(len(text) > 10 for text in found)
