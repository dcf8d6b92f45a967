"""The training loop: batch, forward, loss, backward, clip, optimizer, metrics, and checkpoints that lose nothing.

One step, in the order it happens (``Trainer.step``):

1. The objective makes the micro-batches. How many labels they hold together is known on the host, so each
   micro-batch's mean loss is weighted by its share, and the gradient is that of the mean over all labels of the step.
2. Forward and backward for each: the model of ``models/``, packed documents, the objective's loss.
3. The global norm of the gradient; anything that is not finite stops the run. A loss far above the last ones does what
   ``on_spike`` says, once a calm batch has shown whether the model or the batch is at fault.
4. Clip, set the learning rate, step the optimizer. On a GPU this is on its way while the host still waits for the loss:
   the kernel changes nothing if loss or norm are not finite.

Everything that decides the next step is in ``Trainer.snapshot``: weights, optimizer state, the position in the data,
the step, the last losses. There is no random state: the order of the data and the masks of dropout are functions of the
seed and the step.
"""

from __future__ import annotations

import datetime
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ...checkpoints.adapter_peft import read_adapter
from ...checkpoints.load import stored_weights
from ...checkpoints.peft_config import is_adapter
from ...checkpoints.resolve import resolve
from ...costs.training import TrainingFlops
from ...models.weights.adapted_product import calling_thread_alone
from ...parallel.world import World
from ..adapters.lora import take_adapter
from ..config import TrainConfig
from ..data.batches import Batch
from ..data.identity import base_identity, check_settings, compare
from ..data.loader import Position
from ..model.build import Trainable, build, device_of, source_of
from ..model.layer_drop import dropping
from ..model.merging import can_merge, stack_of
from ..objectives import build as build_objective
from ..objectives.base import Objective, StepFailed
from ..optim import build as build_optimizer
from .best import Best
from .checkpoint import Checkpoint, Snapshot, Writer, list_steps
from .crew import Crew
from .health import LossWatch, TrainingStopped, first_bad_number, first_bad_tensor
from .memory import check_length, fit, least_free
from .samples import SampleRecord, Samples
from .schedule import factor
from .stored_state import Below

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The result of one step. ``loss`` in nats per label, before the update; ``seconds`` of wall time."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    labels: int
    seconds: float
    peak_bytes: int
    """Peak memory of the GPU's allocator so far; 0 on the CPU."""
    flops: float = 0.0
    """Useful FLOPs of the step (``costs/training.py``); 0 if they were not counted."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the objective, such as margins and rewards."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """Validation loss in nats per label, and in bits per byte of text where the tokenizer is known."""

    step: int
    loss: float
    labels: int
    bits_per_byte: float | None
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the objective, such as a reward."""


class Listener(Protocol):
    """Receives the events of a run."""

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, record: EvalRecord) -> None: ...

    def sample(self, record: SampleRecord) -> None: ...


class _Reading:
    """Numbers on their way from the device to the host. Reading them does not wait for later launches."""

    def __init__(self, values: Tensor) -> None:
        self._event = torch.cuda.Event() if values.is_cuda else None
        self._values = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
        self._values.copy_(values, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def wait(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._values.tolist()
        return found


def _dated(config: TrainConfig, checkpoint: Checkpoint | None, world: World | None) -> TrainConfig:
    """Set the date that chat templates use: the run's own date, as known to the first rank; a resumed run keeps it."""
    kept = {} if checkpoint is None else checkpoint.state["config"]["data"]
    day = config.data.date or kept.get("date") or datetime.date.today().isoformat()
    if world is not None:
        day = world.exchange(day)[0]
    return replace(config, data=replace(config.data, date=day))


class Trainer:
    """Training run that can take steps, evaluate, and be stopped and resumed at any step.

    Args:
        config: the run.
        checkpoint: checkpoint to resume; None to start.
        allow_changed: parts of ``data/identity.py`` that may differ from the checkpoint's.
        world: the ranks that train together, each with a ``Trainer`` of the same run; None for this process alone.

    Raises:
        ValueError: the model, the data or a setting is at fault, the run does not fit in memory, or the checkpoint is
            of another run.
    """

    def __init__(
        self,
        config: TrainConfig,
        checkpoint: Checkpoint | None = None,
        *,
        allow_changed: Collection[str] = (),
        world: World | None = None,
    ) -> None:
        config = self.config = _dated(config, checkpoint, world)
        self.crew = Crew(config, world)
        self.told: list[str] = []
        """Notices for the user, shown before the run starts."""
        for table in config.unused():
            need = 'task = "lora" or "qlora"' if table == "lora" else f'objective = "{table}"'
            self.told.append(f"the settings of [{table}] have no effect on this run: they are for {need}")
        if config.objective == "grpo" and config.accumulate > 1:
            self.told.append("accumulate has no effect on this run: a step has the micro-batches that its answers fill")
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        begun = config
        # The adapter that it started from may be gone, and is needed only to compare with.
        if checkpoint is not None and config.lora.start and not config.compares:
            begun = replace(config, lora=replace(config.lora, start=str(checkpoint.path)))
        if checkpoint is not None:
            check_settings(checkpoint.state.get("config", {}), config.to_dict(), checkpoint.path)
        source = source_of(begun)
        check_length(config, source.config)
        device = device_of(config.device)
        self.memory = fit(begun, source.config, device, least_free(device, world))
        whole = build(begun, self.told.append, lean=self.crew.lean(source.config))
        self.trainable: Trainable = self.crew.strategy.cut(whole)
        self.model, self.device = self.trainable.model, self.trainable.device
        sharded = config.parallel.sharded
        for part in self.crew.strategy.parts(self.model):
            part.stack = stack_of(part, self.memory.checkpointing, config.merged and not sharded, self.memory.whole)
        if config.layer_keep < 1:
            recompute = self.memory.checkpointing != "none"
            self.model.stack = dropping(self.model, config.seed, config.layer_keep, self._place, recompute=recompute)
        # It measures the model as the run began, so what a checkpoint brings comes after it.
        self.objective: Objective = build_objective(config, self.trainable)
        if checkpoint is not None:
            self._load_weights(checkpoint)
        parameters, shapes = self.crew.strategy.take(self.trainable, recompute=self.memory.checkpointing != "none")
        if sharded and config.merged and can_merge(self.model):
            from ..model.merged_layers import MergedLayers

            units = self.crew.strategy.units
            self.model.stack = MergedLayers(self.model, self.memory.checkpointing, self.memory.whole, units)
        self.optimizer = build_optimizer(
            config.optimizer,
            parameters,
            master_weights=config.precision == "mixed" or self.trainable.adapted,
            seed=config.seed,
            shapes=shapes,
            offload=self.crew.offload(),
        )
        self.crew.strategy.connect(self.optimizer, self.trainable)
        if config.precision == "bfloat16" and config.optimizer.rounding == "nearest" and not self.trainable.adapted:
            self.told.append(
                'optimizer.rounding = "nearest" loses every step of less than a 512th of a weight, which at small '
                'learning rates are most: "stochastic" keeps them on average, precision = "mixed" exactly'
            )
        self._flops = TrainingFlops(self.trainable.source.config, frozen=config.freezes)
        self.identity = self.objective.identity()
        """Digests of the run's data and base, kept in every checkpoint."""
        if self.trainable.adapted:
            self.identity["base"] = base_identity(self.trainable.source)
        if config.epochs:
            steps = self.objective.steps_of(config.epochs, config.accumulate)
            self.told.append(f"{config.epochs:g} epochs are {steps} steps")
            config = self.config = replace(config, steps=steps, epochs=0.0)
        self.samples = Samples(config.samples, self.trainable) if config.samples.prompts else None
        self.best = Best()
        self.watch = LossWatch()
        self._calm: tuple[Batch, float] | None = None
        """First micro-batch of the last step without a loss spike, and its loss."""
        self._native = any(getattr(module, "native", None) is not None for module in self.model.modules())
        self.steps_done = 0
        self._written: Callable[[], None] = lambda: None
        """Function that waits for the checkpoint being written."""
        self._taken_up_at = -1 if checkpoint is None else checkpoint.step  # a checkpoint of that step is there
        if checkpoint is not None:
            self._restore(checkpoint, allow_changed)

    def step(self) -> StepRecord:
        """Take one step.

        Raises:
            TrainingStopped: the loss or a gradient is not finite, or the loss has jumped.
        """
        begin = time.perf_counter()
        self.crew.at("its data", self.steps_done + 1)
        before = copy(self.objective.position)
        batches = self._batches(before)
        self.crew.at("its passes")
        labels = sum(batch.num_labels for batch in batches)
        on_device = [batch.to(self.device) for batch in batches]
        losses = torch.zeros(len(batches), device=self.device)
        with calling_thread_alone() if self._native else nullcontext():
            norm = self.crew.strategy.gradients(on_device, self._loss, self.optimizer, losses).to(self.device)
        seen = _Reading(torch.cat([losses, norm[None]]))
        clip = self.config.optimizer.clip
        rate = factor(self.config.schedule, self.steps_done, self.config.steps)
        scale = self.optimizer.clip_scale(norm, clip) if clip else None
        # On its way before the host knows the loss: the device takes no step that is not finite.
        early = self.optimizer.skips and self.config.on_spike != "skip"
        if early:
            finite = 0 * (losses.sum() + norm)
            self.optimizer.step(rate, finite + (1.0 if scale is None else scale))
        self.crew.at("the update")
        values = seen.wait()
        taken = self._check(values[:-1], values[-1], before, on_device, labels)
        if taken and not early:
            self.optimizer.step(rate, scale)
        self.crew.strategy.stepped(self.optimizer)
        self.steps_done += 1
        measured = self.crew.share().means(self.objective.metrics())
        extra = {name: mean for name, (mean, count) in measured.items() if count}
        return StepRecord(
            step=self.steps_done,
            loss=math.fsum(values[:-1]),
            gradient_norm=values[-1],
            learning_rate=self.config.optimizer.learning_rate * rate,
            tokens=sum(batch.num_tokens for batch in batches),
            labels=labels,
            flops=sum(self._flops(batch.lengths, batch.num_labels) for batch in batches if batch.num_labels),
            seconds=time.perf_counter() - begin,
            extra=extra if taken else {**extra, "skipped": 1.0},
            peak_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0,
        )

    def _batches(self, before: Position) -> Sequence[Batch]:
        """Return the micro-batches of the next step; either all ranks get theirs, or all return to ``before``."""
        objective = self.objective
        if not objective.outside:
            return objective.batches(self.steps_done)
        undo = partial(setattr, objective, "position", before)
        return self.crew.made(partial(objective.batches, self.steps_done), undo)

    def _place(self) -> tuple[int, int]:
        """Return the current step, from 0, and the steps of the run."""
        return self.steps_done, self.config.steps

    def _loss(self, index: int, batch: Batch) -> Tensor:
        """Compute the mean loss of micro-batch ``index`` of the current step."""
        self.trainable.moment.step, self.trainable.moment.part = self.steps_done, index
        return self.objective.loss(batch)

    def evaluate(self) -> EvalRecord | None:
        """Compute the validation loss; None without validation data. All ranks call it."""
        found = self.objective.evaluate(self.crew.share())
        if found is None:
            return None
        bits = found.loss * found.labels / math.log(2) / found.bytes if found.bytes else None
        return EvalRecord(self.steps_done, found.loss, found.labels, bits, found.extra)

    def run(self, listeners: Sequence[Listener] = (), should_stop: Callable[[], bool] = lambda: False) -> Path:
        """Train to the end, or until ``should_stop`` is true after a step; a checkpoint is written in both cases.

        Returns:
            The directory of the last checkpoint.

        Raises:
            TrainingStopped: see ``step``; nothing is written of the failed step.
            StepFailed: a step could not begin; a checkpoint of the steps before it is written.
            ValueError: a checkpoint could not be written.
        """
        config = self.config
        with Writer(config.run_dir, config.keep, self.crew.rank) as writer, self.crew.watching():
            self._written = writer.wait
            saved = self._taken_up_at
            if saved >= 0:
                writer.point(self.best.step)
            # A checkpoint that could not be written ends the loop; the writer raises when the next is saved.
            while not self.finished and not self.crew.any(should_stop() or writer.failed):
                try:
                    record = self.step()
                except StepFailed as failure:
                    if self.steps_done and saved != self.steps_done:
                        writer.save(self.snapshot())
                    raise StepFailed(f"step {self.steps_done + 1}: {failure}; {self._whole()}") from failure
                for listener in listeners:
                    listener.step(record)
                last = self.steps_done >= config.steps
                better = self._due(config.eval_every, last) and self._evaluated(listeners)
                if self.samples is not None and self.crew.leads and self._due(config.samples.every, last):
                    self._sampled(self.samples, listeners)
                if better or self._due(config.save_every, False):
                    writer.save(self.snapshot())
                    saved = self.steps_done
            if saved != self.steps_done:
                writer.save(self.snapshot())
        return Path(config.run_dir) / f"step-{self.steps_done:08}"

    @property
    def stopped_early(self) -> bool:
        """True if ``patience`` has run out."""
        return bool(self.config.patience) and self.best.since >= self.config.patience

    @property
    def finished(self) -> bool:
        """True if there is no further step."""
        return self.steps_done >= self.config.steps or self.stopped_early

    def snapshot(self) -> Snapshot:
        """Copy the present state of the run to the CPU; with several ranks, which must all call it, this rank's
        part."""
        self.crew.at("a checkpoint", alone=True)
        self.optimizer.settle()
        write = self.crew.strategy.snapshot(self.trainable)
        tensors = {f"optimizer/{name}": tensor for name, tensor in self.crew.strategy.state(self.optimizer).items()}
        if self.crew.leads:
            tensors |= {f"objective/{k}": t for k, t in self.objective.state().items()}
        state = {
            "config": self.config.to_dict(),
            "position": asdict(self.objective.position),
            "identity": self.identity,
            "optimizer_steps": self.optimizer.steps,
            "losses": list(self.watch.losses),
            "best": self.best.state(),
        }
        rank, ranks = self.crew.rank, self.crew.strategy.writers
        return Snapshot(self.steps_done, write, tensors, state, self.best.step, rank, ranks, self.optimizer.taken)

    @torch.no_grad()
    def _load_weights(self, checkpoint: Checkpoint) -> None:
        if self.trainable.take(checkpoint.path):
            return
        if self.trainable.adapted and is_adapter(checkpoint.path):
            take_adapter(self.model, read_adapter(checkpoint.path, self.trainable.source.config))
        elif self.trainable.adapted:  # of an earlier version: the model's files hold merged weights
            for name, parameter in self.trainable.parameters.items():
                if f"weight/{name}" not in checkpoint.tensors:
                    raise ValueError(f"{checkpoint.path} has no weights for {name}: it is of another run")
                parameter.copy_(checkpoint.tensors[f"weight/{name}"])
        else:
            self.crew.strategy.fill(self.model, lambda: stored_weights(resolve(str(checkpoint.path))))

    def _restore(self, checkpoint: Checkpoint, allow_changed: Collection[str]) -> None:
        state = checkpoint.state
        if "identity" not in state:
            log.warning("%s does not say what data and base it is of, so these are not compared", checkpoint.path)
        compare(state.get("identity", {}), self.identity, allow_changed, checkpoint.path)
        own = self.crew.strategy.own_state(Below("optimizer/", checkpoint.tensors))
        self.optimizer.load_state_tensors(own, state["optimizer_steps"])
        self.objective.load_state(Below("objective/", checkpoint.tensors))
        self.objective.position = Position(**state["position"])
        self.watch = LossWatch(state["losses"])
        self.best = Best.from_state(state.get("best", {}))
        self.steps_done = checkpoint.step

    def _check(self, losses: list[float], norm: float, position: Position, batches: list[Batch], labels: int) -> bool:
        """Return True if the optimizer step should be taken.

        Raises:
            TrainingStopped: a number is not finite, or the model has gone wrong and ``on_spike`` says to stop.
        """
        loss = math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan
        step = self.steps_done + 1
        if not (math.isfinite(loss) and math.isfinite(norm)):
            index, name = self._first_bad(losses, batches)
            raise TrainingStopped(
                f"loss {losses[index]} and gradient norm {norm} at step {step} (epoch {position.epoch}, micro-batch "
                f"{position.index + index}); the first tensor that is not finite is {name}: lower the learning rate or "
                f"look at that batch; {self._whole()}"
            )
        if not self.watch.stands_out(loss):
            if batches[0].num_labels:
                self._calm = batches[0], losses[0] * labels / batches[0].num_labels
            return True
        where = f"step {step} (epoch {position.epoch}, micro-batches {position.index} to "
        where += f"{position.index + len(batches) - 1}): loss {loss:.3f}, others {self.watch.usual:.3f}"
        if not self._model_has_jumped():
            log.warning("%s. The batch is unusual, the model is well%s", where, self._consequence("unusual"))
            return self.config.on_spike != "skip"
        if self.config.on_spike == "stop":
            raise TrainingStopped(
                f"the loss jumped at {where}, and a batch of a moment ago jumped with it, so the model has gone wrong: "
                f'lower the learning rate, or continue with --resume --set on_spike="skip"; {self._whole()}'
            )
        log.warning("%s. The model has gone wrong%s", where, self._consequence("wrong"))
        self.watch.losses.append(loss)  # this is its level now
        return self.config.on_spike != "skip"

    def _consequence(self, what: str) -> str:
        if self.config.on_spike == "skip":
            return "; this update is skipped"
        return "" if what == "unusual" else '; lower the learning rate, or set on_spike to "skip" or "stop"'

    @torch.no_grad()
    def _model_has_jumped(self) -> bool:
        """Return True if a batch with a normal loss a step ago now has a much higher loss."""
        if self._calm is None:
            return True
        batch, before = self._calm
        return self.watch.has_jumped(before, float(self.objective.loss(batch)))

    def _whole(self) -> str:
        """Name the checkpoint to resume from, as a clause; wait for one that is being written."""
        self.crew.at("a checkpoint", alone=True)
        try:
            self._written()
        except ValueError as error:  # the caller reports something worse
            log.warning("%s", error)
        steps = list_steps(self.config.run_dir)
        return f"{steps[-1]} is whole and from before this step" if steps else "no checkpoint was written yet"

    def _first_bad(self, losses: list[float], batches: list[Batch]) -> tuple[int, str]:
        """Find the micro-batch whose loss, or else whose gradient, is not finite, and its first such tensor."""
        bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
        if self.crew.strategy.together:
            mine = self.optimizer
            found = first_bad_number(mine.numbers, mine.parameters, mine.gradients())
            return bad[0] if bad else 0, self.crew.first(found)
        for index in bad or range(len(batches)):
            if not bad:
                self.optimizer.zero_grad()
                self.objective.loss(batches[index]).backward()  # type: ignore[no-untyped-call]
                if math.isfinite(float(self.optimizer.gradient_norm())) and index + 1 < len(batches):
                    continue
            loss_of = partial(self.objective.loss, batches[index])
            return index, first_bad_tensor(self.model, loss_of, self.optimizer.gradients())
        raise AssertionError("a step has a micro-batch")

    def _due(self, every: int, last: bool) -> bool:
        """Return True if an action of period ``every`` is due after this step; it is always due after the last one."""
        return last or bool(every and self.steps_done % every == 0)

    def _evaluated(self, listeners: Sequence[Listener]) -> bool:
        """Evaluate, and return True if the result is the best so far."""
        self.crew.at("the evaluation", alone=True)
        record = self.evaluate()
        if record is None:
            return False
        for listener in listeners:
            listener.evaluation(record)
        return self.best.see(record.loss, record.step, self.config.min_gain)

    def _sampled(self, samples: Samples, listeners: Sequence[Listener]) -> None:
        self.crew.at("samples", alone=True)
        for record in samples.draw(self.steps_done):
            for listener in listeners:
                listener.sample(record)
