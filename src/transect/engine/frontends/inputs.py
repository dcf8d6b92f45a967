"""Accepted forms of prompts, and the checks before a prompt is queued; for ``LLM`` and ``AsyncEngine``."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...text.grammar.bad_words import spellings
from ...text.sampling_defaults import SamplingDefaults
from ..scheduling.sampling_params import SamplingParams


class TextEncoder(Protocol):
    """Part of a tokenizer that encoding uses."""

    def encode(self, text: str, add_special_tokens: bool = ..., parse_special: bool = ...) -> list[int]: ...


class LoRARequest:
    """An adapter for a request: ``LoRARequest(name, path)``. vLLM's form, with a number between the two, is taken too.

    Args:
        lora_name: for messages.
        where: the directory of an adapter in PEFT's layout, or of a run; a number before it is not looked at.
        lora_path: the same by name.

    Raises:
        ValueError: there is no path.
    """

    def __init__(self, lora_name: str, *where: Any, lora_path: str | Path = "", lora_int_id: int = 0) -> None:
        path = lora_path or next((each for each in where if isinstance(each, str | Path)), "")
        if not isinstance(lora_name, str) or not lora_name or not path:
            raise ValueError("LoRARequest takes a name and the directory of an adapter")
        self.lora_name, self.lora_path, self.lora_int_id = lora_name, str(path), lora_int_id

    def __repr__(self) -> str:
        return f"LoRARequest({self.lora_name!r}, {self.lora_path!r})"


class Searches(Protocol):
    """A search, which a level above hands to an ``LLM``."""

    def run(self, llm: Any, prompts: Any, params: SamplingParams | None, **options: Any) -> list[Any]:
        """Search an answer to each prompt."""


def prompt_token_ids(
    prompt: str | Sequence[int] | Mapping[str, Any],
    tokenizer: TextEncoder,
    *,
    add_special_tokens: bool = True,
    parse_special: bool = True,
) -> tuple[str | None, list[int]]:
    """Convert a prompt (text, token ids, or a mapping with one of the two) to (text or None, token ids).

    Args:
        add_special_tokens: put around a text what the model expects there (often a BOS token, often nothing).
        parse_special: spellings of special tokens in a text are those tokens; False takes them for text.

    Raises:
        ValueError: it is none of these, or empty.
    """
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise ValueError(f"a prompt mapping has 'prompt' or 'prompt_token_ids', not {sorted(map(str, prompt))}")
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if ids is None:
            return prompt_token_ids(
                text if text is not None else "",
                tokenizer,
                add_special_tokens=add_special_tokens,
                parse_special=parse_special,
            )
        return text, prompt_token_ids(ids, tokenizer)[1]
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("the prompt is empty: give at least one character")
        return prompt, tokenizer.encode(prompt, add_special_tokens=add_special_tokens, parse_special=parse_special)
    if isinstance(prompt, Sequence):
        ids = [token for token in prompt if isinstance(token, int) and not isinstance(token, bool)]
        if len(ids) == len(prompt):
            return None, ids
    raise ValueError(f"a prompt must be text or a list of token ids, not {type(prompt).__name__} {str(prompt)[:60]!r}")


def default_params(defaults: SamplingDefaults) -> SamplingParams:
    """Turn a model's recommended values into parameters of a request.

    Raises:
        ValueError: a value is out of its range; the message names its origin.
    """
    longest = {} if defaults.max_new_tokens is None else {"max_tokens": defaults.max_new_tokens}
    try:
        return SamplingParams(**defaults.values, **longest)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{defaults.origin}: {error}; correct it, or start with generation_config none") from None


def checked_submit(request_id: Any, token_ids: Sequence[Any], priority: Any) -> list[int]:
    """Return ``token_ids`` as plain numbers. Refuses requests that cannot be sent to an engine process.

    Raises:
        ValueError: a value is of another type, or out of range.
    """
    if not isinstance(request_id, str):
        raise ValueError(f"request_id must be text, got {request_id!r}")
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
        raise ValueError(f"priority must be a whole number of 64 bits (lower runs earlier), got {priority!r}")
    try:
        return [operator.index(token) for token in token_ids]
    except TypeError:
        raise ValueError("prompt_token_ids must hold whole numbers") from None


def check_params(params: object) -> SamplingParams:
    """Return ``params`` after checking their type.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(params, SamplingParams):
        raise ValueError(
            f"sampling parameters are given as SamplingParams(max_tokens=64, ...), not as {type(params).__name__}"
        )
    return params


def params_for(
    count: int, params: SamplingParams | Sequence[SamplingParams] | None, defaults: SamplingParams
) -> Sequence[SamplingParams]:
    """Return the parameters of each of ``count`` prompts; ``defaults`` if there are none.

    Raises:
        ValueError: they are of another type, or of another number.
    """
    if params is None:
        return [defaults] * count
    if not isinstance(params, (list, tuple)):
        return [check_params(params)] * count
    if len(params) != count:
        raise ValueError(f"there are {count} prompts and {len(params)} sampling_params: give one, or one for each")
    return [check_params(each) for each in params]


def with_token_ids(params: SamplingParams, tokenizer: TextEncoder) -> SamplingParams:
    """Return the same parameters, with ``bad_words`` as token ids."""
    if not params.bad_words or params.bad_words_token_ids:
        return params
    return params.with_(bad_words_token_ids=spellings(params.bad_words, tokenizer.encode))


def truncated(ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """Truncate a prompt to its end, as ``truncate_prompt_tokens`` asks.

    Raises:
        ValueError: see ``room_for_prompt``.
    """
    most = params.truncate_prompt_tokens
    if most == -1:
        most = room_for_prompt(params.max_tokens or 1, max_model_len)
    return ids if most is None else ids[-most:]


def room_for_prompt(answer: int, max_model_len: int) -> int:
    """Return the tokens that the context leaves beside ``answer`` tokens, which ``truncate_prompt_tokens`` -1 keeps.

    Raises:
        ValueError: the context leaves none.
    """
    if answer >= max_model_len:
        raise ValueError(
            f"truncate_prompt_tokens -1 keeps what max_tokens leaves of the context, and {answer} of {max_model_len} "
            "tokens leave no room: lower max_tokens, or give the number of prompt tokens to keep"
        )
    return max_model_len - answer


def text_options(params: SamplingParams) -> dict[str, Any]:
    """Return a request's parameters as keyword arguments of ``OutputProcessor.add``."""
    return {
        "n": params.n,
        "stop": params.stop or (),
        "include_stop": params.include_stop_str_in_output,
        "skip_special_tokens": params.skip_special_tokens,
        "min_tokens": params.min_tokens,
    }


def check_token_ids(
    ids: Sequence[int], params: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int] = ()
) -> None:
    """Refuse an empty prompt, token ids beyond the vocabulary, and ``min_tokens`` if every token is masked.

    Raises:
        ValueError: names the id and the range.
    """
    if not ids:
        raise ValueError("the prompt is empty: give at least one token")
    named = {
        "prompt_token_ids": ids,
        "logit_bias": params.logit_bias or (),
        "stop_token_ids": params.stop_token_ids or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": itertools.chain(*params.bad_words_token_ids),
    }
    for name, tokens in named.items():
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name} holds token id {token}; this model has ids 0 to {vocab_size - 1}")
    if params.min_tokens:
        masked = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)}
        if params.allowed_token_ids is not None and masked.issuperset(params.allowed_token_ids):
            raise ValueError("min_tokens masks all of allowed_token_ids: allow a token that does not end the answer")
        if len(masked) >= vocab_size:
            raise ValueError(
                f"min_tokens masks the tokens that end an answer, and those are all {vocab_size} of this model: set it "
                "to 0 or give fewer stop_token_ids"
            )
