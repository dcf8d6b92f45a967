"""Pool the hidden states of a prompt into one vector, an embedding.

An engine request with ``pooling`` computes its prompt like any other, in the same steps. The pooled hidden states after
the final norm come back with its one token, which is ignored:

    last    the hidden state of the last token, as most models trained for embeddings use it (Wang et al. 2024,
            arXiv:2401.00368); its text may come from the prefix cache
    mean    the mean over all tokens (Reimers and Gurevych 2019, arXiv:1908.10084)

An embedding is the pooled vector, or its first ``dimensions`` numbers (Kusupati et al. 2022, arXiv:2205.13147: useful
with models trained for it), divided by its length unless ``normalize`` is off.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from ...text.outputs import RequestOutput
from ..scheduling.sampling_params import SamplingParams

Pooling = Literal["last", "mean"]
POOLINGS: tuple[str, ...] = get_args(Pooling)
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""Sampling parameters of an engine request for a pooled vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Parameters of an embedding.

    Attributes:
        pooling: "last" or "mean"; None for the setting of the model's files (``default_pooling``).
        normalize: scale the embedding to length 1.
        dimensions: number of leading components to keep; None for all.
        truncate_prompt_tokens: number of last tokens of the text to keep; -1 for as many as the context holds.

    Raises:
        ValueError: a value is out of its range.
    """

    pooling: Pooling | None = None
    normalize: bool = True
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be {' or '.join(POOLINGS)}, got {str(self.pooling)[:40]!r}")
        if self.dimensions is not None and (isinstance(self.dimensions, bool) or self.dimensions < 1):
            raise ValueError(f"dimensions must be at least 1, got {self.dimensions!r}")
        PARAMS.with_(truncate_prompt_tokens=self.truncate_prompt_tokens)

    def check_size(self, size: int) -> None:
        """Refuse more ``dimensions`` than the model's hidden states have.

        Raises:
            ValueError: says how many they have.
        """
        if self.dimensions is not None and self.dimensions > size:
            raise ValueError(f"dimensions must be at most {size}, the size of this model, got {self.dimensions}")


@dataclass(frozen=True, slots=True)
class PooledVector:
    """A vector of float32 numbers."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one prompt; names as in vLLM."""

    outputs: PooledVector
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0


def embedding(pooled: bytes, params: PoolingParams) -> np.ndarray:
    """Turn a pooled vector, float64 ``[D]`` as bytes, into an embedding, float32 ``[dimensions]``.

    Raises:
        ValueError: the vector has fewer dimensions than ``params`` asks for.
    """
    vector = np.frombuffer(pooled, np.float64)
    params.check_size(len(vector))
    vector = vector[: params.dimensions]
    length = float(np.linalg.norm(vector)) if params.normalize else 1.0
    return (vector / (length or 1.0)).astype(np.float32)


def embedding_output(result: RequestOutput, params: PoolingParams) -> EmbeddingOutput:
    """Return the embedding of a finished engine request.

    Raises:
        RuntimeError: it has failed; the message says why.
    """
    if result.pooled is None:
        (output,) = result.outputs
        raise RuntimeError(f"a prompt could not be embedded: {output.error or output.finish_reason}")
    vector = PooledVector(embedding(result.pooled, params).tolist())
    return EmbeddingOutput(vector, result.prompt_token_ids, result.num_cached_tokens)


def default_pooling(model: str | Path) -> Pooling:
    """Read the pooling of a sentence-transformers folder (``1_Pooling/config.json``); "last" without that file.

    Raises:
        ValueError: the file asks for an unsupported pooling.
    """
    file = Path(model) / "1_Pooling" / "config.json"
    if not file.is_file():
        return "last"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    modes = sorted(name for name, on in found.items() if name.startswith("pooling_mode_") and on is True)
    if modes == ["pooling_mode_lasttoken"]:
        return "last"
    if modes == ["pooling_mode_mean_tokens"]:
        return "mean"
    raise ValueError(f"{file} asks for {' and '.join(modes) or 'no pooling'}: name the pooling, last or mean")
