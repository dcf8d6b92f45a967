"""The answers of one rollout with all data that optimizer steps need, and their micro-batches.

A rollout may serve several optimizer steps. A checkpoint between two of them holds it as tensors, because the weights
that drew it are gone by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from ..data.batches import IGNORE, Batch
from .logprobs import KeptTokens


@dataclass(frozen=True, slots=True)
class AnswerBatch(Batch):
    """Prompts with their answers. Float32 for each token that predicts one of the answer's, 0 elsewhere:

    ``old_T`` its log-probability when it was drawn, ``advantage_T`` its answer's advantage, ``weight_T`` what its loss
    counts, ``reference_T`` its log-probability under the reference (empty without one). ``kept``: what could be drawn.
    """

    old_T: Tensor
    advantage_T: Tensor
    weight_T: Tensor
    reference_T: Tensor
    kept: KeptTokens | None

    def to(self, device: torch.device) -> AnswerBatch:
        moved = Batch.to(self, device)
        return AnswerBatch(
            moved.tokens_T, moved.labels_T, moved.positions_T, moved.cu_seqlens, self.num_labels, self.longest,
            self.old_T.to(device), self.advantage_T.to(device), self.weight_T.to(device), self.reference_T.to(device),
            None if self.kept is None else self.kept.to(device),
        )  # fmt: skip


@dataclass(slots=True)
class Rollout:
    """The A answers, of N tokens together, one after another; on the CPU.

    ``begun`` (one number): the optimizer step that drew them. ``prompt_A``: each one's prompt. ``length_A``: how many
    tokens. ``advantage_A`` float64. ``truncated_A``: it was cut off at the longest length. ``old_N``: log-probabilities
    of ``tokens_N`` when they were drawn; ``reference_N``: those under the reference, empty without one. ``kept_N`` and
    ``kept_ids``: how many tokens could be drawn at each place, and which; empty where all could.
    """

    begun: Tensor
    prompt_A: Tensor
    length_A: Tensor
    advantage_A: Tensor
    truncated_A: Tensor
    tokens_N: Tensor
    old_N: Tensor
    reference_N: Tensor
    kept_N: Tensor
    kept_ids: Tensor

    def state(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return {item.name: getattr(self, item.name).clone() for item in fields(self)}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> Rollout:
        """Rebuild the rollout from ``state``. ValueError if something is missing."""
        names = [item.name for item in fields(cls)]
        if missing := [name for name in names if name not in tensors]:
            raise ValueError(f"the checkpoint's rollout has no {', '.join(missing)}: it is of another run")
        return cls(**{name: tensors[name] for name in names})

    def __len__(self) -> int:
        return len(self.length_A)

    def sizes(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the tokens of each answer including its prompt."""
        return np.array([len(prompts[i]) for i in self.prompt_A.tolist()]) + self.length_A.numpy()

    def pack(
        self, chosen: Sequence[int], prompts: Sequence[Sequence[int]], weight_A: Mapping[int, float] | None = None
    ) -> AnswerBatch:
        """Build a micro-batch of the chosen answers after their prompts.

        Args:
            weight_A: weight of each token of an answer, by answer; None for no weights.
        """
        sizes = self.sizes(prompts)[list(chosen)]
        total = int(sizes.sum())
        tokens = torch.empty(total, dtype=torch.int64)
        labels = torch.full((total,), IGNORE)
        positions = torch.empty(total, dtype=torch.int64)
        old, advantage, weight = (torch.zeros(total) for _ in range(3))
        reference = torch.zeros(total if len(self.reference_N) else 0)
        counts = torch.zeros(total, dtype=torch.int64)
        ids = []
        ends = self.length_A.cumsum(0).tolist()
        kept_ends = [0, *self.kept_N.cumsum(0).tolist()]
        at = 0
        for answer, size in zip(chosen, sizes.tolist(), strict=True):
            prompt, length = prompts[int(self.prompt_A[answer])], int(self.length_A[answer])
            own = slice(ends[answer] - length, ends[answer])
            predicts = slice(at + len(prompt) - 1, at + size - 1)
            tokens[at : at + len(prompt)] = torch.tensor(prompt)
            tokens[at + len(prompt) : at + size] = self.tokens_N[own]
            positions[at : at + size] = torch.arange(size)
            labels[predicts] = self.tokens_N[own]
            old[predicts] = self.old_N[own]
            advantage[predicts] = float(self.advantage_A[answer])
            weight[predicts] = 0.0 if weight_A is None else weight_A[answer]
            if len(reference):
                reference[predicts] = self.reference_N[own]
            if len(self.kept_N):
                counts[predicts] = self.kept_N[own].long()
                ids.append(self.kept_ids[kept_ends[own.start] : kept_ends[own.stop]].long())
            at += size
        bounds = np.concatenate([[0], sizes.cumsum()])
        kept = None
        if ids:
            kept = KeptTokens(torch.cat(ids), torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
        return AnswerBatch(
            tokens, labels, positions, torch.from_numpy(bounds.astype(np.int32)), int((labels != IGNORE).sum()),
            int(sizes.max()), old, advantage, weight, reference, kept,
        )  # fmt: skip


def advantages(rewards_AG: np.ndarray, scale: str) -> np.ndarray:
    """Compute the advantage of each answer over its group, ``[prompts, group]`` float64.

    Args:
        rewards_AG: NaN for an answer that no function judged; its advantage is 0.
        scale: divide by the standard deviation (with n - 1) plus 1e-4 of the ``group``, of the ``batch``, or ``none``.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        judged = ~np.isnan(rewards_AG)
        mean = np.nansum(rewards_AG, axis=1, keepdims=True) / judged.sum(1, keepdims=True)
        found = rewards_AG - mean
        if scale != "none":
            axis = 1 if scale == "group" else None
            centre = mean if scale == "group" else np.nansum(rewards_AG) / judged.sum()
            squares = np.nansum((rewards_AG - centre) ** 2, axis=axis, keepdims=True)
            found = found / (np.sqrt(squares / (judged.sum(axis, keepdims=True) - 1)) + 1e-4)
    return np.nan_to_num(found, nan=0.0, posinf=0.0, neginf=0.0)


def token_weights(
    loss: str, groups: Sequence[Sequence[int]], length_A: np.ndarray, *, answers: int, tokens: float, max_tokens: int
) -> dict[int, float]:
    """Compute the weight of each token of an answer in the loss of a step, by answer.

    Args:
        loss: ``dapo``, ``grpo``, ``dr_grpo`` or ``bnpo``.
        groups: the answers of each micro-batch.
        length_A: tokens of every answer.
        answers: number of answers in the step, including masked ones.
        tokens: trained tokens of a step of the rollout, on average.
        max_tokens: of an answer.
    """
    weights = {}
    for group in groups:
        own = sum(int(length_A[answer]) for answer in group)
        for answer in group:
            divisor = {
                "dapo": tokens,
                "grpo": answers * int(length_A[answer]),
                "dr_grpo": answers * max_tokens,
                "bnpo": len(groups) * own,
            }[loss]
            weights[answer] = 1 / divisor
    return weights
