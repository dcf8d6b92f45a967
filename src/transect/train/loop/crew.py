"""The ranks that train together: who computes what of a step, and how one gradient comes of it.

``Crew`` is what the loop knows of other ranks. Alone it sums micro-batches, and is all there is. With others every
rank runs the same ``Trainer`` over the same data, computes its share of each step's micro-batches, and takes the same
step; what is written and shown is the first rank's business. What each rank has of the model, and how gradients are
summed, is the business of ``parallel/parallelize.py``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from ...checkpoints.load import fill
from ...models.decoder import Decoder
from ...models.stored import StoredWeights
from ...parallel.mesh import Mesh
from ...parallel.parallelize import Parallel, ParallelPlan, parallelize
from ...parallel.pipeline import Pipeline
from ...parallel.pulse import Pulse, default_store
from ...parallel.replicas import Replicas
from ...parallel.sharded import Sharded
from ...parallel.world import Failure, SharedValueError, World
from ...spec.layouts.ranks import RankPlace, check_shares
from ...spec.layouts.refusals import RunSettings, refusal
from ...spec.layouts.spread import Spread
from ...spec.model import ModelConfig
from ..config import TrainConfig
from ..config.parallel import ParallelConfig
from ..data.batches import Batch
from ..model.build import Trainable
from ..objectives.base import StepFailed
from ..objectives.loss import TokenLoss, piece, token_loss
from ..objectives.share import Share, Sums
from ..optim import Offload, OneBitAdam, Optimizer

Made = TypeVar("Made")
REDUCE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Crew:
    """Ranks of a run, as seen from one of them.

    Args:
        config: the run.
        world: the ranks; None if this process trains alone.

    Raises:
        ValueError: there are other ranks than ``parallel.data`` asks for, or the run cannot be spread so.
    """

    def __init__(self, config: TrainConfig, world: World | None) -> None:
        check(config)
        layout = config.parallel.layout
        size = 1 if world is None else world.size
        if size != layout.size:
            raise ValueError(
                f"the run is for {layout.size} ranks ({layout}), and {size} were started: start as many, or make the "
                f"sizes under parallel multiply to {size}"
            )
        self.config, self.world = config, world
        streams = config.parallel.offload == "all"
        self.mesh = Mesh(world, layout) if world is not None or streams else None
        self.parallel: Parallel | None = None
        self._token_loss: TokenLoss | None = None
        timeout = config.parallel.timeout
        watched = world is not None and world.size > 1 and timeout > 0
        self.pulse = Pulse(default_store(), world.rank, world.size, timeout) if world and watched else None
        self._step = 0

    def watching(self) -> AbstractContextManager[None]:
        """Around a run: one that hangs is ended with a message after ``parallel.timeout`` (``parallel/pulse.py``)."""
        return nullcontext() if self.pulse is None else self.pulse.watching()

    def at(self, what: str, step: int | None = None, *, alone: bool = False) -> None:
        """Report this rank's progress to the watchdog; ``alone``: this phase waits for no other rank."""
        self._step = self._step if step is None else step
        if self.pulse is not None:
            self.pulse.at(self._step, what, alone=alone)

    @property
    def rank(self) -> int:
        """This rank's number."""
        return 0 if self.world is None else self.world.rank

    @property
    def _writers(self) -> Replicas | Sharded | None:
        """Ranks that write their part of the state to a checkpoint; None if the first rank writes all of it."""
        parallel = self.parallel
        return None if parallel is None or parallel.cut else parallel.spread

    @property
    def writers(self) -> int:
        """Number of ranks that write a part of the state to a checkpoint."""
        return 1 if self._writers is None else self._writers.group.size

    @property
    def leads(self) -> bool:
        """True on the rank that writes files and shows progress."""
        return self.world is None or self.world.rank == 0

    def cut(self, trainable: Trainable) -> Trainable:
        """This rank's part of a model that all ranks have with the same weights. ValueError if it cannot be cut so."""
        if self.mesh is None:
            return trainable
        parallel = self.config.parallel
        plan = ParallelPlan(
            zero=3 if parallel.sharded else parallel.zero,
            reduce_dtype=REDUCE[parallel.reduce],
            sequence=parallel.sequence,
            schedule=parallel.schedule,
            chunks=parallel.runs,
            expert_way=parallel.expert_way,
            host=parallel.offload == "all",
            copies=parallel.sums != "nccl" and parallel.offload == "none",
            fused=parallel.sums == "fused",
            folder=self._folder,
            tiles=parallel.tiles,
            device=trainable.device,
        )
        trainable.moment.slice = self.mesh.place.context
        found = self.parallel = parallelize(trainable.model, self.mesh, plan, trainable.weights)
        return replace(trainable, model=found.model, parameters=found.parameters, parallel=found, weights=None)

    def lean(self, model: ModelConfig) -> bool:
        """Return True if no rank needs all weights of such a model, because each reads its own part."""
        parallel, layout = self.config.parallel, self.config.parallel.layout
        parts = parallel.sharded or layout.tensor * layout.pipeline > 1
        return parts and model.moe is None and self.config.objective == "next_token"

    def parts(self, model: Decoder) -> Sequence[Decoder]:
        """Return the parts that this rank computes: a model, or some runs of its layers."""
        return [model] if self.parallel is None else self.parallel.parts

    def fill(self, model: Decoder, weights: Callable[[], StoredWeights]) -> None:
        """Take the weights of a whole model."""
        if self.parallel is None:
            fill(model, weights())
        else:
            self.parallel.fill(weights)

    def take(
        self, trainable: Trainable, recompute: bool
    ) -> tuple[Mapping[str, nn.Parameter], Mapping[str, Sequence[int]]]:
        """Share the work on what ``cut`` gave, when all weights are there.

        Args:
            recompute: layers are computed again in the backward pass; looked at where weights are sharded.

        Returns:
            What the optimizer of this rank updates, and the shapes of all the run's parameters.
        """
        shapes: Mapping[str, Sequence[int]] = {name: p.shape for name, p in trainable.parameters.items()}
        if self.parallel is not None and self.parallel.cut:  # also where several ranks have one parameter
            shapes = self.parallel.shapes
        if self.parallel is not None and self.parallel.pipeline is not None:
            self._token_loss = token_loss(trainable.device, trainable.source.config.logit_softcap)
        if self.parallel is None:
            return trainable.parameters, shapes
        if self.parallel.cut:
            gc.collect()  # the whole model, which is in a cycle with its stack, would stay for many steps
        own = self.parallel.share(trainable.parameters, recompute)
        if self.world is not None:
            self.world.exchange(None)  # a rank that has no room for its part says so before others wait for it
        return own, shapes

    @property
    def units(self) -> Sharded | None:
        """Layers of a model with sharded weights, after ``take``; None if they are not sharded."""
        spread = None if self.parallel is None else self.parallel.spread
        return spread if isinstance(spread, Sharded) else None

    @property
    def _folder(self) -> str:
        """Where this rank keeps what is offloaded to a disk; empty: nothing is."""
        path = self.config.parallel.offload_path
        return str(Path(path) / f"rank-{self.rank}") if path else ""

    def offload(self) -> Offload | None:
        """Return the offloading of this rank's optimizer; None if it is not offloaded."""
        parallel = self.config.parallel
        if parallel.offload == "none":
            return None
        ranks = 1 if self.world is None else self.world.on_host
        spread = None if self.parallel is None else self.parallel.spread
        cores = self.config.threads or len(os.sched_getaffinity(0)) // ranks
        return Offload(
            folder=self._folder,
            delay=parallel.delayed_update,
            watch=self.parallel is None,
            wide=(spread is not None and spread.group.size > 1) or self.config.accumulate > 1,
            threads=max(1, cores),
            upload=spread.upload if isinstance(spread, Sharded) else None,
        )

    def connect(self, optimizer: Optimizer, trainable: Trainable) -> None:
        """Tell an optimizer that exchanges things itself with whom."""
        if isinstance(optimizer, OneBitAdam) and self.mesh is not None:
            optimizer.connect(self.mesh.replicas, trainable.parameters)

    def gradients(
        self, batches: Sequence[Batch], loss_of: Callable[[int, Batch], Tensor], optimizer: Optimizer, losses: Tensor
    ) -> Tensor:
        """Run all micro-batches of a step forward and backward, and give ``optimizer`` their gradient.

        Args:
            batches: on the device; each counts by its labels.
            loss_of: the mean loss of a micro-batch; gets its number too.
            losses: ``[micro-batches]`` float32 zeros; gets what each adds to the mean loss.

        Returns:
            The global norm of the gradient, a float32 scalar.
        """
        labels = sum(batch.num_labels for batch in batches)
        own = isinstance(optimizer, OneBitAdam) and optimizer.compresses
        if self.parallel is not None and self.parallel.pipeline is not None:
            gradients = self._piped(self.parallel, self.parallel.pipeline, batches, labels, optimizer, losses)
        elif self.parallel is None or self.parallel.spread is None:
            for index, batch in enumerate(batches):
                if batch.num_labels:
                    _backward(loss_of(index, batch), batch.num_labels / labels, losses[index])
                    if len(batches) > 1:
                        optimizer.gather()
            if self.parallel is None:
                return optimizer.gradient_norm()
            gradients = optimizer.gradients()
        else:
            spread = self.parallel.spread
            leave = isinstance(spread, Sharded) and optimizer.sink is not None
            if isinstance(spread, Sharded):
                spread.send_to(optimizer.sink)
            gradients = self._shared(spread, batches, labels, loss_of, losses, own)
            if leave:
                return self.parallel.norm_of(optimizer.sunk_square(self.parallel.counts))
        if own:  # their sum is the optimizer's business
            assert isinstance(optimizer, OneBitAdam)
            optimizer.give(gradients)
            return optimizer.norm_of(gradients)
        self.parallel.complete(gradients)
        optimizer.give(gradients)
        return self._norm(self.parallel, optimizer, gradients)

    def _norm(self, parallel: Parallel, optimizer: Optimizer, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norm of gradients that ``optimizer`` was given. Where every rank has the whole sum of each, and sums are
        fused, it came with them, or is taken as one rank does."""
        plan, spread = parallel.plan, parallel.spread
        if not plan.fused or plan.zero or parallel.mesh.parts.size > 1 or parallel.shares_experts:
            return parallel.norm(gradients)
        square = spread.square if isinstance(spread, Replicas) else None
        return optimizer.gradient_norm() if square is None else square.sqrt()

    def _piped(
        self,
        parallel: Parallel,
        pipeline: Pipeline,
        batches: Sequence[Batch],
        labels: int,
        optimizer: Optimizer,
        losses: Tensor,
    ) -> dict[str, Tensor]:
        """The own micro-batches of a step through the stages, and the sum of the gradients of this stage."""
        assert self.mesh is not None
        spread, loss = parallel.spread, self._token_loss
        assert not isinstance(spread, Sharded) and loss is not None
        mine = range(self.mesh.place.data, len(batches), self.mesh.layout.data)
        pieces = [piece(parallel, batches[i], loss, batches[i].num_labels / labels) for i in mine]
        after = optimizer.gather if spread is None else spread.collect
        found = pipeline.run(pieces, parallel.actions(len(pieces)), after)
        for index, value in zip(mine, found, strict=False):
            losses[index] = value
        self.mesh.replicas.all_reduce(self.mesh.pipeline.all_reduce(losses))
        if spread is None:
            gradients = optimizer.gradients()
            parallel.join_ends(gradients.get)
            return gradients
        parallel.join_ends(spread.gradient_of)
        return spread.reduce()

    def _shared(
        self,
        spread: Replicas | Sharded,
        batches: Sequence[Batch],
        labels: int,
        loss_of: Callable[[int, Batch], Tensor],
        losses: Tensor,
        own: bool = False,
    ) -> dict[str, Tensor]:
        """The own micro-batches of a step, and the sum of all ranks' gradients; ``own``: this rank's gradients."""
        assert self.mesh is not None
        place, size = self.mesh.place.data, self.mesh.layout.data
        check_shares(len(batches), size)
        todo = list(enumerate(batches))[place::size]
        together = self.parallel is not None and self.parallel.shares_experts
        if isinstance(spread, Sharded) or together:  # every rank runs as many, also one whose share has no labels
            some = replace(next(batch for batch in batches if batch.num_labels), num_labels=0)
            todo = [(index, batch if batch.num_labels else some) for index, batch in todo]
        else:
            todo = [(index, batch) for index, batch in todo if batch.num_labels]
        for number, (index, batch) in enumerate(todo, 1):
            self.at(f"micro-batch {number} of {len(todo)}")
            last = number == len(todo) and not own
            with spread.last() if last else nullcontext():
                _backward(loss_of(index, batch), batches[index].num_labels / labels, losses[index])
            if not last:
                spread.collect()
        self.at("the sums of gradients")
        gradients = spread.local() if own and isinstance(spread, Replicas) else spread.reduce()
        self.mesh.replicas.all_reduce(losses)
        return gradients

    def stepped(self, optimizer: Optimizer) -> None:
        """After the optimizer's step: have everybody's updates, and forget the gradients."""
        optimizer.zero_grad()
        if self.parallel is not None and self.parallel.spread is not None:
            self.parallel.spread.share()
            self.parallel.spread.clear()

    def any(self, flag: bool) -> bool:
        """Return the logical OR of a flag over all ranks; every rank must call it."""
        self.at("the decision to continue")
        return flag if self.world is None else any(self.world.exchange(flag))

    def made(self, make: Callable[[], Made], undo: Callable[[], object]) -> Made:
        """Return the result of ``make`` if it succeeds on every rank; every rank must call this.

        Raises:
            StepFailed: ``make`` failed on a rank; all ranks raise its reason. Ranks on which it succeeded call
                ``undo``.
        """
        if self.world is None:
            return make()
        found, failure = None, None
        try:
            found = make()
        except StepFailed as error:
            failure = Failure(str(error), user=True)
        self.at("the question whether all have data")
        try:
            self.world.exchange(failure)
        except SharedValueError as error:
            if failure is None:
                undo()
            raise StepFailed(str(error)) from error
        assert found is not None
        return found

    def first(self, mine: tuple[int, str] | None) -> str:
        """The first of what ranks have found (``health.first_bad_number``), and on which of them; all ask together."""
        everybody = [mine] if self.world is None else self.world.exchange(mine)
        found = [(*each, rank) for rank, each in enumerate(everybody) if each is not None]
        if not found:
            return "one of a forward pass, which no rank keeps (a run on one rank looks for it)"
        _, what, rank = min(found)
        return what if all(each == mine for each in everybody) else f"{what}, on rank {rank}"

    def share(self) -> Share:
        """This rank's part of validation data, and of what was measured in a step."""
        layout = self.config.parallel.layout
        if self.world is None or layout.data == 1:
            return Share()
        assert self.mesh is not None
        world, firsts = self.world, [layout.rank(RankPlace(data, 0, 0)) for data in range(layout.data)]

        def everybody(mine: Sums) -> list[Sums]:
            self.at("the sums of what was measured")
            found = world.exchange(mine)
            return [found[rank] for rank in firsts]

        return Share(self.mesh.place.data, layout.data, everybody, lambda n: self.at(f"batch {n} of the evaluation"))

    def snapshot(self, trainable: Trainable) -> Callable[[Path], None]:
        """Return a function that writes the present weights into a directory, see ``Trainable.snapshot``.

        Every rank must call this; only the first rank uses the result.
        """
        parallel = self.parallel
        if parallel is None or (parallel.spread is None and not parallel.cut):
            return trainable.snapshot()
        weights = parallel.weights()
        if weights is not None:
            return trainable.snapshot(weights)
        return trainable.snapshot() if self.leads else lambda directory: None

    def state(self, optimizer: Optimizer) -> Mapping[str, Tensor]:
        """This rank's part of the optimizer's state, on the CPU, by the names that ``StoredTensors`` reads; all ask
        together. Where the model is cut the first rank has all of it."""
        spread = self._writers
        if spread is not None:
            return {spread.stored_name(name): part for name, part in optimizer.lent(spread.writes).items()}
        if self.parallel is not None:
            return self.parallel.whole_state(optimizer.state_tensors())
        return optimizer.lent()

    def load_state(self, optimizer: Optimizer, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Put back this rank's part of a whole state, of a run on however many ranks.

        Raises:
            ValueError: it is of another run.
        """
        optimizer.load_state_tensors(tensors if self.parallel is None else self.parallel.own_state(tensors), steps)


def check(config: TrainConfig) -> None:
    """See that a run can be spread as it asks, as far as that can be said without its model.

    Raises:
        ValueError: it cannot; the message names the nearest way that works (``spec/layouts/refusals.py``).
    """
    if config.parallel.offload != "none":
        _check_offload(config)
    if config.optimizer.name == "zero_one_adam" and config.precision == "bfloat16":
        raise ValueError(
            'optimizer.name = "zero_one_adam" takes local steps, which weights in bfloat16 alone would round away: set '
            'precision to "mixed"'
        )
    run = RunSettings(
        adapted=config.task in ("lora", "qlora"),
        objective=config.objective,
        optimizer=config.optimizer.name,
        accumulate=config.accumulate,
        samples=bool(config.samples.prompts),
        keeps_layers=config.layer_keep == 1.0,
    )
    reason = refusal(run, asked(config.parallel))
    if reason is not None:
        raise ValueError(reason)


def asked(parallel: ParallelConfig) -> Spread:
    """Return the distribution that a configuration asks for, wherever offloaded state is kept."""
    streams = parallel.offload == "all"
    return Spread(
        data=parallel.data,
        zero=3 if parallel.sharded else parallel.zero,
        tensor=parallel.tensor,
        sequence=parallel.sequence,
        pipeline=parallel.pipeline,
        schedule=parallel.schedule,
        chunks=parallel.runs,
        context=parallel.context,
        expert=parallel.expert > 1,
        reduce=4 if parallel.reduce == "float32" else 2,
        tiles=parallel.tiles,
        copies=parallel.sums != "nccl",
        fused=parallel.sums == "fused",
        host_state=parallel.offload != "none",
        host_weights=streams,
    )


def _check_offload(config: TrainConfig) -> None:
    none = 'or parallel.offload to "none"'
    if config.optimizer.name != "adamw":
        raise ValueError(f'parallel.offload is for AdamW: set optimizer.name to "adamw", {none}')
    if config.task in ("lora", "qlora"):
        raise ValueError('parallel.offload is for runs that train all weights: set it to "none", adapters are small')
    if config.parallel.offload == "all" and config.parallel.zero != 3 and config.parallel.data > 1:
        raise ValueError(
            'parallel.offload = "all" is for sharded weights: set parallel.zero to 3, or take offload = "optimizer"'
        )
    if config.parallel.offload == "all" and (config.samples.prompts or config.objective == "grpo"):
        what = "samples are" if config.samples.prompts else 'objective = "grpo" has answers'
        raise ValueError(f'{what} drawn from a whole model on a device: set parallel.offload to "optimizer"')
    if config.precision == "bfloat16":
        raise ValueError(f'parallel.offload keeps float32 states: set precision to "mixed", {none}')


def _backward(loss: Tensor, share: float, found: Tensor) -> None:
    loss = loss * share
    loss.backward()  # type: ignore[no-untyped-call]
    found.copy_(loss.detach())
