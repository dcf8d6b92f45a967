"""Models under test: the candidate and the current model, as adapters of one engine where they share a base.

That engine serves adapters as a server with ``--enable-lora`` does, so the measures are of what will be served.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...checkpoints.peft_config import read_header
from ...checkpoints.resolve import resolve
from ...engine.frontends.inputs import LoRARequest
from ...engine.frontends.llm import LLM
from ...engine.scheduling.sampling_params import SamplingParams
from ...text.chat_template import ChatTemplate
from ...text.tokenizer import Tokenizer
from ...train.config.data import DataConfig
from ...train.data.chat import run_template
from ...train.data.documents import (
    Document,
    RenderedAnewError,
    answers_apart,
    chat_tokens,
    completion_tokens,
    last_answer,
    text_tokens,
)
from ...train.data.files import find
from ...train.data.layouts import ChatExample, CompletionExample, Form, Preference, Rated, Text, form_of
from ...train.evaluation.perplexity import scored_tokens
from ..catalog.models import FlowModel


class TestEngines:
    """Engines by base, one at a time; ``settings`` are those of ``LLM``.

    Args:
        models: all models that will be tested, for the rank of their adapters.
    """

    def __init__(self, models: Sequence[FlowModel], settings: Mapping[str, Any]) -> None:
        self._models, self._settings = models, settings
        self._base, self._llm = "", None  # type: tuple[str, LLM | None]

    def engine(self, base: str) -> LLM:
        """Return the engine of a base model; the engine of another base is closed first."""
        if self._llm is None or base != self._base:
            self.close()
            ranks = [_rank(model.adapter) for model in self._models if model.base == base and model.adapter is not None]
            lora = {"enable_lora": True, "max_loras": len(ranks), "max_lora_rank": max(ranks)} if ranks else {}
            settings = {"enable_prefix_caching": False, **lora, **self._settings}
            self._base, self._llm = base, LLM(base, **settings)
        return self._llm

    def close(self) -> None:
        """End the engine."""
        if self._llm is not None:
            self._llm.close()
        self._llm = None


class AdaptedSubject:
    """A model under test (``TestedModel``), in an engine of ``engines``."""

    def __init__(self, model: FlowModel, engines: TestEngines) -> None:
        self.size, self.base = model.size, model.base
        self._engines = engines
        self._adapter = None if model.adapter is None else LoRARequest(model.adapter.name, model.adapter)

    def answer(self, conversations: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int) -> list[str]:
        """Answer conversations greedily; without a chat template, continue the text of the last message."""
        llm = self._engines.engine(self.base)
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        if llm.chat_template is None:
            prompts = [str(messages[-1]["content"]) for messages in conversations]
            found = llm.generate(prompts, params, lora_request=self._adapter, parse_special=False)
        else:
            found = llm.chat(list(conversations), params, lora_request=self._adapter)
        return [each.outputs[0].text for each in found]

    def score(self, path: Path) -> list[tuple[float, int]]:
        """Score the rows of a file: (nats, trained tokens) of each; rows beyond the context lose their end.

        Raises:
            ValueError: a row cannot be scored; its place is named.
        """
        llm = self._engines.engine(self.base)
        source = resolve(self.base)
        tokenizer = llm.tokenizer
        if not isinstance(tokenizer, Tokenizer):
            raise ValueError(
                f"{self.base} brings no tokenizer, so it cannot be given text: choose a model that has one"
            )
        template = run_template(source, tokenizer, DataConfig())
        documents: list[Document] = []
        for file in find([str(path)], "gate.perplexity.file"):
            for where, row in file.rows():
                try:
                    if isinstance(row, ValueError):
                        raise row
                    documents += _documents(form_of(row)[1], tokenizer, template)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
        most = llm.max_model_len - 1
        kept = [(ids[:most], ([True] * len(ids) if mask is None else mask)[:most]) for ids, mask in documents]
        kept = [(ids, trained) for ids, trained in kept if any(trained[1:])]
        starts = [trained.index(True, 1) for _, trained in kept]
        scored = scored_tokens(llm, [ids for ids, _ in kept], starts, self._adapter)
        found = []
        for start, (_, trained), values in zip(starts, kept, scored, strict=True):
            own = [value for (value, _), wanted in zip(values, trained[start:], strict=True) if wanted]
            found.append((-sum(own), len(own)))
        return found

    def generate_seconds(self, prompt_tokens: int, new_tokens: int, batch: int, seed: int) -> float:
        """Time the generation of tokens after random prompts, in seconds."""
        llm = self._engines.engine(self.base)
        draw = random.Random(seed)
        prompts = [[draw.randrange(llm.vocab_size) for _ in range(prompt_tokens)] for _ in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        began = time.perf_counter()
        llm.generate(prompts, params, lora_request=self._adapter)
        return time.perf_counter() - began


def _rank(adapter: Path) -> int:
    """Return the largest rank of an adapter's matrices."""
    shapes, _ = read_header(adapter)
    return max((shape[0] for name, shape in shapes.items() if name.endswith("lora_A.weight")), default=1)


def _documents(form: Form, tokenizer: Tokenizer, template: ChatTemplate | None) -> Sequence[Document]:
    """Return a row's documents; of a comparison the better answer, of a bad answer none."""
    if isinstance(form, Text):
        return [(text_tokens(form.text, tokenizer), None)]
    if isinstance(form, CompletionExample):
        return [completion_tokens(form, tokenizer)]
    if template is None:
        raise ValueError("this is a chat and the model brings no chat template: give text, or another model")
    if isinstance(form, Preference):
        return [last_answer(form.prompt, form.chosen, form.tools, tokenizer, template)]
    if isinstance(form, Rated):
        return [last_answer(form.prompt, form.completion, form.tools, tokenizer, template)] if form.good else []
    assert isinstance(form, ChatExample)
    options: dict[str, Any] = {"tools": form.tools, "first": form.first, "masked": form.masked}
    try:
        return [chat_tokens(form.messages, tokenizer, template, **options)]
    except RenderedAnewError:
        return answers_apart(form.messages, tokenizer, template, **options)
