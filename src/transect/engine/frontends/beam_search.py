"""Search for the likeliest whole answers with beams, instead of the likeliest next token.

Each beam is extended by its likeliest next tokens; of all extensions the ``beam_width`` likeliest are kept
(Graves 2012, arXiv:1211.3711). A beam's score is

    log P(answer | prompt) / length ** length_penalty

where ``length`` counts the answer's tokens, the one that ends it left out (Wu et al. 2016, arXiv:1609.08144, with their
simpler normalization). The search ends when no unfinished beam can reach a better score than the worst of the
``beam_width`` best answers, or after ``max_tokens``.

The extensions of a step are engine requests of one token each, batched with all others; the prefix cache has the KV of
what the beams share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...text.detokenizer import IncrementalDetokenizer, TokenTable
from ...text.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from ..scheduling.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search.

    Attributes:
        beam_width: number of beams kept, and of answers returned; 1 to 10.
        max_tokens: most tokens of an answer.
        ignore_eos: continue past the model's end of sequence.
        temperature: must be 0 or 1: beams are compared by the model's own probabilities.
        length_penalty: see above; 0 compares whole probabilities, larger values favour long answers. In [-10, 10].
        include_stop_str_in_output: end the text after, not before, the stop string.
        stop, stop_token_ids: further ends of an answer, as in ``SamplingParams``.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: alternatives to report for each token; beams know twice their width anyway.

    Raises:
        ValueError: a value is out of its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    logprobs: int = 0

    def __post_init__(self) -> None:
        width, penalty = self.beam_width, self.length_penalty
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MAX_BEAM_WIDTH:
            raise ValueError(f"beam_width must be a whole number of 1 to {MAX_BEAM_WIDTH}, got {width!r}")
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be a whole number of at least 1, got {self.max_tokens!r}")
        if self.temperature not in (0, 1):
            raise ValueError(
                f"temperature must be 0 or 1 with beam search, got {self.temperature!r}: beams are compared by the "
                "model's own probabilities"
            )
        if not isinstance(penalty, (int, float)) or not math.isfinite(penalty) or abs(penalty) > 10:
            raise ValueError(f"length_penalty must be in [-10, 10], got {penalty!r}")
        checked = self.step_params()
        object.__setattr__(self, "stop", checked.stop)
        object.__setattr__(self, "stop_token_ids", checked.stop_token_ids)

    def step_params(self) -> SamplingParams:
        """Build the parameters of the requests that extend beams."""
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=max(2 * self.beam_width, self.logprobs),
            stop=self.stop,  # type: ignore[arg-type]
            stop_token_ids=self.stop_token_ids,  # type: ignore[arg-type]
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """An answer: ``tokens`` and ``text`` with the prompt before it, as in vLLM. Answers are ranked by ``score``."""

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float
    logprobs: list[PositionLogprobs]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The answers to one prompt, best first."""

    sequences: list[BeamSearchSequence]


class SearchTokenizer(TokenTable, Protocol):
    """Part of ``text.tokenizer.Tokenizer`` that the search uses."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


@dataclass(slots=True)
class _Beam:
    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    logprobs: tuple[PositionLogprobs, ...] = ()
    reason: str | None = None
    stop_reason: int | str | None = None
    length: int = 0
    """Tokens that count for the score."""


@dataclass(slots=True)
class BeamSearch:
    """One search. Extend each of ``beams`` by a request with ``params.step_params()``, and pass the results to
    ``advance``, until there are no beams left.

    Args:
        params: parameters of the search.
        room: tokens that the context has left after the prompt.
        eos_token_ids: of the model.
        tokenizer: for stop strings and texts.
    """

    params: BeamSearchParams
    room: int
    eos_token_ids: Sequence[int]
    tokenizer: SearchTokenizer
    _going: list[_Beam] = field(default_factory=lambda: [_Beam()])
    _done: list[_Beam] = field(default_factory=list)

    @property
    def beams(self) -> list[tuple[int, ...]]:
        """Tokens of the unfinished beams, after the prompt."""
        return [beam.tokens for beam in self._going]

    def advance(self, likeliest: Sequence[PositionLogprobs]) -> None:
        """Extend every beam by its next token.

        Args:
            likeliest: for each of ``beams`` the log-probabilities of the likeliest tokens after it.
        """
        params = self.params
        ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos_token_ids)}
        found: list[_Beam] = []
        for beam, position in zip(self._going, likeliest, strict=True):
            ranked = sorted(position.items(), key=lambda item: (-item[1].logprob, item[0]))
            for token, entry in ranked[: 2 * params.beam_width]:
                chosen = {token: entry, **position}
                longer = _Beam((*beam.tokens, token), beam.logprob + entry.logprob, (*beam.logprobs, chosen))
                longer.length = len(longer.tokens)
                if token in ends:
                    longer.length -= 1
                    longer.reason, longer.stop_reason = "stop", None if token in self.eos_token_ids else token
                elif params.stop and (stop := self._stopped(longer.tokens)) is not None:
                    longer.reason, longer.stop_reason = "stop", stop
                (found if longer.reason is None else self._done).append(longer)
        found.sort(key=lambda beam: (-beam.logprob, beam.tokens))
        self._going = found[: params.beam_width]
        most = min(params.max_tokens, self.room)
        if self._going and len(self._going[0].tokens) >= most:
            for beam in self._going:
                beam.reason = "length"
            self._done += self._going
            self._going = []
        self._done = sorted(self._done, key=lambda beam: (-self._score(beam), beam.tokens))[: params.beam_width]
        if self._going and len(self._done) == params.beam_width:
            # Tokens to come can only make an answer less likely; more of them help where length_penalty says so.
            length = most if params.length_penalty > 0 else len(self._going[0].tokens)
            if self._going[0].logprob / length**params.length_penalty <= self._score(self._done[-1]):
                self._going = []

    def outputs(self) -> list[tuple[CompletionOutput, float]]:
        """Return the answers and their scores, best first."""
        return [(self._output(index, beam), self._score(beam)) for index, beam in enumerate(self._done)]

    def _score(self, beam: _Beam) -> float:
        return beam.logprob / max(beam.length, 1) ** self.params.length_penalty

    def _text(self, tokens: Sequence[int]) -> str:
        decoder = IncrementalDetokenizer(self.tokenizer, self.params.skip_special_tokens, continues_text=True)
        return decoder.push(tokens) + decoder.flush()

    def _stopped(self, tokens: Sequence[int]) -> str | None:
        """Return the stop string that comes first in the text, if any."""
        text = self._text(tokens)
        found = [(at, stop) for stop in self.params.stop or () if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _output(self, index: int, beam: _Beam) -> CompletionOutput:
        params = self.params
        by_token = beam.reason == "stop" and not isinstance(beam.stop_reason, str)
        keep = params.include_stop_str_in_output
        text = self._text(beam.tokens[:-1] if by_token and not keep else beam.tokens)
        if isinstance(beam.stop_reason, str):
            end = text.find(beam.stop_reason)
            text = text[: end + len(beam.stop_reason) * keep]
        return CompletionOutput(
            index,
            text,
            list(beam.tokens),
            beam.logprob,
            list(beam.logprobs),
            beam.reason,
            beam.stop_reason,
        )


def advance_all(searches: Sequence[BeamSearch], results: Sequence[RequestOutput]) -> None:
    """Extend every beam of several searches by one token.

    Args:
        results: finished engine requests of all beams, in order.

    Raises:
        RuntimeError: a beam has failed.
    """
    left = iter(results)
    for search in searches:
        if search.beams:
            search.advance([_only_position(next(left)) for _ in search.beams])


def _only_position(result: RequestOutput) -> PositionLogprobs:
    """Return the log-probabilities of the one token that a beam was extended by."""
    (output,) = result.outputs
    if not output.logprobs:
        raise RuntimeError(f"a beam failed: {output.error}")
    return output.logprobs[0]


def with_prompt(search: BeamSearch, prompt: Sequence[int], tokenizer: SearchTokenizer) -> BeamSearchOutput:
    """Return the answers of a search in vLLM's form."""
    before = tokenizer.decode(prompt, skip_special_tokens=search.params.skip_special_tokens)
    sequences = []
    for output, score in search.outputs():
        more: dict[str, Any] = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        tokens, logprob = [*prompt, *output.token_ids], output.cumulative_logprob or 0.0
        sequences.append(
            BeamSearchSequence(tokens, before + output.text, logprob, score, list(output.logprobs or ()), **more)
        )
    return BeamSearchOutput(sequences)
