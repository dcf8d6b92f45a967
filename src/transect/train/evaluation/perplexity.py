r"""Score a model's predictions of a text by perplexity and bits per byte, from the engine's prompt log-probabilities.

A text longer than the context is read in windows of W tokens that begin every S tokens; the last one ends with the
text, so it overlaps the one before it by more. Each token is predicted once, in the first window that holds it, so all
but those of the first window have at least W - S tokens before them:

    window 0:  predicts tokens 1 .. W - 1               (token 0 only starts the text: a BOS where the model has one)
    window i:  predicts the last S of its W tokens      (the last window: those not predicted yet)

    perplexity = exp(-sum log p / predicted tokens)        bits per byte = -sum log p / (ln 2 x predicted bytes)

Bits per byte compare models whose tokenizers differ. A smaller S costs W / S times the work and lowers the number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...engine.frontends.inputs import LoRARequest
from ...engine.frontends.llm import LLM
from ...engine.scheduling.sampling_params import SamplingParams
from ...text.tokenizer import Tokenizer

SCORE = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class TextScore:
    """Result for a text. ``nats``: minus the sum of the log-probabilities of ``predicted`` tokens, which are ``size``
    bytes of text."""

    nats: float
    predicted: int
    size: int
    windows: tuple[tuple[float, int], ...] = ()
    """(nats, predicted tokens) of each window."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.predicted)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.size

    def __add__(self, other: TextScore) -> TextScore:
        windows = (*self.windows, *other.windows)
        return TextScore(self.nats + other.nats, self.predicted + other.predicted, self.size + other.size, windows)


def windows(count: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """Return (first token, token after the last, first predicted token) of each window over ``count`` tokens.

    Raises:
        ValueError: a stride that is not from 1 to ``window - 1``: each predicted token needs one before it.
    """
    if not 1 <= stride < window:
        raise ValueError(f"the stride must be from 1 to {window - 1} tokens, less than the window, not {stride}")
    found = [(0, min(window, count), 1)]
    while found[-1][1] < count:
        end = found[-1][1]
        stop = min(end + stride, count)
        found.append((stop - window, stop, end))
    return found


def scored_tokens(
    llm: LLM, sequences: Sequence[Sequence[int]], starts: Sequence[int], adapter: LoRARequest | None = None
) -> list[list[tuple[float, bool]]]:
    """Return, for each token of each sequence from its start on, its log-probability, and True if it was the likeliest.

    Args:
        starts: position of each sequence's first scored token, at least 1. No logits are computed for those before,
            and the prefix cache may serve them.
        adapter: as ``lora_request`` of ``LLM.generate``.

    Raises:
        ValueError: a sequence does not leave room for one more token in the context.
        RuntimeError: the engine could not compute one.
    """
    params = [SCORE.with_(prompt_logprobs_start=start) for start in starts]
    outputs = llm.generate([list(sequence) for sequence in sequences], params, lora_request=adapter)
    found = []
    for sequence, start, output in zip(sequences, starts, outputs, strict=True):
        if output.prompt_logprobs is None:
            raise RuntimeError(f"the engine could not score a sequence: {output.outputs[0].error}")
        row = []
        for token, position in zip(sequence[start:], output.prompt_logprobs[start:], strict=True):
            assert position is not None
            row.append((position[token].logprob, position[token].rank == 1))
        found.append(row)
    return found


def score_tokens(llm: LLM, tokens: Sequence[int], size: int, *, window: int, stride: int) -> TextScore:
    """Score one text of ``size`` predicted bytes, given as tokens."""
    if len(tokens) < 2:
        raise ValueError(f"a text of {len(tokens)} tokens predicts nothing: give a longer one")
    spans = windows(len(tokens), window, stride)
    starts = [start - first for first, _, start in spans]
    rows = scored_tokens(llm, [tokens[first:last] for first, last, _ in spans], starts)
    found = [(-math.fsum(value for value, _ in row), len(row)) for row in rows]
    return TextScore(sum(nats for nats, _ in found), len(tokens) - 1, size, tuple(found))


def score_file(llm: LLM, path: str | Path, *, window: int | None = None, stride: int | None = None) -> TextScore:
    """Score a text file.

    Args:
        window: tokens of a window; None for the engine's whole context, less the one token it must generate.
        stride: tokens between the starts of windows; None for half a window.

    Raises:
        ValueError: the file cannot be read, is too short, or a size is out of range.
    """
    most = llm.max_model_len - 1
    window = most if window is None else window
    if not 2 <= window <= most:
        raise ValueError(f"the window must be from 2 to {most} tokens (the context less one), not {window}")
    tokenizer = llm.tokenizer
    if not isinstance(tokenizer, Tokenizer):
        raise ValueError("this model brings no tokenizer, so it cannot read text: give a model that has one")
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): give text files") from None
    tokens = tokenizer.encode(text, add_special_tokens=True)
    if not tokens:
        raise ValueError(f"{path} is empty")
    start = 0 if tokens[0] == tokenizer.bos_token_id else len(tokenizer.token_bytes(tokens[0]))
    size = len(text.encode()) - start
    return score_tokens(llm, tokens, size, window=window, stride=max(1, window // 2) if stride is None else stride)
