"""Judges of branches, by the name that a search gives as ``score``.

    likelihood    mean log-probability of the answer's tokens, known from the pass that drew them
    verdict       probability of "yes" when the model is asked if its answer is right (Kadavath et al. 2022,
                  arXiv:2207.05221); ``ModelVerdict`` with an adapter asks a verifier that was trained for it
    RewardHead    a linear head over the hidden state of the last token, of the base or of an adapter: a reward
                  model for classification (Stiennon et al. 2020, arXiv:2009.01325)
    Program       a function of the operator's, in a process with limits (``programs.py``)

Models that judge run in the engine that draws; their prompts extend the branch, so the prefix cache has the KV.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..checkpoints.peft_config import WEIGHTS, read_header
from ..engine.scheduling.sampling_params import MAX_LOGPROBS, SamplingParams
from ..text.outputs import PositionLogprobs
from .tree import Messages

LIKELIHOOD, VERDICT = "likelihood", "verdict"
QUESTION = "Is the answer above correct? Reply with Yes or No only."
VERDICT_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, logprobs=MAX_LOGPROBS)
"""Sampling parameters of a request for a verdict."""
LARGEST_HEAD = 2**20
"""Most numbers in a reward head."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The answer's own mean log-probability."""


@dataclass(frozen=True, slots=True)
class ModelVerdict:
    """The probability of "yes" to ``QUESTION``; ``adapter``: name of the adapter that is asked, empty for the base."""

    adapter: str = ""

    def messages(self, before: Messages | None, question: str, answer: str) -> Messages:
        """Build the conversation that ends with ``QUESTION``. ``question`` is the prompt if there is no
        conversation."""
        opening = before if before is not None else [{"role": "user", "content": question}]
        return [*opening, {"role": "assistant", "content": answer}, {"role": "user", "content": QUESTION}]

    def score(self, position: PositionLogprobs) -> float:
        """Return P(yes) / (P(yes) + P(no)) over the likeliest tokens, which may be beginnings of the two words; 0.5 if
        neither is among them."""
        mass = {"yes": 0.0, "no": 0.0}
        for entry in position.values():
            begun = (entry.decoded_token or "").strip().lower()
            for word in mass:
                if begun and word.startswith(begun):
                    mass[word] += float(np.exp(entry.logprob))
        total = mass["yes"] + mass["no"]
        return mass["yes"] / total if total else 0.5


@dataclass(frozen=True, slots=True)
class RewardHead:
    """A linear head: ``weight`` float64 ``[D]`` times the last hidden state of prompt and answer, plus ``bias``."""

    weight: np.ndarray
    bias: float = 0.0
    adapter: str = ""

    @classmethod
    def read(cls, path: str | Path, adapter: str = "") -> RewardHead:
        """Read the tensor ``score.weight`` of shape [1, D], and ``score.bias``, from a safetensors file, or from the
        file of an adapter for classification in PEFT's layout.

        Raises:
            ValueError: there is no such file or tensor.
        """
        from safetensors import SafetensorError, safe_open

        file = Path(path).expanduser()
        file = file / WEIGHTS if file.is_dir() else file
        found: dict[str, np.ndarray] = {}
        try:
            with safe_open(file, "numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    if "score." in name and np.prod(tensors.get_slice(name).get_shape()) <= LARGEST_HEAD:
                        found[name] = tensors.get_tensor(name)
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            raise ValueError(f"the reward head {path} cannot be read ({error}): give a safetensors file") from None
        weights = [value for name, value in found.items() if name.endswith("weight")]
        if len(weights) != 1 or weights[0].ndim != 2 or len(weights[0]) != 1:
            shapes = {name: list(value.shape) for name, value in found.items()}
            raise ValueError(
                f"the reward head {path} must hold one tensor score.weight of shape [1, hidden size], and has "
                f"{shapes or 'none'}"
            )
        biases = [float(value.reshape(-1)[0]) for name, value in found.items() if name.endswith("bias")]
        return cls(weights[0][0].astype(np.float64), sum(biases), adapter)

    @classmethod
    def of_adapter(cls, directory: Path, name: str) -> RewardHead | None:
        """Return the head of an adapter for classification; None if it has none that can be read."""
        try:
            shapes, _ = read_header(directory)
            return cls.read(directory, name) if any("score." in each for each in shapes) else None
        except ValueError:
            return None

    def check_size(self, hidden_size: int) -> None:
        """Check that the head fits a model.

        Raises:
            ValueError: the sizes differ.
        """
        if len(self.weight) != hidden_size:
            raise ValueError(
                f"the reward head has {len(self.weight)} inputs, and the model's hidden states {hidden_size}: give a "
                "head of this model"
            )

    def score(self, pooled: bytes) -> float:
        """Return the reward for a pooled vector, float64 as bytes."""
        return float(np.frombuffer(pooled, np.float64) @ self.weight) + self.bias


@dataclass(frozen=True, slots=True)
class Program:
    """A function (question, answer) -> score, or None if it has failed; the driver calls it, apart from the engine."""

    function: Callable[[str, str], float | None]


Judge = Likelihood | ModelVerdict | RewardHead | Program
BUILTIN: Mapping[str, Judge] = {LIKELIHOOD: Likelihood(), VERDICT: ModelVerdict()}


def judge_of(name: str, judges: Mapping[str, Judge]) -> Judge:
    """Return the judge of a name.

    Raises:
        ValueError: there is none; the message lists them.
    """
    found = {**BUILTIN, **judges}.get(name)
    if found is None:
        known = ", ".join([*BUILTIN, *sorted(judges)])
        raise ValueError(f"search.score must be one of {known}, not {name[:60]!r}")
    return found
