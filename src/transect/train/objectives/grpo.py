r"""Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300), without a reference model or a critic.

For each prompt the engine draws a group of answers with the model as it is now. An answer's advantage is its reward
measured against its group:

    A_i = (r_i - mean(r)) / (std(r) + 1e-4)

and each of its tokens t, drawn with log-probability o_t, has the loss

    ratio = exp(log p(t) - o_t)        loss = -min(ratio A_i, clip(ratio, 1 - c, 1 + c) A_i)

averaged over all tokens of the step. Each batch of answers is used for one optimizer step, so the ratio is 1 up to the
rounding between the engine's arithmetic and the trainer's; ``ratio`` in the log shows how far that is, and the clip
only guards. A group whose rewards are all alike teaches nothing and adds nothing. Both log-probabilities are of the
model itself, before temperature.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...engine.sampling_params import SamplingParams
from ..batches import IGNORE, Batch, best_fit
from ..config import TrainConfig
from ..data import Position
from ..logprobs import batch_logprobs
from ..model import Trainable
from ..rewards import Judge, read_prompts
from ..rollout import Answer, roll_out
from .base import Evaluation, Objective


@dataclass(frozen=True, slots=True)
class AnswerBatch(Batch):
    """Prompts with their answers. For each token that predicts one of the answer's: ``old_T`` its log-probability when
    it was drawn, ``advantage_T`` its answer's advantage; 0 elsewhere. Both float32."""

    old_T: Tensor
    advantage_T: Tensor

    def to(self, device: torch.device) -> AnswerBatch:
        moved = Batch.to(self, device)
        return AnswerBatch(
            moved.tokens_T, moved.labels_T, moved.positions_T, moved.cu_seqlens, self.num_labels, self.longest,
            self.old_T.to(device), self.advantage_T.to(device),
        )  # fmt: skip


class GRPO(Objective):
    """See ``Objective``."""

    def __init__(self, config: TrainConfig, trainable: Trainable) -> None:
        if trainable.tokenizer is None or trainable.template is None:
            raise ValueError('objective = "grpo" needs a model with a tokenizer and a chat template')
        self._config, self._trainable = config, trainable
        self._tokenizer = trainable.tokenizer
        self.position = Position()
        self._records = read_prompts(config.data.train)
        self._prompts = []
        for record in self._records:
            prompt = record["prompt"]
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            self._prompts.append(self._tokenizer.encode(trainable.template.render(messages), parse_special=True))
        room = config.data.seq_len - config.grpo.max_tokens
        if max(map(len, self._prompts)) > room:
            raise ValueError(
                f"a prompt has {max(map(len, self._prompts))} tokens; data.seq_len leaves room for {room} beside an "
                "answer: raise it or lower grpo.max_tokens"
            )
        self._judge_answer = Judge(config.grpo.reward, config.grpo.reward_weights)
        self._seen: list[tuple[Tensor, int]] = []
        self._summary: dict[str, float] = {}

    def described(self) -> Sequence[str]:
        return [f"{len(self._prompts)} prompts from {', '.join(self._config.data.train)}"]

    def batches(self, step: int) -> Sequence[Batch]:
        settings, model = self._config.grpo, self._trainable.model
        chosen = self._choose(settings.prompts)
        params = SamplingParams(n=settings.group, temperature=settings.temperature, max_tokens=settings.max_tokens)
        answers = roll_out(
            model,
            [self._prompts[i] for i in chosen],
            params,
            eos_token_ids=self._tokenizer.eos_token_ids,
            seed=self._config.seed * 100_003 + step,
        )
        rewards = np.array([self._judge(answer, chosen) for answer in answers]).reshape(len(chosen), settings.group)
        deviation = rewards - rewards.mean(1, keepdims=True)
        advantages = (deviation / (rewards.std(1, keepdims=True) + 1e-4)).ravel()
        lengths = [len(answer.token_ids) for answer in answers]
        self._summary = {"reward": float(rewards.mean()), "answer_tokens": float(np.mean(lengths))}
        self._seen = []
        sizes = np.array([len(self._prompts[chosen[a.prompt]]) + len(a.token_ids) for a in answers])
        groups = best_fit(np.arange(len(answers)), sizes, self._config.data.micro_batch)
        return [self._pack([answers[i] for i in group], advantages[group], chosen) for group in groups]

    def loss(self, batch: Batch) -> Tensor:
        assert isinstance(batch, AnswerBatch)
        clip = self._config.grpo.clip
        used = batch.labels_T != IGNORE
        new = batch_logprobs(self._trainable.model, batch)[used]
        ratio = torch.exp(new - batch.old_T[used])
        advantage = batch.advantage_T[used]
        objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        self._seen.append(((ratio.detach() - 1).abs().max(), batch.num_labels))
        return -objective.mean()

    def metrics(self) -> Mapping[str, float]:
        furthest = max(float(distance) for distance, _ in self._seen)
        return {**self._summary, "ratio": 1 + furthest}

    def evaluate(self) -> Evaluation | None:
        return None

    def identity(self) -> dict[str, str]:
        records = json.dumps([self._records, self._prompts], sort_keys=True, ensure_ascii=False, default=str)
        return {"data": hashlib.sha256(records.encode()).hexdigest(), "sizes": str(self._config.seed)}

    def _choose(self, count: int) -> list[int]:
        """Take the next prompts, in the shuffled order of their epoch."""
        chosen: list[int] = []
        while len(chosen) < count:
            generator = np.random.Generator(np.random.Philox(key=[self._config.seed, self.position.epoch]))
            order = generator.permutation(len(self._prompts))
            taken = order[self.position.index : self.position.index + count - len(chosen)].tolist()
            chosen += taken
            index = self.position.index + len(taken)
            whole = index >= len(order)
            self.position = Position(self.position.epoch + whole, 0 if whole else index)
        return chosen

    def _judge(self, answer: Answer, chosen: list[int]) -> float:
        text = self._tokenizer.decode(answer.token_ids)
        rewards = np.array([self._judge_answer(text, self._records[chosen[answer.prompt]])])
        return float(self._judge_answer.total(rewards)[0])

    def _pack(self, answers: Sequence[Answer], advantages: np.ndarray, chosen: list[int]) -> AnswerBatch:
        tokens: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        bounds, old, advantage = [0], [], []
        for answer, value in zip(answers, advantages, strict=True):
            prompt = self._prompts[chosen[answer.prompt]]
            whole = [*prompt, *answer.token_ids]
            tokens += whole
            positions += range(len(whole))
            labels += [IGNORE] * (len(prompt) - 1) + list(answer.token_ids) + [IGNORE]
            old += [0.0] * (len(prompt) - 1) + list(answer.logprobs) + [0.0]
            advantage += [0.0] * (len(prompt) - 1) + [float(value)] * len(answer.token_ids) + [0.0]
            bounds.append(len(tokens))
        return AnswerBatch(
            torch.tensor(tokens),
            torch.tensor(labels),
            torch.tensor(positions),
            torch.tensor(bounds, dtype=torch.int32),
            sum(label != IGNORE for label in labels),
            int(np.diff(bounds).max()),
            torch.tensor(old),
            torch.tensor(advantage),
        )
