"""Sampling: one call for all draws of a step, each row with its own parameters.

For a row of logits x the order is that of vLLM: bias, masks, penalties (penalties.py), temperature, min-p, top-k,
top-p, draw. Draws are made with the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014): the argmax of
``log p + noise`` is a draw from p. The noise comes from ``ops/lang/philox.py``, so a draw depends on the
request's seed, the choice and the position alone.

* Greedy: argmax, the lower id of equals. Nothing else is computed.
* top-k, top-p, min-p: the tokens above a small probability are picked out first (a few hundred of them as a rule) and
  only those are sorted. If the mass asked for is not among them, the bar is lowered for that row. Tokens equal to the
  k-th are kept; top-p takes equals in the order of their ids. Noise is computed for the tokens that are kept.
* The whole vocabulary: first a group of 128 tokens by its mass, then a token within it, each by Gumbel-max. That is
  the same distribution, and costs V/128 + 128 random words in place of V.

Rows do not see each other: every reduction runs over a row alone, in groups of 128 whatever the number of rows, so a
row's draw and logprobs are the same to the bit in any batch that gives it the same logits.

Shapes: R logits rows, B draws, V vocabulary, G = ceil(V / 128) groups, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...ops.lang.philox import GROUP, GROUP_STREAM, SMALLEST_TEMPERATURE, TOKEN_STREAM, gumbel
from ..scheduling.batch import StepResult, TokenLogprobs
from ..scheduling.constraint import MaskFiller, fill_each
from ..scheduling.sampling_params import MAX_LOGPROBS
from .penalties import LogitAdjuster, Pick, is_adjusted

BARS = (2.0**-13, 2.0**-18, 0.0)
"""Probability above which a token is a candidate for top-k and top-p: the first bar, and the lower ones tried after
it."""
SCRATCH_FLOATS = 2**20
"""Logits processed at a time for rows with special parameters (or one row), which fits a cache."""
NOT_FINITE = (
    "the model's logits are not finite at this position (NaN or infinity): check the weights, or load the model with "
    'dtype="float32"'
)
NOTHING_LEFT = (
    "no token may be drawn: min_tokens, logit_bias, allowed_token_ids, bad_words or the answer's grammar excludes "
    "every one"
)


@dataclass(slots=True)
class StepSamples:
    """Draws of a step by seq_id; each seq_id is in ``tokens`` or in ``errors``."""

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    sound: set[int] = field(default_factory=set)
    """Seq_ids in ``errors`` whose logits were finite before they were adjusted."""

    def added_to(self, result: StepResult) -> StepResult:
        """Return ``result``, which has no draws yet, with these draws."""
        return replace(result, tokens=self.tokens, logprobs=self.logprobs, errors=self.errors, sound=self.sound)


class Sampler:
    """Draws the tokens of a step. Keeps between steps the counts of used tokens (see penalties.py) and two buffers."""

    def __init__(self, fill_masks: MaskFiller = fill_each) -> None:
        self._adjuster = LogitAdjuster(fill_masks)
        self._buffers: dict[int, torch.Tensor] = {}

    def sample(
        self, logits_RV: torch.Tensor, picks: Sequence[Pick], previous: Mapping[int, int] | None = None
    ) -> StepSamples:
        """Draw one token for each of ``picks``.

        Args:
            logits_RV: float32, the model's; not changed.
            picks: B picks with distinct seq_ids; several may share a row of the logits.
            previous: by seq_id, the token of the step before, where ``output_token_ids`` does not have it yet.

        Returns:
            tokens, logprobs where asked for (of the raw log-softmax), and an error for picks whose row holds NaN or
            +inf or has no token left to draw.
        """
        samples = StepSamples()
        best_ids, finite = likeliest(logits_RV)
        special: list[Pick] = []
        for pick in picks:
            if not finite[pick.row]:
                samples.errors[pick.draw.seq_id] = NOT_FINITE
            elif pick.draw.params.greedy and not is_adjusted(pick):
                samples.tokens[pick.draw.seq_id] = best_ids[pick.row]
            else:
                special.append(pick)
        at_once = max(1, SCRATCH_FLOATS // logits_RV.shape[1])
        for start in range(0, len(special), at_once):
            self._sample_special(logits_RV, special[start : start + at_once], previous or {}, samples)
        self._add_logprobs(logits_RV, picks, samples)
        return samples

    def _sample_special(
        self, logits_RV: torch.Tensor, picks: Sequence[Pick], previous: Mapping[int, int], samples: StepSamples
    ) -> None:
        """Draw picks that are adjusted or random, on a copy of their rows in memory that is kept between steps."""
        rows = torch.tensor([pick.row for pick in picks], device=logits_RV.device)
        logits_BV = self._scratch(0, len(picks), logits_RV)
        torch.index_select(logits_RV, 0, rows, out=logits_BV)
        adjusted = [b for b, pick in enumerate(picks) if is_adjusted(pick)]
        failed: dict[int, str] = {}
        if adjusted:
            part = take_rows(logits_BV, adjusted)
            failed = self._adjuster.apply(part, [picks[b] for b in adjusted], previous)
            if part is not logits_BV:
                logits_BV[torch.tensor(adjusted, device=logits_BV.device)] = part
        best = argmax(logits_BV)
        peak_B1 = logits_BV.gather(1, best[:, None])
        drawable = torch.isfinite(peak_B1[:, 0]).tolist()
        best_ids = best.tolist()
        random: list[int] = []
        for b, pick in enumerate(picks):
            if pick.draw.seq_id in failed:
                samples.errors[pick.draw.seq_id] = failed[pick.draw.seq_id]
            elif not drawable[b]:
                samples.errors[pick.draw.seq_id] = NOTHING_LEFT
                samples.sound.add(pick.draw.seq_id)
            elif pick.draw.params.greedy:
                samples.tokens[pick.draw.seq_id] = best_ids[b]
            else:
                random.append(b)
        if random:
            z_BV = take_rows(logits_BV, random).sub_(take_rows(peak_B1, random))
            chosen = draw_random(z_BV, [picks[b] for b in random], self._scratch(1, len(random), logits_RV))
            for b, token in zip(random, chosen, strict=True):
                samples.tokens[picks[b].draw.seq_id] = token

    def _scratch(self, which: int, rows: int, like_RV: torch.Tensor) -> torch.Tensor:
        """Return one of two buffers [rows, V]. (Allocating some megabytes costs more than the arithmetic on them.)"""
        size = rows * like_RV.shape[1]
        buffer = self._buffers.get(which)
        if buffer is None or len(buffer) < size or buffer.device != like_RV.device:
            buffer = self._buffers[which] = torch.empty(size, dtype=torch.float32, device=like_RV.device)
        return buffer[:size].view(rows, -1)

    @staticmethod
    def _add_logprobs(logits_RV: torch.Tensor, picks: Sequence[Pick], samples: StepSamples) -> None:
        wanted = [
            pick for pick in picks if pick.draw.params.logprobs is not None and pick.draw.seq_id in samples.tokens
        ]
        if not wanted:
            return
        found = token_logprobs(
            logits_RV[torch.tensor([pick.row for pick in wanted], device=logits_RV.device)],
            [samples.tokens[pick.draw.seq_id] for pick in wanted],
            [pick.draw.params.logprobs or 0 for pick in wanted],
        )
        for pick, entry in zip(wanted, found, strict=True):
            samples.logprobs[pick.draw.seq_id] = entry


def argmax(logits_RV: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token of each row, int64 [R], the lower id of equals; a NaN wins."""
    # On a CPU numpy's argmax takes a sixth of the time of torch's.
    if logits_RV.device.type == "cpu":
        return torch.from_numpy(logits_RV.detach().numpy().argmax(-1))
    return logits_RV.argmax(-1)


def likeliest(logits_RV: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Return ``argmax`` of each row, and whether its logit is finite."""
    if logits_RV.device.type == "cpu":  # few operations: a decode step leaves none of their code in a cache
        rows = logits_RV.detach().numpy()
        ids = rows.argmax(-1).tolist()
        return ids, [math.isfinite(rows[row, token]) for row, token in enumerate(ids)]
    best = argmax(logits_RV)
    return best.tolist(), torch.isfinite(logits_RV.gather(1, best[:, None])[:, 0]).tolist()


def take_rows(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return the given distinct rows in ascending order; ``x`` itself, not a copy, if those are all rows."""
    return x if len(rows) == len(x) else x.index_select(0, torch.tensor(rows, device=x.device))


def grouped(x_BV: torch.Tensor, fill: float) -> torch.Tensor:
    """Reshape the rows to groups, [B, G, 128]; the last group is padded with ``fill``."""
    short = -x_BV.shape[1] % GROUP
    if short:
        x_BV = torch.nn.functional.pad(x_BV, (0, short), value=fill)
    return x_BV.view(len(x_BV), -1, GROUP)


def group_mass(z_BV: torch.Tensor, scratch_BV: torch.Tensor | None = None) -> torch.Tensor:
    """Sum exp over each group, float64 [B, G]. One order of summation for any number of rows."""
    weight_BV = torch.exp(z_BV, out=scratch_BV)
    return grouped(weight_BV, fill=0.0).sum(-1).to(torch.float64)


def draw_random(z_BV: torch.Tensor, picks: Sequence[Pick], scratch_BV: torch.Tensor | None = None) -> list[int]:
    """Draw one token for each row.

    Args:
        z_BV: float32, adjusted logits less their maximum (so the likeliest is 0); changed in place.
        picks: B picks with temperature above 0.
        scratch_BV: memory to use, float32.
    """
    device = z_BV.device
    temperature = [max(pick.draw.params.temperature, SMALLEST_TEMPERATURE) for pick in picks]
    z_BV.div_(torch.tensor(temperature, dtype=torch.float32, device=device)[:, None])
    mass_BG = group_mass(z_BV, scratch_BV)
    vocab = z_BV.shape[1]
    truncated = [b for b, pick in enumerate(picks) if _is_truncated(pick, vocab)]
    whole = [b for b, pick in enumerate(picks) if not _is_truncated(pick, vocab)]
    tokens = [0] * len(picks)
    if whole:
        drawn = _draw_whole(take_rows(z_BV, whole), take_rows(mass_BG, whole), [picks[b] for b in whole])
        for b, token in zip(whole, drawn, strict=True):
            tokens[b] = token
    pending = truncated
    for bar in BARS:
        if not pending:
            break
        total_B = take_rows(mass_BG, pending).sum(-1)
        drawn_or_none = _draw_truncated(take_rows(z_BV, pending), total_B, [picks[b] for b in pending], bar)
        for b, found in zip(pending, drawn_or_none, strict=True):
            tokens[b] = -1 if found is None else found
        pending = [b for b in pending if tokens[b] < 0]
    return tokens


def _is_truncated(pick: Pick, vocab: int) -> bool:
    params = pick.draw.params
    return params.top_p < 1.0 or 0 < params.top_k < vocab or params.min_p > 0.0


def _noise(picks: Sequence[Pick], ids_BK: torch.Tensor, stream: int) -> torch.Tensor:
    return gumbel(
        [pick.draw.seed for pick in picks],
        [pick.draw.choice for pick in picks],
        [pick.position for pick in picks],
        ids_BK,
        stream,
    )


def _draw_whole(z_BV: torch.Tensor, mass_BG: torch.Tensor, picks: Sequence[Pick]) -> list[int]:
    """Draw from the whole vocabulary: a group by its mass, then a token of the group."""
    device = z_BV.device
    group_ids = torch.arange(mass_BG.shape[1], device=device).expand_as(mass_BG)
    group_B = (mass_BG.log() + _noise(picks, group_ids, GROUP_STREAM)).argmax(-1)
    ids_BT = group_B[:, None] * GROUP + torch.arange(GROUP, device=device)
    last = z_BV.shape[1] - 1
    inside_BT = z_BV.gather(1, ids_BT.clamp(max=last)).to(torch.float64)
    score_BT = (inside_BT + _noise(picks, ids_BT, TOKEN_STREAM)).masked_fill_(ids_BT > last, float("-inf"))
    return ids_BT.gather(1, score_BT.argmax(-1, keepdim=True))[:, 0].tolist()


def _draw_truncated(z_BV: torch.Tensor, total_B: torch.Tensor, picks: Sequence[Pick], bar: float) -> list[int | None]:
    """Draw from the tokens that min-p, top-k and top-p leave; None for rows where tokens below the bar may belong to
    them.

    Args:
        z_BV: logits less their maximum, over the temperature.
        total_B: float64, the sum of exp(z) of each row.
        bar: tokens of a probability above it are candidates; 0 takes all.
    """
    device = z_BV.device
    rows, vocab = z_BV.shape
    above_B = (total_B * bar).log().to(torch.float32)
    row_N, id_N = torch.nonzero(z_BV > above_B[:, None], as_tuple=True)
    count_B = torch.bincount(row_N, minlength=rows)
    width = int(count_B.max())
    lane_N = torch.arange(len(row_N), device=device) - (count_B.cumsum(0) - count_B)[row_N]
    z_BK = z_BV.new_full((rows, width), float("-inf"))
    ids_BK = torch.zeros((rows, width), dtype=torch.int64, device=device)
    z_BK[row_N, lane_N] = z_BV[row_N, id_N]
    ids_BK[row_N, lane_N] = id_N
    z_BK, order = torch.sort(z_BK, dim=-1, descending=True, stable=True)
    ids_BK = ids_BK.gather(1, order)

    params = [pick.draw.params for pick in picks]
    min_p = [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
    top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    floor_B = torch.tensor(min_p, dtype=torch.float32, device=device)
    k_B = torch.tensor(top_k, device=device)
    top_p_B = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)

    # Tokens outside the candidates are out for certain if min-p's floor or the k-th likeliest lies above the bar.
    kth_B1 = z_BK.gather(1, (k_B.clamp(max=width) - 1)[:, None])
    closed_B = (floor_B > above_B) | (count_B >= k_B)
    if bar == 0.0:
        closed_B = torch.ones_like(closed_B)
    keep_BK = (z_BK >= floor_B[:, None]) & (z_BK > float("-inf"))
    keep_BK &= (z_BK >= kth_B1) | (count_B < k_B)[:, None]
    weight_BK = torch.where(keep_BK, z_BK.to(torch.float64).exp(), 0.0)
    reached_BK = weight_BK.cumsum(-1)
    norm_B = torch.where(closed_B, reached_BK[:, -1], total_B)
    wanted_B1 = (top_p_B * norm_B)[:, None]
    # Where top-k or min-p narrow the set first, top-p is a share of what they keep, so all of that must be at hand.
    alone_B = (k_B == vocab) & (floor_B == float("-inf")) & (top_p_B < 1.0)
    enough_B = torch.where(closed_B, True, alone_B & (reached_BK[:, -1] >= wanted_B1[:, 0]))
    nucleus_BK = (reached_BK - weight_BK < wanted_B1) | (top_p_B >= 1.0)[:, None]
    nucleus_BK[:, 0] = True
    keep_BK &= nucleus_BK

    kept = int(keep_BK.sum(-1).max())
    score_BK = z_BK[:, :kept].to(torch.float64) + _noise(picks, ids_BK[:, :kept].contiguous(), TOKEN_STREAM)
    score_BK.masked_fill_(~keep_BK[:, :kept], float("-inf"))
    chosen = ids_BK.gather(1, score_BK.argmax(-1, keepdim=True))[:, 0].tolist()
    return [token if ok else None for token, ok in zip(chosen, enough_B.tolist(), strict=True)]


def token_logprobs(
    logits_BV: torch.Tensor, token_ids: Sequence[int], alternatives: Sequence[int]
) -> list[TokenLogprobs]:
    """Compute the log-softmax of each row at one token, its rank (1 is the likeliest), and the likeliest tokens.

    Args:
        logits_BV: float32, raw logits of the model.
        token_ids: B token ids.
        alternatives: B, how many of the likeliest to list for each row (0 to MAX_LOGPROBS).
    """
    device = logits_BV.device
    peak_B1 = logits_BV.amax(-1, keepdim=True)
    mass_B = group_mass(logits_BV - peak_B1).sum(-1)
    lse_B1 = peak_B1.to(torch.float64) + mass_B.log()[:, None]
    at_B1 = logits_BV.gather(1, torch.tensor(token_ids, device=device)[:, None])
    logprob = (at_B1.to(torch.float64) - lse_B1)[:, 0].tolist()
    rank = ((logits_BV > at_B1).sum(-1) + 1).tolist()
    tops: list[list[tuple[int, float]]] = [[] for _ in token_ids]
    if max(alternatives):
        # Always as many, so that which of several equals is listed does not depend on the other rows.
        value_BK, id_BK = logits_BV.topk(min(MAX_LOGPROBS, logits_BV.shape[1]), dim=-1)
        value_BK = value_BK.to(torch.float64) - lse_B1
        for b, (ids, values) in enumerate(zip(id_BK.tolist(), value_BK.tolist(), strict=True)):
            pairs = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
            tops[b] = pairs[: alternatives[b]]
    return [
        TokenLogprobs(token_id=token, logprob=logprob[b], rank=rank[b], top=tuple(tops[b]))
        for b, token in enumerate(token_ids)
    ]
