"""Settings of speculative decoding, and the drafters by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .drafter import Drafter, NoDrafter
from .ngram import LONGEST, SHORTEST, NgramDrafter
from .suffix import SuffixDrafter

METHODS: dict[str, Callable[[int, int], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
"""Constructors of drafters by method, called with (shortest, longest) match."""
MODEL_METHODS = ("draft_model", "eagle3")
"""Methods in which a model drafts (``model.py``), or a head that reads the engine's model (``eagle.py``)."""
DEFAULT_MOST = 16
"""Default of the most drafts per sequence and step."""
FEW_ROWS = 64
"""Rows up to which steps with drafts may have more rows than ``max_num_seqs``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding, with vLLM's names (``--speculative-config``).

    Attributes:
        method: the drafter: ``ngram`` (prompt lookup), ``suffix`` (also looks in earlier answers), ``draft_model``, or
            ``eagle3`` (a head that reads hidden states of the engine's model).
        model: the model that drafts: a name, file, directory or hub id, as for the engine. Its vocabulary must be that
            of the engine's model. With ``eagle3`` the directory or hub id of a head for that model.
        quantization: round the matrices of the model that drafts to this format when they are loaded.
        num_speculative_tokens: most drafts per sequence and step. The number of each step is chosen by expected gain.
        prompt_lookup_min: shortest match, in tokens.
        prompt_lookup_max: longest match, in tokens.
        adaptive: choose the number of drafts by expected gain. False always drafts ``num_speculative_tokens``, for
            comparison.

    Raises:
        ValueError: an unknown method or a number out of its range.
    """

    method: str
    model: str | None = None
    quantization: str | None = None
    num_speculative_tokens: int = DEFAULT_MOST
    prompt_lookup_min: int = SHORTEST
    prompt_lookup_max: int = LONGEST
    adaptive: bool = True

    def __post_init__(self) -> None:
        methods = (*METHODS, *MODEL_METHODS)
        if self.method not in methods:
            raise ValueError(f"speculative method must be one of {', '.join(methods)}, got {self.method!r}")
        if self.drafts_by_model and not (isinstance(self.model, str) and self.model):
            raise ValueError(f"speculative method {self.method} needs a model that drafts: give model")
        if not self.drafts_by_model and (self.model is not None or self.quantization is not None):
            raise ValueError(f"speculative method {self.method} needs no model: leave out model and quantization")
        if self.reads_model and self.quantization is not None:
            raise ValueError("speculative method eagle3 keeps the head as it is stored: leave out quantization")
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 64:
                raise ValueError(f"{name} of speculative decoding must be a whole number from 1 to 64, got {value!r}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must not exceed prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive of speculative decoding must be true or false, got {self.adaptive!r}")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> SpeculativeConfig:
        """Make the settings from a JSON object.

        Raises:
            ValueError: a key is missing, unknown or has a value out of its range.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise ValueError(f"speculative decoding has no setting {', '.join(unknown)}: use {', '.join(known)}")
        if "method" not in settings:
            raise ValueError(f"speculative decoding needs a method: one of {', '.join((*METHODS, *MODEL_METHODS))}")
        return cls(**settings)

    @property
    def drafts_by_model(self) -> bool:
        """True if a model drafts, which takes time."""
        return self.method in MODEL_METHODS

    @property
    def reads_model(self) -> bool:
        """True if what drafts is a head that reads hidden states of the engine's model."""
        return self.method == "eagle3"

    def rows(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Return the most rows of a decode step, one for each sequence and each draft. Engines of few sequences verify
        more rows than they have sequences."""
        few = min(FEW_ROWS, max_num_batched_tokens, max_num_seqs * (1 + self.num_speculative_tokens))
        return max(max_num_seqs, few)

    def drafter(self) -> Drafter:
        """Build a new drafter of this method. With ``drafts_by_model`` the engine
        has the drafting model, and this drafter proposes nothing."""
        if self.drafts_by_model:
            return NoDrafter()
        return METHODS[self.method](self.prompt_lookup_min, self.prompt_lookup_max)
