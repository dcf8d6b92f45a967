"""Score how well a text fits another by the log-probabilities of a language model (query likelihood).

    score(query, document) = exp(mean over the query's tokens t of log P(t | template, document, earlier tokens))

The score lies between 0 and 1: the geometric mean of the probabilities with which the model, having read the document,
asks this query (Ponte and Croft 1998; with instructed models: Sachan et al. 2022, arXiv:2204.07496, whose template this
is). Scores of one query for several documents can be compared; those of different queries cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...text.outputs import RequestOutput
from ..scheduling.sampling_params import SamplingParams

BEFORE, AFTER = "Passage: ", "\nPlease write a question based on this passage.\nQuestion:"
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
"""Sampling parameters of an engine request for a score. ``prompt_logprobs_start`` is the number of tokens before the
query: the prefix cache then serves a document that was read before."""


@dataclass(frozen=True, slots=True)
class Score:
    """A score between 0 and 1."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of one pair; names as in vLLM."""

    outputs: Score
    prompt_token_ids: list[int]


def document_text(document: str) -> str:
    """Return the text before a query."""
    return f"{BEFORE}{document}{AFTER}"


def query_text(query: str) -> str:
    """Return a query as it follows a document."""
    return f" {query.strip()}"


def pair_token_ids(query: str, document: str, encode: Callable[..., list[int]]) -> tuple[list[int], int]:
    """Encode a pair; returns (token ids of document and query, number of query tokens).

    Args:
        encode: ``Tokenizer.encode``. No spelling of a special token is read in either text.

    Raises:
        ValueError: the query has no tokens.
    """
    before = encode(document_text(document), add_special_tokens=True, parse_special=False)
    after = encode(query_text(query), add_special_tokens=False, parse_special=False)
    if not query.strip() or not after:
        raise ValueError("the query is empty: give at least one word")
    return before + after, len(after)


def pairs(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pair texts: one with one, one with each of many, or two lists element by element.

    Raises:
        ValueError: the two lists have different lengths, or hold something else than texts.
    """
    first, second = ([each] if isinstance(each, str) else list(each) for each in (text_1, text_2))
    if not all(isinstance(text, str) for text in (*first, *second)):
        raise ValueError("text_1 and text_2 must be texts, or lists of texts")
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second) or not first:
        raise ValueError(f"text_1 has {len(first)} texts and text_2 has {len(second)}: give one text_1, or as many")
    return list(zip(first, second, strict=True))


def score(result: RequestOutput, query_tokens: int) -> float:
    """Compute the score from a finished engine request whose last ``query_tokens`` prompt tokens are the query's.

    Raises:
        RuntimeError: it has failed; the message says why.
    """
    if result.prompt_logprobs is None:
        (output,) = result.outputs
        raise RuntimeError(f"a pair could not be scored: {output.error or output.finish_reason}")
    total = 0.0
    for token, position in zip(
        result.prompt_token_ids[-query_tokens:], result.prompt_logprobs[-query_tokens:], strict=True
    ):
        assert position is not None, "log-probabilities are requested from the query on"
        total += position[token].logprob
    return math.exp(total / query_tokens)
