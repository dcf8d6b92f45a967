"""Run searches in an ``LLM``: all of them in the same steps of one engine."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..engine.frontends.inputs import LoRARequest, prompt_token_ids, text_options
from ..engine.scheduling.arrivals import seed_of
from ..engine.scheduling.sampling_params import SamplingParams
from ..text.inert import chat_tokens
from ..text.output_processor import OutputProcessor
from ..text.reasoning import thoughts_of
from .judges import Judge, Program
from .machine import Call, EndChoice, Operation, Render, RunRequest, SearchRun
from .prices import BranchPrice
from .result import SearchResult
from .settings import SearchSettings
from .tree import Messages, Tree

if TYPE_CHECKING:
    from ..engine.frontends.llm import LLM


class Search(SearchSettings):
    """Settings of a search that an ``LLM`` can run: ``llm.search(messages, Search("best_of_n", n=16))``."""

    def run(self, llm: LLM, prompts: Any, params: SamplingParams | None = None, **options: Any) -> list[SearchResult]:
        """Search an answer to each prompt; see ``LLM.search``."""
        return search_locally(llm, prompts, self, params, **options)


def search_locally(
    llm: LLM,
    prompts: Any,
    search: SearchSettings,
    sampling_params: SamplingParams | None = None,
    *,
    judges: Mapping[str, Judge | Callable[[str, str], float | None]] | None = None,
    adapters: Sequence[LoRARequest] = (),
    lora_request: LoRARequest | None = None,
    priority: int = 0,
    on_progress: Callable[[int, dict[str, Any]], None] | None = None,
) -> list[SearchResult]:
    """Search an answer to each prompt; arguments and errors as of ``LLM.search``."""
    params = llm.get_default_sampling_params() if sampling_params is None else sampling_params
    named = {name: each if not callable(each) else Program(each) for name, each in (judges or {}).items()}
    loras = {each.lora_name: each for each in (*adapters, *(() if lora_request is None else (lora_request,)))}
    check_adapters(search, named, loras)
    runs = []
    inputs = _inputs(llm, prompts)
    for number, (messages, text, ids) in enumerate(inputs):
        if params.seed is not None and len(inputs) > 1:  # or branches of one number would share their luck
            own_params = params.with_(seed=seed_of(params.seed, number))
        else:
            own_params = params
        own = "" if lora_request is None else lora_request.lora_name
        tree = Tree(messages, text or "", own, _without_thoughts(llm))
        runs.append(
            SearchRun(
                search, tree, ids, own_params, seed=secrets.randbits(63), max_model_len=llm.max_model_len,
                decode=llm.tokenizer.decode, judges=named,
            )
        )  # fmt: skip
    LocalSearch(llm, runs, loras, priority, on_progress).run()
    return [run.result for run in runs if run.result is not None]


def check_adapters(search: SearchSettings, judges: Mapping[str, Judge], adapters: Mapping[str, Any]) -> None:
    """Check that the adapters of a search's method and judges are there.

    Raises:
        ValueError: one is not; the message lists those that are.
    """
    asked = [*getattr(search.options, "adapters", ())]
    asked += [getattr(judges[name], "adapter", "") for name in search.options.judges if name in judges]
    for name in asked:
        if name and name not in adapters:
            known = ", ".join(adapters) or "none"
            raise ValueError(f"search.adapters names {name[:60]!r}, which is no adapter here; there are: {known}")


class LocalSearch:
    """The engine requests of several searches.

    Args:
        llm: runs them.
        runs: the searches, unstarted.
        adapters: by name.
        on_progress: called with a search's number and ``SearchRun.progress()`` after each change.
    """

    def __init__(
        self,
        llm: LLM,
        runs: Sequence[SearchRun],
        adapters: Mapping[str, LoRARequest],
        priority: int = 0,
        on_progress: Callable[[int, dict[str, Any]], None] | None = None,
    ) -> None:
        self._llm, self._runs, self._adapters, self._priority = llm, runs, adapters, priority
        self._processor = OutputProcessor(llm.tokenizer)
        self._owners: dict[str, tuple[SearchRun, int]] = {}
        """Search and key of each running engine request."""
        self._ids: dict[tuple[int, int], str] = {}
        """Engine request of (search's number, key)."""
        self._numbers = {id(run): number for number, run in enumerate(runs)}
        self._on_progress = on_progress
        self._shown = [-1] * len(runs)

    def run(self) -> None:
        """Run all searches to their ends.

        Raises:
            ValueError: an engine request was refused, or a search has no answer. Nothing is left running.
        """
        began = time.monotonic()
        ends = {
            id(run): began + run.search.budget.seconds for run in self._runs if run.search.budget.seconds is not None
        }
        try:
            self._perform()
            while any(not run.done for run in self._runs):
                if not self._owners:
                    raise RuntimeError("a search waits, and the engine has no request of it")
                if ends:
                    self._quote(time.monotonic() - began)
                for output in self._llm.step():
                    self._take(output)
                if ends:
                    now = time.monotonic()
                    for run in self._runs:
                        if now >= ends.get(id(run), now + 1):
                            run.end()
                self._perform()
        finally:
            for name in list(self._owners):
                self._llm.abort(name)
            while self._owners and self._llm.has_work:
                for output in self._llm.step():
                    self._owners.pop(output.request_id, None)

    def _quote(self, spent_s: float) -> None:
        """Tell the searches what a branch costs now."""
        price = BranchPrice.of(self._llm.stats(), self._llm.config.block_size)
        for run in self._runs:
            run.costs.price, run.costs.spent_s = price, spent_s

    def _take(self, output: Any) -> None:
        name = output.request_id
        update = self._processor.process(output) if name in self._owners else None
        if update is None:
            return
        run, key = self._owners[name]
        for request_id, choice in update.aborts:
            self._llm.abort(request_id, choice)
        if update.final is not None:
            del self._owners[name]
        run.feed(key, update)

    def _perform(self) -> None:
        """Perform the operations of all searches until none is left."""
        for number, run in enumerate(self._runs):
            while operations := run.take():
                for operation in operations:
                    self._do(number, run, operation)
            if self._on_progress is not None and run.version != self._shown[number]:
                self._shown[number] = run.version
                self._on_progress(number, run.progress())

    def _do(self, number: int, run: SearchRun, operation: Operation) -> None:
        if isinstance(operation, RunRequest):
            if not run.done:
                self._submit(number, run, operation)
        elif isinstance(operation, EndChoice):
            name = self._ids.get((number, operation.key))  # None if the search ended before its request was submitted
            if name is not None and name in self._owners:
                self._llm.abort(name, operation.choice)
                for update in self._processor.finish(name, choice=operation.choice):
                    if update.final is not None:
                        del self._owners[name]
        elif isinstance(operation, Render):
            template = self._llm.chat_template
            assert template is not None, "a search with messages has rendered some"
            run.rendered(operation.key, chat_tokens(template, self._llm.tokenizer, operation.messages)[1])
        elif isinstance(operation, Call):
            run.judged(operation.key, operation.judge.function(operation.question, operation.answer))

    def _submit(self, number: int, run: SearchRun, operation: RunRequest) -> None:
        name = self._llm.submit(
            operation.prompt_token_ids,
            operation.params,
            self._priority,
            self._adapters.get(operation.adapter),
            pooling=operation.pooling,
        )
        self._processor.add(name, None, operation.prompt_token_ids, **text_options(operation.params))
        self._owners[name] = run, operation.key
        self._ids[number, operation.key] = name


def _inputs(llm: LLM, prompts: Any) -> list[tuple[Messages | None, str | None, list[int]]]:
    """Convert prompts to (messages or None, text or None, token ids)."""
    if isinstance(prompts, (str, Mapping)) or _is_conversation(prompts) or _are_tokens(prompts):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or not prompts:
        raise ValueError("search takes a text, messages, token ids, or a list of such")
    found: list[tuple[Messages | None, str | None, list[int]]] = []
    for prompt in prompts:
        if _is_conversation(prompt):
            if llm.chat_template is None:
                raise ValueError("this model has no chat template: give texts, not messages")
            _, ids = chat_tokens(llm.chat_template, llm.tokenizer, prompt)
            found.append((prompt, question_of(prompt), ids))
        else:
            text, ids = prompt_token_ids(prompt, llm.tokenizer)
            found.append((None, text, ids))
    return found


def question_of(messages: Messages) -> str:
    """Return the text of the last message of the user."""
    said = [each.get("content") for each in messages if each.get("role") == "user"]
    return said[-1] if said and isinstance(said[-1], str) else ""


def _is_conversation(prompt: Any) -> bool:
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return False
    return all(isinstance(each, Mapping) and "role" in each for each in prompt)


def _are_tokens(prompt: Any) -> bool:
    return not isinstance(prompt, str) and isinstance(prompt, Sequence) and all(isinstance(x, int) for x in prompt)


def _without_thoughts(llm: LLM) -> Callable[[str], str]:
    """Return a function that removes thoughts, if the model's template has marks for them."""
    template = llm.chat_template
    thoughts = None if template is None else thoughts_of("auto", template.source)
    end = None if thoughts is None else getattr(thoughts, "end", None)
    if not end:
        return str
    return lambda text: text.rpartition(end)[2].lstrip() if end in text else text
