"""Adjust a row of logits before a token is drawn: biases, masked tokens, the three penalties, and grammars.

In the order of vLLM's sampler, on a copy of the model's logits:

    logit[t] += logit_bias[t]
    logit[t]  = -inf                                    where t must not be drawn now, or is not among
                                                         allowed_token_ids
    logit[t]  = logit[t] / r if logit[t] > 0 else * r    for t in prompt or output (repetition_penalty r; Keskar et al.,
                                                         "CTRL", 2019)
    logit[t] -= frequency * count[t] + presence          for t in the output, count[t] times

and last of all -inf where the grammar of an answer does not allow t, or t completes one of bad_words.

Which tokens a choice has used, and how often, is kept from step to step: a step adds its new token, it does not count
the context again. That memory is only a cache of data that every batch carries; a choice that has been away for a while
is forgotten and, should it return, counted again from ``Draw.prompt_token_ids`` and ``output_token_ids``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..scheduling.batch import Draw
from ..scheduling.constraint import MaskFiller, fill_each

FORGET_AFTER_STEPS = 64
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BYTE_BIAS = np.where(_BITS, 0.0, -np.inf).astype(np.float32)
"""``[256, 8]``: bias that each byte of a mask adds to its eight logits. A look-up and a sum take a twentieth of the
time of unpacking the bits."""


class Pick(NamedTuple):
    """One token to draw: for ``draw``, at ``position`` of prompt + output, from row ``row`` of the logits."""

    draw: Draw
    position: int
    row: int


def is_adjusted(pick: Pick) -> bool:
    """Return True if the adjustments below would change this pick's logits."""
    draw = pick.draw
    changed = draw.biased or draw.constraint is not None or draw.masked_at(pick.position)
    return bool(changed) or is_penalised(draw)


def is_penalised(draw: Draw) -> bool:
    """Return True if a penalty depends on the tokens that the choice has used."""
    params = draw.params
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class UsedTokens:
    """The distinct tokens of one choice's prompt and output, with their counts in the output."""

    __slots__ = ("_counts", "_ids", "_slots", "consumed", "last_step", "prompt_length")

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = dict.fromkeys(prompt_token_ids)
        self._slots = {token: slot for slot, token in enumerate(distinct)}
        self._ids = np.fromiter(distinct, dtype=np.int64, count=len(distinct))
        self._counts = np.zeros(len(distinct), dtype=np.float32)
        self.prompt_length = len(prompt_token_ids)
        self.consumed = 0
        self.last_step = 0

    def extend(self, output_token_ids: Sequence[int]) -> None:
        """Count further output tokens."""
        for token in output_token_ids:
            slot = self._slots.get(token)
            if slot is None:
                slot = self._slots[token] = len(self._slots)
                if slot >= len(self._ids):
                    grown = max(64, 2 * slot)
                    self._ids = np.resize(self._ids, grown)
                    self._counts = np.concatenate([self._counts, np.zeros(grown - slot, dtype=np.float32)])
                self._ids[slot] = token
            self._counts[slot] += 1.0
        self.consumed += len(output_token_ids)

    @property
    def ids(self) -> np.ndarray:
        """int64 [U]: the distinct tokens."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray:
        """float32 [U]: count of each of ``ids`` in the output (0 if only in the prompt)."""
        return self._counts[: len(self._slots)]


class FixedTokens:
    """Token biases and masks of a choice as arrays, made at its first draw and reused at every draw."""

    __slots__ = ("allowed", "biased", "biases", "last_step", "masked")

    def __init__(self, draw: Draw) -> None:
        bias = draw.params.logit_bias or {}
        self.biased = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
        self.biases = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        allowed = draw.params.allowed_token_ids
        self.allowed = torch.tensor(allowed or (), dtype=torch.int64)
        self.masked = np.array(draw.stop_ids, dtype=np.int64)
        """Tokens that must not be drawn until ``min_tokens``."""
        self.last_step = 0


class LogitAdjuster:
    """Applies bias, masks and penalties to rows of logits; keeps the state of each choice between steps."""

    def __init__(self, fill_masks: MaskFiller = fill_each) -> None:
        self._used: dict[int, UsedTokens] = {}
        self._fixed: dict[int, FixedTokens] = {}
        self._step = 0
        self._fill_masks = fill_masks

    def apply(self, logits_BV: torch.Tensor, picks: Sequence[Pick], previous: Mapping[int, int]) -> dict[int, str]:
        """Change ``logits_BV`` in place. Returns errors of grammars by seq_id.

        Args:
            logits_BV: float32, row b for ``picks[b]`` (not ``picks[b].row``); each row is the caller's own copy.
            picks: B picks with distinct seq_ids.
            previous: by seq_id, the token of the step before, where ``output_token_ids`` does not have it yet. Where it
                is missing here too, that draw failed, its choice has ended, and what is drawn now is dropped.
        """
        self._step += 1
        self._add_bias(logits_BV, picks)
        self._keep_allowed(logits_BV, picks)
        self._mask(logits_BV, picks)
        self._penalise(logits_BV, picks, previous)
        failed = self._constrain(logits_BV, picks)
        if self._step % FORGET_AFTER_STEPS == 0:
            oldest = self._step - FORGET_AFTER_STEPS
            self._used = {seq_id: used for seq_id, used in self._used.items() if used.last_step > oldest}
            self._fixed = {seq_id: fixed for seq_id, fixed in self._fixed.items() if fixed.last_step > oldest}
        return failed

    def _constrain(self, logits_BV: torch.Tensor, picks: Sequence[Pick]) -> dict[int, str]:
        """Apply grammars: set every forbidden token to -inf."""
        rows = [row for row, pick in enumerate(picks) if pick.draw.constraint is not None]
        if not rows:
            return {}
        vocab = logits_BV.shape[1]
        words = np.zeros((len(rows), -(-vocab // 32)), np.int32)
        problems = self._fill_masks([picks[row].draw.constraint for row in rows], words)
        for row, mask in zip(rows, words, strict=True):
            bias = np.take(_BYTE_BIAS, mask.view(np.uint8), axis=0).reshape(-1)[:vocab]
            logits_BV[row].add_(torch.from_numpy(bias).to(logits_BV.device))
        found = zip(rows, problems, strict=True)
        return {picks[row].draw.seq_id: problem for row, problem in found if problem is not None}

    def _add_bias(self, logits_BV: torch.Tensor, picks: Sequence[Pick]) -> None:
        fixed = [(row, self._fixed_of(pick.draw)) for row, pick in enumerate(picks) if pick.draw.params.logit_bias]
        if fixed:
            vocab, device = logits_BV.shape[1], logits_BV.device
            at = torch.from_numpy(np.concatenate([one.biased + row * vocab for row, one in fixed])).to(device)
            logits_BV.view(-1)[at] += torch.from_numpy(np.concatenate([one.biases for _, one in fixed])).to(device)

    def _mask(self, logits_BV: torch.Tensor, picks: Sequence[Pick]) -> None:
        masked = [
            self._fixed_of(pick.draw).masked + row * logits_BV.shape[1]
            for row, pick in enumerate(picks)
            if pick.draw.masked_at(pick.position)
        ]
        if masked:
            logits_BV.view(-1)[torch.from_numpy(np.concatenate(masked)).to(logits_BV.device)] = float("-inf")

    def _keep_allowed(self, logits_BV: torch.Tensor, picks: Sequence[Pick]) -> None:
        for row, pick in enumerate(picks):
            if pick.draw.params.allowed_token_ids is not None:
                allowed = self._fixed_of(pick.draw).allowed.to(logits_BV.device)
                kept = logits_BV[row, allowed]
                logits_BV[row] = float("-inf")
                logits_BV[row, allowed] = kept

    def _fixed_of(self, draw: Draw) -> FixedTokens:
        fixed = self._fixed.get(draw.seq_id)
        if fixed is None:
            fixed = self._fixed[draw.seq_id] = FixedTokens(draw)
        fixed.last_step = self._step
        return fixed

    def _penalise(self, logits_BV: torch.Tensor, picks: Sequence[Pick], previous: Mapping[int, int]) -> None:
        rows = [row for row, pick in enumerate(picks) if is_penalised(pick.draw)]
        if not rows:
            return
        used = [self._update(picks[row], previous) for row in rows]
        lengths = [len(one.ids) for one in used]
        vocab = logits_BV.shape[1]
        flat = np.concatenate([one.ids + row * vocab for row, one in zip(rows, used, strict=True)])
        count = np.concatenate([one.counts for one in used])
        per_row = [picks[row].draw.params for row in rows]
        repetition, frequency, presence = (
            np.repeat(np.array(values, dtype=np.float32), lengths)
            for values in (
                [params.repetition_penalty for params in per_row],
                [params.frequency_penalty for params in per_row],
                [params.presence_penalty for params in per_row],
            )
        )
        subtract = frequency * count + presence * (count > 0)
        device = logits_BV.device
        index = torch.from_numpy(flat).to(device)
        factor = torch.from_numpy(repetition).to(device)
        logits = logits_BV.view(-1)[index]
        logits = torch.where(logits > 0, logits / factor, logits * factor) - torch.from_numpy(subtract).to(device)
        logits_BV.view(-1)[index] = logits

    def _update(self, pick: Pick, previous: Mapping[int, int]) -> UsedTokens:
        draw = pick.draw
        before = pick.position - len(draw.prompt_token_ids)
        used = self._used.get(draw.seq_id)
        if used is None or used.consumed > before or used.prompt_length != len(draw.prompt_token_ids):
            used = self._used[draw.seq_id] = UsedTokens(draw.prompt_token_ids)
        new = draw.output_token_ids[used.consumed : before]
        if used.consumed + len(new) < before and draw.seq_id in previous:
            new = [*new, previous[draw.seq_id]]
        used.extend(new)
        used.last_step = self._step
        return used
