r"""Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300), without a critic.

For each prompt the engine draws a group of answers with the model as it is now. An answer's advantage is its reward
measured against its group:

    A_i = (r_i - mean(r)) / (std(r) + 1e-4)

and each of its tokens t, drawn with log-probability o_t, has the loss

    ratio = exp(log p(t) - o_t)        k = exp(log p0(t) - log p(t)) - (log p0(t) - log p(t)) - 1
    l_t = -min(ratio A_i, clip(ratio, 1 - clip, 1 + clip_high) A_i) + beta ratio k

with p0 the model as it was when the run began (``reference.py``). The ratio before k makes the estimate of the KL
divergence unbiased when the weights have moved since the answers were drawn (DeepSeek-AI 2025, arXiv:2512.02556;
``unbiased_kl = false`` leaves it out). ``loss`` chooses the divisor of the sum of the l_t (``answers.token_weights``):
Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), DAPO (Yu et al. 2025, arXiv:2503.14476) and BNPO as TRL has them.

The answers of a rollout are used for ``iterations * minibatches`` optimizer steps. In the first the ratio is 1 up to
the rounding between the engine's arithmetic and the trainer's; ``ratio`` in the log shows how far from 1 it went. All
log-probabilities are of the distribution that drew the answers: temperature and cuts included (``drawn.py``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...engine.scheduling.sampling_params import SamplingParams
from ...text.inert import chat_tokens
from ..config import TrainConfig
from ..data.batches import IGNORE, Batch, best_fit
from ..data.identity import base_identity
from ..data.loader import Position
from ..data.messages import Messages
from ..data.tokens import check_ids
from ..model.build import Trainable
from .adapter_engine import AdapterEngine, draws_by_adapter
from .answers import AnswerBatch, Rollout, advantages, token_weights
from .base import Evaluation, Objective
from .drawn import Cut, kept_tokens
from .logprobs import batch_hidden, token_logprobs
from .reference import Reference
from .rewards import Judge, read_prompts
from .rollout import SampledAnswer, roll_out
from .share import WHOLE, RolloutShare, Sums

log = logging.getLogger(__name__)


class GRPO(Objective):
    """See ``Objective``. Making it copies the reference, so the model must still have its first weights then."""

    def __init__(self, config: TrainConfig, trainable: Trainable) -> None:
        if trainable.tokenizer is None or trainable.template is None:
            raise ValueError('objective = "grpo" needs a model with a tokenizer and a chat template')
        self._config, self._trainable = config, trainable
        self._tokenizer = trainable.tokenizer
        self.position = Position()
        settings = config.grpo
        self._judge = Judge(settings.reward, settings.reward_weights)
        self._left_out: list[str] = []
        self._records, self._prompts = self._read(config.data.train, "data.train")
        self._held_out = self._read(config.data.validation, "data.validation") if config.data.validation else None
        self._cut = Cut(settings.top_k, settings.top_p, settings.min_p)
        self._reference = Reference(trainable) if settings.beta else None
        by_adapter = draws_by_adapter(config, trainable.device)
        self.engine = AdapterEngine(config, trainable) if by_adapter else None
        """Engine over the base that draws answers; None if the weights in training do."""
        self._rollout: Rollout | None = None
        self._next = 0
        self._summary: dict[str, float] = {}
        self._seen: list[tuple[Tensor, int]] = []

    def described(self) -> Sequence[str]:
        files = ", ".join(self._config.data.train)
        lines = [f"{len(self._prompts)} prompts from {files}; rewards: {', '.join(self._judge.names)}"]
        lines += self._left_out
        if self._reference is not None:
            lines.append(f"the reference is a copy of what is trained: {self._reference.nbytes / 2**20:.1f} MiB")
        if self.engine is not None:
            lines.append(f"answers come from an engine that takes the LoRA as an adapter: {self.engine.built.kernels}")
        return lines

    def batches(self, step: int) -> Sequence[Batch]:
        settings = self._config.grpo
        rollout = self._rollout
        if rollout is None or step - int(rollout.begun) >= settings.steps_a_rollout:
            before = copy(self.position)
            try:
                rollout = self._draw(step)
            except BaseException:
                self.position = before
                raise
            self._rollout = rollout
        self._next = step + 1
        self._seen = []
        part = (step - int(rollout.begun)) % settings.minibatches
        order = np.arange(len(rollout))
        if settings.minibatches > 1:
            key = [self._config.seed, int(rollout.begun)]
            order = np.random.Generator(np.random.Philox(key=key)).permutation(order)
        return self._micro_batches(rollout, np.array_split(order, settings.minibatches)[part])

    def steps_of(self, epochs: float, accumulate: int) -> int:
        settings = self._config.grpo
        return max(1, math.ceil(epochs * len(self._prompts) / settings.prompts)) * settings.steps_a_rollout

    def loss(self, batch: Batch) -> Tensor:
        assert isinstance(batch, AnswerBatch)
        settings = self._config.grpo
        model = self._trainable.model
        used = batch.labels_T != IGNORE
        hidden_TD, head_VD = batch_hidden(model, batch), model.head.dense()
        new = token_logprobs(
            hidden_TD, head_VD, batch.labels_T, temperature=settings.temperature, kept=batch.kept
        )[used]  # fmt: skip
        advantage, weight = batch.advantage_T[used], batch.weight_T[used]
        ratio = torch.exp(new - batch.old_T[used])
        within = ratio.clamp(1 - settings.clip, 1 + (settings.clip_high or settings.clip))
        losses = -torch.minimum(ratio * advantage, within * advantage)
        divergence = torch.zeros_like(losses)
        if len(batch.reference_T):
            further = batch.reference_T[used] - new
            divergence = further.exp() - further - 1
            losses = losses + settings.beta * (divergence * ratio if settings.unbiased_kl else divergence)
        clipped = (ratio * advantage > within * advantage).float()
        furthest = (ratio.detach() - 1).abs().max()
        seen = torch.stack([furthest, clipped.mean(), divergence.detach().mean()])
        if torch.is_grad_enabled():
            self._seen.append((seen, batch.num_labels))
        return (losses * weight).sum()

    def metrics(self) -> Sums:
        found = dict(self._summary)
        if self._seen:
            values = torch.stack([seen for seen, _ in self._seen]).double().cpu().numpy()
            share = np.array([labels for _, labels in self._seen]) / sum(labels for _, labels in self._seen)
            found["ratio"] = 1 + float(values[:, 0].max())
            found["clipped"] = float(share @ values[:, 1])
            if self._reference is not None:
                found["kl"] = float(share @ values[:, 2])
        return {name: (value, 1) for name, value in found.items()}  # of one rank, which has drawn all

    def evaluate(self, share: RolloutShare = WHOLE) -> Evaluation | None:
        """Draw greedy answers to the held-out prompts; the loss is minus their mean reward. One rank draws them all."""
        if self._held_out is None:
            return None
        records, prompts = self._held_out
        params = SamplingParams(temperature=0.0, max_tokens=self._config.grpo.max_tokens)
        answers = self._answers(prompts, params, seed=0)
        total = self._judge.total(self._rewards(answers, records))
        reward = 0.0 if np.isnan(total).all() else float(np.nanmean(total))
        tokens = float(np.mean([len(answer.token_ids) for answer in answers]))
        return Evaluation(-reward, len(answers), extra={"reward": reward, "answer_tokens": tokens})

    def identity(self) -> dict[str, str]:
        found = {"data": self._data(), "sizes": str(self._config.seed)}
        if self._reference is not None:
            found["base"] = base_identity(self._trainable.source)
        return found

    def state(self) -> Mapping[str, Tensor]:
        rollout = self._rollout
        if rollout is None or self._next - int(rollout.begun) >= self._config.grpo.steps_a_rollout:
            return {}
        summary = {f"summary/{k}": torch.tensor(v, dtype=torch.float64) for k, v in self._summary.items()}
        return {**rollout.state(), **summary, "drawn": self._drawn()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        drawn = self._drawn()
        if tensors and not torch.equal(tensors.get("drawn", drawn), drawn):  # earlier checkpoints do not say
            log.warning(
                "the answers in the checkpoint were drawn from other prompts or with other settings (temperature, "
                "cuts, minibatches, seed, a reference): they are dropped, and the next step draws new ones"
            )
        elif tensors:
            self._rollout = Rollout.from_state(tensors)
            self._summary = {
                name.removeprefix("summary/"): float(value)
                for name, value in tensors.items()
                if name.startswith("summary/")
            }

    def _data(self) -> str:
        records = json.dumps([self._records, self._prompts], sort_keys=True, ensure_ascii=False, default=str)
        return hashlib.sha256(records.encode()).hexdigest()

    def _drawn(self) -> Tensor:
        """Compute a digest of all settings and data that the draws of answers depend on."""
        own, seed = self._config.grpo, self._config.seed
        how = (own.temperature, own.top_k, own.top_p, own.min_p, own.minibatches, own.beta > 0, seed)
        found = hashlib.sha256(f"{how} {self._data()}".encode())
        return torch.frombuffer(bytearray(found.digest()), dtype=torch.uint8)

    def _read(self, paths: Sequence[str], setting: str) -> tuple[list[dict[str, Any]], list[list[int]]]:
        """Read the rows of prompts, and tokenize the prompts."""
        template = self._trainable.template
        assert template is not None
        room = self._config.data.seq_len - self._config.grpo.max_tokens

        def encode(messages: Messages, tools: list[Any] | None) -> list[int]:
            variables: dict[str, Any] = {"tools": tools} if tools else {}
            ids = chat_tokens(template, self._tokenizer, messages, **variables)[1]
            if len(ids) > room:
                raise ValueError(
                    f"the prompt has {len(ids)} tokens; data.seq_len leaves room for {room} beside an answer: raise it "
                    "or lower grpo.max_tokens"
                )
            return ids

        skip = self._config.data.on_bad_row == "skip"
        options: dict[str, Any] = {"skip": skip, "columns": self._config.data.columns, "tell": self._left_out.append}
        found = read_prompts(paths, encode, setting=setting, **options)
        records, prompts = [record for record, _ in found], [ids for _, ids in found]
        check_ids(max(map(max, prompts)), self._trainable.source.config.vocab_size, setting)
        if "exact" in self._judge.names and all(record.get("answer") is None for record in records):
            raise ValueError(f'grpo.reward = "exact" compares with a row\'s "answer", and no row of {setting} has one')
        return records, prompts

    # ---- a rollout ---------------------------------------------------------------------------------------------------

    def _draw(self, step: int) -> Rollout:
        settings = self._config.grpo
        chosen = self._choose(settings.prompts)
        params = SamplingParams(
            n=settings.group, temperature=settings.temperature, max_tokens=settings.max_tokens, top_p=settings.top_p,
            top_k=settings.top_k, min_p=settings.min_p,
        )  # fmt: skip
        prompts = [self._prompts[i] for i in chosen]
        answers = self._answers(prompts, params, seed=self._config.seed * 100_003 + step)
        rewards = self._rewards(answers, [self._records[i] for i in chosen])
        total = self._judge.total(rewards).reshape(len(chosen), settings.group)
        self._summarise(rewards, total, answers)
        ends = set(self._tokenizer.eos_token_ids)
        rollout = Rollout(
            begun=torch.tensor(step),
            prompt_A=torch.tensor([chosen[answer.prompt] for answer in answers]),
            length_A=torch.tensor([len(answer.token_ids) for answer in answers]),
            advantage_A=torch.from_numpy(advantages(total, settings.scale_rewards).ravel()),
            truncated_A=torch.tensor([answer.token_ids[-1] not in ends for answer in answers]),
            tokens_N=torch.tensor([token for answer in answers for token in answer.token_ids]),
            old_N=torch.tensor([value for answer in answers for value in answer.logprobs]),
            reference_N=torch.empty(0),
            kept_N=torch.empty(0, dtype=torch.int32),
            kept_ids=torch.empty(0, dtype=torch.int32),
        )
        if settings.truncated or settings.temperature != 1.0:  # the engine's log-probabilities are of the raw logits
            self._score(rollout)
        if self._reference is not None:
            with self._reference.in_place():
                rollout.reference_N = self._logprobs(rollout)
        return rollout

    def _answers(self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int) -> list[SampledAnswer]:
        ends = self._tokenizer.eos_token_ids
        if self.engine is not None:
            return self.engine.draw(prompts, params, eos_token_ids=ends, seed=seed)
        return roll_out(self._trainable.model, prompts, params, eos_token_ids=ends, seed=seed)

    def _rewards(self, answers: Sequence[SampledAnswer], records: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Compute each function's reward for each answer, ``[answers, functions]``."""
        texts = [self._tokenizer.decode(answer.token_ids) for answer in answers]
        return np.array([self._judge(text, records[a.prompt]) for text, a in zip(texts, answers, strict=True)])

    def _summarise(self, rewards: np.ndarray, total: np.ndarray, answers: Sequence[SampledAnswer]) -> None:
        judged = total[~np.isnan(total)]
        self._summary = {
            "reward": float(judged.mean()) if len(judged) else 0.0,
            "alike": float(np.mean([len(np.unique(group[~np.isnan(group)])) < 2 for group in total])),
            "answer_tokens": float(np.mean([len(answer.token_ids) for answer in answers])),
        }
        if len(self._judge.names) > 1:
            for name, column in zip(self._judge.names, rewards.T, strict=True):
                said = column[~np.isnan(column)]
                self._summary[f"reward/{name.rpartition(':')[2]}"] = float(said.mean()) if len(said) else 0.0

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

    # ---- what the optimizer steps need of it -------------------------------------------------------------------------

    def _packed(self, rollout: Rollout) -> list[list[int]]:
        """Pack all answers into as few micro-batches as possible."""
        sizes = rollout.sizes(self._prompts)
        return best_fit(np.arange(len(rollout)), sizes, self._config.data.micro_batch)

    @torch.no_grad()
    def _score(self, rollout: Rollout) -> None:
        """Compute log-probabilities in the distribution that drew the answers, and the tokens that could be drawn."""
        if self._config.grpo.truncated:
            counts: list[Tensor] = [torch.empty(0)] * len(rollout)
            ids: list[Tensor] = list(counts)
            model = self._trainable.model
            for group in self._packed(rollout):
                batch = rollout.pack(group, self._prompts).to(self._trainable.device)
                hidden_TD, head_VD = batch_hidden(model, batch), model.head.dense()
                kept = kept_tokens(hidden_TD, head_VD, batch.labels_T, self._config.grpo.temperature, self._cut)
                count_T = kept.bounds.diff()
                for place, answer in enumerate(group):
                    first, last = batch.cu_seqlens[place : place + 2].tolist()
                    used = batch.labels_T[first:last] != IGNORE
                    counts[answer] = count_T[first:last][used].int().cpu()
                    ids[answer] = kept.ids_N[kept.bounds[first] : kept.bounds[last]].int().cpu()
            rollout.kept_N, rollout.kept_ids = torch.cat(counts), torch.cat(ids)
        rollout.old_N = self._logprobs(rollout)

    @torch.no_grad()
    def _logprobs(self, rollout: Rollout) -> Tensor:
        """Compute the log-probabilities of all tokens under the present weights, ``[N]`` on the CPU."""
        model = self._trainable.model
        found: list[Tensor] = [torch.empty(0)] * len(rollout)
        for group in self._packed(rollout):
            batch = rollout.pack(group, self._prompts).to(self._trainable.device)
            values_T = token_logprobs(
                batch_hidden(model, batch), model.head.dense(), batch.labels_T,
                temperature=self._config.grpo.temperature, kept=batch.kept,
            )  # fmt: skip
            for place, answer in enumerate(group):
                first, last = batch.cu_seqlens[place : place + 2].tolist()
                used = batch.labels_T[first:last] != IGNORE
                found[answer] = values_T[first:last][used].float().cpu()
        return torch.cat(found)

    def _micro_batches(self, rollout: Rollout, order: np.ndarray) -> list[Batch]:
        """Build the micro-batches of one optimizer step over the answers ``order``."""
        settings = self._config.grpo
        lengths = rollout.length_A.numpy()
        masked = rollout.truncated_A.numpy() & settings.mask_truncated
        usable = order[~masked[order]]
        if not len(usable):  # nothing to learn from: a step without labels changes nothing
            batch = rollout.pack([int(order[0])], self._prompts)
            batch.labels_T.fill_(IGNORE)
            return [replace(batch, num_labels=0)]
        groups = best_fit(usable, rollout.sizes(self._prompts), self._config.data.micro_batch)
        tokens = max(1.0, float(lengths[~masked].sum()) / settings.minibatches)
        weights = token_weights(
            settings.loss, groups, lengths, answers=len(order), tokens=tokens, max_tokens=settings.max_tokens
        )
        made = []
        labels = int(lengths[usable].sum())
        for group in groups:
            # The trainer weighs a micro-batch by its share of the labels; here the weights have said it all.
            share = sum(int(lengths[answer]) for answer in group) / labels
            made.append(rollout.pack(group, self._prompts, {answer: weights[answer] / share for answer in group}))
        return list(made)
