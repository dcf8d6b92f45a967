"""``LLM``: an engine in this process, for scripts: prompts in, complete results out."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...text.hf_tokenizer import HFTokenizer
from ...text.inert import chat_tokens
from ...text.model_text import load_text, text_settings
from ...text.output_processor import OutputProcessor
from ...text.outputs import RequestOutput
from ...text.template_worker import TemplateApart
from ..config import EngineConfig
from ..executors.gpu.compilers import compiling
from ..executors.pooling import PARAMS as EMBED
from ..executors.pooling import EmbeddingOutput, Pooling, PoolingParams, default_pooling, embedding_output
from ..scheduling.arrivals import max_length
from ..scheduling.decisions import DecisionRing
from ..scheduling.outputs import EngineOutput, SchedulerStats
from ..scheduling.request import Request
from ..scheduling.sampling_params import SamplingParams
from .beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, advance_all, with_prompt
from .inputs import (
    LoRARequest,
    Searches,
    check_token_ids,
    default_params,
    params_for,
    prompt_token_ids,
    text_options,
    truncated,
    with_token_ids,
)
from .interrupts import HeldInterrupts
from .scoring import PARAMS as SCORE
from .scoring import Score, ScoringOutput, pair_token_ids, pairs, score
from .vllm_arguments import engine_settings

if TYPE_CHECKING:
    from ...parallel.launch import Ranks
    from ..scheduling.core import EngineCore

Prompt = str | Sequence[int] | Mapping[str, Any]
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """A model that is ready to generate.

    Args:
        model: a built-in name, a ``.gguf`` file, a directory in Hugging Face layout, or a hub id.
        settings: fields of ``EngineConfig``, such as ``dtype``, ``max_model_len``, ``max_num_seqs``, ``threads``. The
            queue has no bound here. vLLM's arguments are accepted, and dropped if they have no meaning here
            (``vllm_arguments.py``).
        ranks: running processes to use. If None, ``tensor_parallel_size`` times ``pipeline_parallel_size`` times
            ``data_parallel_size`` processes are started if that is more than 1; under ``torchrun`` they exist already.

    Raises:
        ValueError: the model or a setting is at fault; the message says what to change.
        TypeError: a setting that does not exist.

    One start-up line on stderr says which kernels run and why, and with what configuration.
    """

    def __init__(self, model: str, *, ranks: Ranks | None = None, **settings: Any) -> None:
        self.config = EngineConfig(model=model, **engine_settings(settings))
        first = self.config.longest_first is not False
        limit = self.config.mixed_step_limit or "fill"
        self.config = dataclasses.replace(self.config, longest_first=first, mixed_step_limit=limit)
        began = time.perf_counter()
        with compiling(self.config) as compilers:
            from ..ranks import start_engine  # imports torch, which takes seconds

            built = start_engine(self.config, compilers, began, leads=False, ranks=ranks)
        self._core = built.core
        self._end_ranks = weakref.finalize(self, _end_ranks, built.core, built.ranks)
        self._has_ranks = built.mesh is not None
        self._adapters = built.adapters
        self._scheduler_config = built.core.scheduler.config
        self._grammars = built.grammars(checked=False)
        self._next_id = 0
        self.kernels = built.kernels
        self.max_model_len = built.max_model_len
        self.vocab_size = built.vocab_size
        self._hidden_size = built.source.config.dim
        self._default_pooling = default_pooling(built.source.path)
        text = load_text(built.source, **text_settings(self.config))
        self._eos = text.eos_token_ids if self.config.eos_token_ids is None else built.eos_token_ids
        self.tokenizer = text.tokenizer
        # A template is a program out of a file: where it does not end, only its process does.
        self.chat_template = None if text.chat_template is None else TemplateApart(text.chat_template)
        self._defaults = default_params(text.defaults)
        self._processor = OutputProcessor(self.tokenizer)
        capacity = f"KV cache {built.kv_tokens} tokens, context {built.max_model_len}"
        said = (built.kernels, capacity, str(text.defaults), str(self.config))
        for line in (*built.report, "; ".join(filter(None, said))) if built.speaks else ():
            print(f"transect: {line}", file=sys.stderr)

    def get_tokenizer(self) -> HFTokenizer:
        """Return the model's tokenizer under the names, and with the defaults, of transformers."""
        return HFTokenizer(self.tokenizer, self.chat_template)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the values that the model's files recommend (``EngineConfig.generation_config``), completed by the
        defaults of ``SamplingParams``."""
        return self._defaults

    # ---- whole requests ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: int = 0,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Continue prompts. All of them run together, those that may draw the most tokens first (``longest_first``),
        with step sizes that finish the whole batch soonest (``mixed_step_limit``).

        Args:
            prompts: one prompt or a list: text, token ids, or ``{"prompt": ...}`` / ``{"prompt_token_ids": ...}``.
            sampling_params: for all, or one for each prompt; None for ``get_default_sampling_params()``.
            use_tqdm: show a progress bar.
            priority: lower runs earlier.
            add_special_tokens: put around a text what the model expects there (often a BOS token, often nothing).
            parse_special: ``<|im_end|>`` and its like in a text are special tokens; False takes them for text, which is
                right for text that others wrote.
            lora_request: the adapter for all prompts, or one (or None) for each; needs ``enable_lora=True``.

        Returns:
            One result for each prompt, in their order.

        Raises:
            ValueError: a prompt or parameter is at fault; nothing was started.
        """
        inputs = self._inputs(prompts, add_special_tokens=add_special_tokens, parse_special=parse_special)
        params = params_for(len(inputs), sampling_params, self._defaults)
        return self._run(inputs, params, use_tqdm, priority, adapters=self._adapters_for(len(inputs), lora_request))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: int = 0,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Write the next message of one conversation, or of several. Messages are ``{"role": ..., "content": ...}``.

        Text in a message that looks like a special token stays text (``text/inert.py``). The template runs in a process
        of its own, with limits on time and memory (``text/template_worker.py``). With ``continue_final_message`` (and
        ``add_generation_prompt=False``) the model continues the last message.

        Raises:
            ValueError: as for ``generate``; or the model has no chat template, or the template refuses the messages or
                exceeds its limits.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template: render the messages yourself and use generate")
        if not messages:
            raise ValueError("there are no messages: give at least one")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message continues the last message: set add_generation_prompt=False")
        single = isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        inputs = []
        for conversation in conversations:
            options = {
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                **(chat_template_kwargs or {}),
            }
            inputs.append(chat_tokens(self.chat_template, self.tokenizer, conversation, **options))
        params = params_for(len(inputs), sampling_params, self._defaults)
        return self._run(inputs, params, use_tqdm, priority, adapters=self._adapters_for(len(inputs), lora_request))

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequests = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest whole answers (``engine/frontends/beam_search.py``). The beams of all prompts run
        together. ``lora_request``: as for ``generate``.

        Returns:
            For each prompt ``beam_width`` answers, best first (fewer where a context or vocabulary has no more).

        Raises:
            ValueError: a prompt or parameter is at fault.
            RuntimeError: the model's numbers are not finite.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError("beam_search takes BeamSearchParams(beam_width=4, max_tokens=64, ...)")
        inputs = self._inputs(prompts)
        adapters = self._adapters_for(len(inputs), lora_request)
        room = [self.max_model_len - len(ids) for _, ids in inputs]
        searches = [BeamSearch(params, max(each, 1), self._eos, self.tokenizer) for each in room]
        step = params.step_params().with_(stop=None, stop_token_ids=None)
        with _Progress(params.max_tokens, use_tqdm) as progress:
            while any(search.beams for search in searches):
                longer = [
                    (None, [*ids, *beam]) for s, (_, ids) in zip(searches, inputs, strict=True) for beam in s.beams
                ]
                named = [adapter for s, adapter in zip(searches, adapters, strict=True) for _ in s.beams]
                advance_all(searches, self._run(longer, [step] * len(longer), False, 0, adapters=named))
                progress.advance()
        return [with_prompt(found, ids, self.tokenizer) for found, (_, ids) in zip(searches, inputs, strict=True)]

    def search(
        self, prompts: Any, search: Searches, sampling_params: SamplingParams | None = None, **options: Any
    ) -> list[Any]:
        """Spend more compute on each answer: ``llm.search(messages, Search("best_of_n", n=16))``.

        Args:
            prompts: text, token ids or messages, or a list of such; all are searched at the same time.
            search: a ``transect.Search``, and ``options`` of its ``search/local.py``.
            sampling_params: of each branch; None for ``get_default_sampling_params()``.

        Returns:
            A ``SearchResult`` for each prompt, in their order.

        Raises:
            ValueError: a prompt or setting is at fault, or no branch has given an answer.
        """
        return search.run(self, prompts, sampling_params, **options)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = False,
        priority: int = 0,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingOutput]:
        """Compute a vector for each prompt (``engine/executors/pooling.py``); ``outputs.embedding`` holds its numbers.

        Args:
            pooling_params: parameters of the vectors; None for the pooling of the model's files, scaled to length 1.
            prompts, use_tqdm, priority, add_special_tokens, parse_special, lora_request: as for ``generate``.

        Raises:
            ValueError: a prompt or parameter is at fault; nothing was started.
            RuntimeError: the model's numbers are not finite.
        """
        params = pooling_params or PoolingParams()
        params.check_size(self._hidden_size)
        inputs = self._inputs(prompts, add_special_tokens=add_special_tokens, parse_special=parse_special)
        draw = EMBED.with_(truncate_prompt_tokens=params.truncate_prompt_tokens)
        pooling = params.pooling or self._default_pooling
        adapters = self._adapters_for(len(inputs), lora_request)
        results = self._run(inputs, [draw] * len(inputs), use_tqdm, priority, pooling, adapters)
        return [embedding_output(result, params) for result in results]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        use_tqdm: bool = False,
        priority: int = 0,
        lora_request: LoRARequests = None,
    ) -> list[ScoringOutput]:
        """Score how likely each query (``text_1``) is after its document (``text_2``); see
        ``engine/frontends/scoring.py``. A single query is paired with all documents. ``lora_request``: the adapter for
        all pairs, or one (or None) for each.

        Raises:
            ValueError: a text is at fault; nothing was started.
            RuntimeError: the model's numbers are not finite.
        """
        encoded = [pair_token_ids(query, text, self.tokenizer.encode) for query, text in pairs(text_1, text_2)]
        inputs = [(None, ids) for ids, _ in encoded]
        params = [SCORE.with_(prompt_logprobs_start=len(ids) - tokens) for ids, tokens in encoded]
        adapters = self._adapters_for(len(inputs), lora_request)
        results = self._run(inputs, params, use_tqdm, priority, adapters=adapters)
        return [
            ScoringOutput(Score(score(result, tokens)), result.prompt_token_ids)
            for result, (_, tokens) in zip(results, encoded, strict=True)
        ]

    def _inputs(self, prompts: Prompt | Sequence[Prompt], **text_flags: bool) -> list[tuple[str | None, list[int]]]:
        """Convert one prompt, or several, to (text or None, token ids)."""
        if not isinstance(prompts, (str, Mapping, Sequence)):
            raise ValueError(f"prompts must be text, token ids, or a list of such, not {type(prompts).__name__}")
        single = isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int))
        every: Any = [prompts] if single else prompts
        return [prompt_token_ids(prompt, self.tokenizer, **text_flags) for prompt in every]

    def _adapters_for(self, count: int, asked: LoRARequests) -> Sequence[str]:
        """Load the adapters of a call. Returns the content id of each prompt's, empty for none."""
        each = list(asked) if isinstance(asked, Sequence) else [asked] * count
        if len(each) != count:
            raise ValueError(f"there are {count} prompts and {len(each)} lora_requests: give one, or one for each")
        if all(one is None for one in each):
            return [""] * count
        if self._adapters is None:
            raise ValueError("lora_request needs an engine with adapters: make the LLM with enable_lora=True")
        return self._adapters.load_all(each)

    def _run(
        self,
        inputs: Sequence[tuple[str | None, list[int]]],
        params: Sequence[SamplingParams],
        show_progress: bool,
        priority: int,
        pooling: Pooling | None = None,
        adapters: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        limit = self.max_model_len
        inputs = [(text, truncated(ids, each, limit)) for (text, ids), each in zip(inputs, params, strict=True)]
        requests = [
            self._request(ids, each, priority, pooling, adapter)
            for (_, ids), each, adapter in zip(inputs, params, adapters or [""] * len(inputs), strict=True)
        ]  # all are checked before the first one starts
        finals: dict[str, RequestOutput] = {}
        with HeldInterrupts(lambda: self._core.on_device) as interrupts:
            try:
                for (text, ids), request in zip(inputs, requests, strict=True):
                    self._add(request, text, ids)
                with _Progress(len(requests), show_progress) as progress:
                    while self._core.has_work:
                        for final in self._step():
                            finals[final.request_id] = final
                            progress.advance()
                        interrupts.check()
            except BaseException:  # Ctrl-C among them: the next call finds an engine without requests
                for request in requests:
                    self._processor.finish(request.request_id)
                    self._core.abort(request.request_id)
                with contextlib.suppress(Exception):  # the caller gets the first one; the engine takes steps back
                    while self._core.has_work:
                        self._core.step()
                raise
        return [finals[request.request_id] for request in requests]

    def _step(self) -> list[RequestOutput]:
        """Run one engine step; return the requests that it completed."""
        finals = []
        for output in self._core.step():
            update = self._processor.process(output)
            if update is None:
                continue
            for request_id, choice in update.aborts:
                self._core.abort(request_id, choice)
            if update.final is not None:
                finals.append(update.final)
        return finals

    def _request(
        self,
        ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        pooling: Pooling | None = None,
        adapter: str = "",
    ) -> Request:
        params = with_token_ids(params, self.tokenizer)
        check_token_ids(ids, params, self.vocab_size, self._eos)
        name = str(self._next_id)
        self._next_id += 1
        structured = params.structured_outputs
        constraint = None if structured is None else self._grammars.compile(structured)
        more = {"eos_token_ids": self._eos, "constraint": constraint, "pooling": pooling, "adapter": adapter}
        request = Request(name, tuple(ids), params, priority, **more)  # type: ignore[arg-type]
        max_length(request, self._scheduler_config)
        return request

    def _add(self, request: Request, text: str | None, ids: list[int]) -> None:
        self._check_open()
        self._processor.add(request.request_id, text, ids, **text_options(request.params))
        self._core.add(request)

    def _check_open(self) -> None:
        if self._has_ranks and not self._end_ranks.alive:
            raise ValueError("this engine was closed, and its other ranks have ended: create another LLM")

    # ---- step by step ------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        pooling: Pooling | None = None,
    ) -> str:
        """Queue token ids and return the request's id; then call ``step`` while ``has_work``. Stop strings are ignored,
        because this level of the engine has no text. ``pooling``: return a vector of the prompt (``embed``).

        Raises:
            ValueError: the request cannot run, or an engine on several ranks has been closed.
        """
        (adapter,) = self._adapters_for(1, lora_request)
        request = self._request(list(prompt_token_ids), params, priority, pooling, adapter)
        self._check_open()
        self._core.add(request)
        return request.request_id

    def step(self) -> list[EngineOutput]:
        """Run one engine step; return the new outputs of submitted requests.

        An exception of the step, or Ctrl-C, loses nothing: the next call repeats the steps in flight.
        """
        with HeldInterrupts(lambda: self._core.on_device) as interrupts:
            outputs = self._core.step()
            try:
                interrupts.check()
            except BaseException:
                self._core.keep(outputs)
                raise
            return outputs

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a submitted request, or one choice of it."""
        self._core.abort(request_id, choice)

    @property
    def has_work(self) -> bool:
        """True while a submitted request has not ended."""
        return self._core.has_work

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running requests keep their KV."""
        self._core.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        """Return gauges and counters of the scheduler."""
        return self._core.stats()

    @property
    def decisions(self) -> DecisionRing | None:
        """Recent decisions of the scheduler; None with ``decisions=False``."""
        return None if self._core.decisions is None else self._core.decisions.ring

    def close(self) -> None:
        """Close the file of ``decision_log``, if there is one; the engine keeps working without it.

        An engine on several ranks ends, with its other processes. That also happens when the object is collected or the
        program ends.
        """
        if self._core.decisions is not None:
            self._core.decisions.close()
        self._end_ranks()


def _end_ranks(core: EngineCore, ranks: Ranks | None) -> None:
    """End the other processes of an engine on several ranks."""
    from ..ranks import end

    end(core, ranks)


@dataclasses.dataclass
class _Progress:
    """A progress bar on stderr; draws nothing if disabled."""

    total: int
    show: bool

    def __enter__(self) -> _Progress:
        if self.show:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True))
            self._task = self._bar.add_task("requests", total=self.total)
            self._bar.start()
        return self

    def advance(self) -> None:
        if self.show:
            self._bar.advance(self._task)

    def __exit__(self, *exception: object) -> None:
        if self.show:
            self._bar.stop()
