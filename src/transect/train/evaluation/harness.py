"""Tasks of EleutherAI's lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), on the engine.

The harness asks a model three things. The engine answers all requests of a kind together, by continuous batching:

* ``loglikelihood``: the log-probability of a continuation of a context, and whether greedy decoding would give it: from
  prompt log-probabilities and ranks.
* ``loglikelihood_rolling``: the log-probability of a whole text, in windows that do not overlap in what they predict.
* ``generate_until``: text up to a stop string.

A sequence that is longer than the context loses its beginning, as with the harness's own models; a warning counts them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...engine.frontends.llm import LLM
from ...engine.scheduling.sampling_params import SamplingParams
from ...text.tokenizer import Tokenizer
from .perplexity import scored_tokens

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ValueError(
        f"tasks need EleutherAI's harness, which cannot be imported ({error}): pip install 'transect[eval]'"
    ) from error

log = logging.getLogger(__name__)

MOST_TOKENS = 256
"""Longest answer in tokens, if the task sets no limit."""


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A ``transect.LLM`` with the harness's interface of a model. Raises ValueError without a tokenizer or end-of-text
    token."""

    def __init__(self, llm: LLM, name: str) -> None:
        super().__init__()
        if not isinstance(llm.tokenizer, Tokenizer):
            raise ValueError(f"{name} brings no tokenizer, so it cannot be given text: choose a model that has one")
        if not llm.tokenizer.eos_token_ids:
            raise ValueError(f"{name} names no end-of-text token: add eos_token_id to its config.json")
        self.llm = llm
        self.name = name
        self._tokens = llm.tokenizer

    # ---- text --------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return min(self._tokens.eos_token_ids)

    @property
    def prefix_token_id(self) -> int:
        """The token for an empty context: BOS, or the end-of-text token."""
        begin = self._tokens.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, a part of the key of the harness's cache."""
        return self.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenize a string; spellings of special tokens become these tokens, as in chat templates."""
        return self._tokens.encode(string, add_special_tokens=bool(add_special_tokens), parse_special=True)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return a name that distinguishes templates of models in the harness's cache."""
        return self.name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render the messages in the model's chat template. Raises ValueError if it has none."""
        if self.llm.chat_template is None:
            raise ValueError(f"{self.name} has no chat template: leave it out")
        return self.llm.chat_template.render(chat_history, add_generation_prompt=add_generation_prompt)

    # ---- what the harness asks ---------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Compute (log-probability, greedy) of each continuation; ``requests``: (key, context tokens, continuation
        tokens)."""
        most = self.llm.max_model_len - 1
        whole = [context + continuation for _, context, continuation in requests]
        cut = sum(len(tokens) > most for tokens in whole)
        if cut:
            log.warning("%d sequences are longer than the context of %d tokens: their beginning is cut", cut, most)
        kept = [tokens[-most:] for tokens in whole]
        # Of a continuation longer than the context the end is scored; an empty one has no last token.
        starts = [
            max(1, len(tokens) - max(1, len(continuation)))
            for tokens, (_, _, continuation) in zip(kept, requests, strict=True)
        ]
        rows = scored_tokens(self.llm, kept, starts)
        found = []
        for (key, _context, continuation), row in zip(requests, rows, strict=True):
            last = row if continuation else []
            answer = sum(value for value, _ in last), all(greedy for _, greedy in last)
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
            found.append(answer)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Compute the log-probability of each text."""
        parts: list[tuple[Any, list[int], list[int]]] = []
        owners = []
        for index, request in enumerate(requests):
            (text,) = request.args
            for pair in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.llm.max_model_len - 2,
                context_len=1,
            ):
                parts.append((None, *make_disjoint_window(pair)))
                owners.append(index)
        sums = [0.0] * len(requests)
        for index, (value, _) in zip(owners, self._loglikelihood_tokens(parts), strict=True):
            sums[index] += value
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate the text that follows each context, without the stop string that ended it."""
        prompts, params = [], []
        for request in requests:
            context, settings = request.args
            made = sampling_params(settings)
            assert made.max_tokens is not None
            room = self.llm.max_model_len - made.max_tokens
            if room < 1:
                raise ValueError(
                    f"a task asks for {made.max_tokens} tokens and the context has {self.llm.max_model_len}: raise "
                    "max_model_len, or lower the task's max_gen_toks"
                )
            prompts.append(self.tok_encode(context)[-room:])
            params.append(made)
        outputs = self.llm.generate(prompts, params)
        texts = []
        for request, output in zip(requests, outputs, strict=True):
            choice = output.outputs[0]
            if choice.error is not None:
                raise RuntimeError(f"the engine could not answer: {choice.error}")
            texts.append(choice.text)
            self.cache_hook.add_partial("generate_until", request.args, choice.text)
        return texts


def sampling_params(settings: dict[str, Any]) -> SamplingParams:
    """Convert the harness's generation arguments to ``SamplingParams``; greedy unless ``do_sample`` or a temperature is
    set.

    Raises:
        ValueError: an argument that the engine does not have.
    """
    left = dict(settings)
    until = left.pop("until", None) or []
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    given = [value for name in names if (value := left.pop(name, None)) is not None]
    temperature = left.pop("temperature", None)
    sample = left.pop("do_sample", None)
    if sample is False:
        temperature = 0.0
    elif temperature is None:
        temperature = 1.0 if sample else 0.0
    known = {name: left.pop(name) for name in ("top_p", "top_k", "min_p", "seed") if name in left}
    if left:
        raise ValueError(f"the task's generation argument {sorted(left)[0]!r} is not one that the engine has")
    stop = [until] if isinstance(until, str) else list(until)
    most = int(given[0]) if given else MOST_TOKENS
    return SamplingParams(temperature=float(temperature), max_tokens=most, stop=stop or None, **known)


def run_tasks(
    llm: LLM,
    name: str,
    tasks: Sequence[str],
    *,
    include: str | Path | None = None,
    few_shot: int | None = None,
    limit: int | None = None,
    chat: bool = False,
) -> dict[str, dict[str, Any]]:
    """Evaluate tasks or groups of tasks; return the metrics of each by name.

    Args:
        include: a folder with further task files; None for the harness's own tasks alone.
        few_shot: examples before each question; None for the task's own number.
        limit: questions of each task; None for all.
        chat: put the questions into the model's chat template.

    Raises:
        ValueError: there is no such task, or its data cannot be read.
    """
    own = None if include is None else TaskManager(include_path=str(include), include_defaults=False)
    if own is not None and set(tasks) <= set(own.all_tasks):  # reading the harness's own thousands takes seconds
        manager = own
    else:
        manager = TaskManager(include_path=None if include is None else str(include))
    missing = [task for task in tasks if task not in manager.all_tasks]
    if missing:
        raise ValueError(
            f"the harness knows no task {missing[0]!r}: name one of its tasks, or their folder by --include"
        )
    try:
        found = simple_evaluate(
            model=HarnessModel(llm, name),
            tasks=list(tasks),
            num_fewshot=few_shot,
            limit=limit,
            task_manager=manager,
            apply_chat_template=chat,
            log_samples=False,
            bootstrap_iters=0,
        )
    except OSError as error:  # also what `datasets` and the hub's client raise without a network
        raise ValueError(
            f"the data of {', '.join(tasks)} cannot be read ({' '.join(str(error).split())}): it is fetched once, from "
            "the Hugging Face hub. Run this where there is a network, and copy the cache (~/.cache/huggingface or "
            "$HF_HOME) here, or give task files with data of your own by --include FOLDER"
        ) from error
    results: dict[str, dict[str, Any]] = found["results"]
    return results
