"""From logits to tokens without the host: the end of a step's graph.

Adjusted logits (``ops/sampling/adjust_logits.py``), masks of grammars (``ops/sampling/mask_logits.py``), draws
(``ops/sampling/sampling.py``) and logprobs of the drawn tokens stay in tensors on the device. ``LogprobTensors`` turns
the logprobs into the entries of a ``StepResult``, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....ops.sampling import adjust_logits, mask_logits, sampling
from ...scheduling.batch import TokenLogprobs
from ...scheduling.sampling_params import MAX_LOGPROBS
from ..sampler import group_mass
from .adjust_state import AdjustState
from .step_inputs import StepFields

OUTPUT_BYTES = 10
"""Bytes of one draw: its token, and two flags."""


class Drawn(NamedTuple):
    """Results of a step for the next step and for the host; each tensor has room for the largest number of draws."""

    token: Any
    """int64; 0 where ``finite`` is 0."""
    finite: Any
    """uint8 (bool on the device); 1 if there was a token to draw."""
    raw_finite: Any
    """uint8 (bool on the device); 1 if the model's own logits had a finite maximum. Only used if logits are adjusted or
    masked; else equal to ``finite``."""

    @classmethod
    def tensors(cls, memory: Tensor, draws: int) -> Drawn:
        """Return views of the beginning of a uint8 tensor."""
        flags = memory[8 * draws : 10 * draws].view(torch.bool)
        return cls(memory[: 8 * draws].view(torch.int64), flags[:draws], flags[draws:])

    @classmethod
    def numpy(cls, memory: np.ndarray, draws: int) -> Drawn:
        """Return views of the beginning of uint8 memory."""
        flags = memory[8 * draws : 10 * draws]
        return cls(memory[: 8 * draws].view(np.int64), flags[:draws], flags[draws:])


class LogprobTensors(NamedTuple):
    """Log-probabilities of R tokens, from the model's own logits."""

    logprob_R: Tensor
    """float64."""
    rank_R: Tensor
    """int64; 1 is the likeliest."""
    top_RK: Tensor
    """float64; log-probabilities of the MAX_LOGPROBS likeliest tokens."""
    top_ids_RK: Tensor
    """int64."""

    def to_host(self) -> LogprobTensors:
        """Return a copy on the host, complete once the stream has reached this point."""

        def copy(tensor: Tensor) -> Tensor:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            return host.copy_(tensor, non_blocking=True)

        return LogprobTensors(*map(copy, self))

    def entries(
        self, rows: Sequence[int], token_ids: Sequence[int], alternatives: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Convert some rows to ``TokenLogprobs``, each with its requested number of alternatives."""
        logprobs, ranks, tops, ids = (tensor[list(rows)].tolist() for tensor in self)
        found = []
        for index, (token, number) in enumerate(zip(token_ids, alternatives, strict=True)):
            pairs = zip(ids[index], tops[index], strict=True)
            top = tuple(sorted(pairs, key=_likeliest_first)[:number]) if number else ()
            found.append(TokenLogprobs(token, logprobs[index], ranks[index], top))
        return found


def _likeliest_first(pair: tuple[int, float]) -> tuple[float, int]:
    return -pair[1], pair[0]


def measure_logprobs(logits_RV: Tensor, token_R: Tensor) -> LogprobTensors:
    """Compute the log-softmax of float32 logits at one token of each row, the token's rank, and the likeliest
    tokens."""
    peak_R1 = logits_RV.amax(-1, keepdim=True)
    mass_R = group_mass(logits_RV - peak_R1).sum(-1)
    lse_R1 = peak_R1.to(torch.float64) + mass_R.log()[:, None]
    at_R1 = logits_RV.gather(1, token_R[:, None])
    top_RK, ids_RK = logits_RV.topk(min(MAX_LOGPROBS, logits_RV.shape[1]), dim=-1)
    return LogprobTensors(
        (at_R1.to(torch.float64) - lse_R1)[:, 0],
        (logits_RV > at_R1).sum(-1) + 1,
        top_RK.to(torch.float64) - lse_R1,
        ids_RK,
    )


DeviceSampler = Callable[..., LogprobTensors | None]


def device_sampler(device: torch.device) -> DeviceSampler:
    """Return the sampler for a device: ``(logits_RV, fields, drawn, state, adjust, logprobs, masks, spread)`` draws
    into ``drawn``, with logprobs if requested. ``masks``: ``MaskTable.words`` if draws are under grammars. ``spread``:
    the logits are this rank's part of the vocabulary, neither adjusted nor masked, and no logprobs are requested.

    On a GPU with Triton it runs the kernels, elsewhere the references of the operators.
    """
    adjust, count, mask = adjust_logits.reference, adjust_logits.reference_count, mask_logits.reference
    draw: Callable[..., object] = _draw_reference
    if device.type == "cuda":
        adjust, count, draw = adjust_logits.triton_adjust, adjust_logits.triton_count, sampling.sample
        mask = mask_logits.triton_mask

    def sample(
        logits_RV: Tensor,
        fields: StepFields,
        drawn: Drawn,
        state: AdjustState,
        adjusts: bool,
        wants_logprobs: bool,
        masks: Tensor | None = None,
        spread: sampling.LogitShards | None = None,
    ) -> LogprobTensors | None:
        rows = len(logits_RV)
        token, finite, raw_finite = (field[:rows] for field in drawn)
        final_RV = logits_RV
        if adjusts:
            torch.lt(logits_RV.amax(-1).abs_(), torch.inf, out=raw_finite)  # false for NaN; two small kernels, not six
        if adjusts:
            penalties = (fields.repetition, fields.frequency, fields.presence)
            final_RV = adjust(logits_RV, state.counts, state.bias, fields.state, *penalties)
        if masks is not None:
            final_RV = logits_RV.clone() if final_RV is logits_RV and wants_logprobs else final_RV
            mask(final_RV, masks, fields.mask, None if adjusts else raw_finite)
        parameters = (fields.temperature, fields.top_k, fields.top_p, fields.min_p)
        key = (fields.seed, fields.choice, fields.draw_position)
        where = {} if spread is None else {"spread": spread}
        draw(final_RV, *parameters, *key, out=token, finite=finite, **where)
        if adjusts:
            count(state.counts, fields.state, token)
        return measure_logprobs(logits_RV.float(), token) if wants_logprobs else None

    return sample


def _draw_reference(logits: Tensor, *parameters: Tensor, out: Tensor, finite: Tensor) -> None:
    out.copy_(sampling.reference(logits, *parameters))
    finite.copy_(torch.isfinite(logits.amax(-1)))
