"""The ranks that train together: who computes what of a step, and how one gradient comes of it.

``Crew`` is what the loop knows of other ranks. Alone it sums micro-batches, and is all there is. With others every
rank runs the same ``Trainer`` over the same data, computes its share of each step's micro-batches, and takes the same
step; what is written and shown is the first rank's business. How gradients are summed and what each rank keeps is in
``parallel/replicas.py`` and ``parallel/sharded.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from ..parallel.group import Group
from ..parallel.layout import Layout, check_shares
from ..parallel.mesh import Mesh
from ..parallel.replicas import Replicas
from ..parallel.sharded import Sharded
from ..parallel.world import World
from .batches import Batch
from .config import TrainConfig
from .model import Trainable
from .optim import Offload, Optimizer

REDUCE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Crew:
    """The ranks of a run, seen from one of them.

    Args:
        config: the run.
        world: the ranks; None: this process trains alone.

    Raises:
        ValueError: there are other ranks than ``parallel.data`` asks for, or the run cannot be spread so.
    """

    def __init__(self, config: TrainConfig, world: World | None) -> None:
        check(config)
        size = 1 if world is None else world.size
        if size != config.parallel.data:
            raise ValueError(
                f"parallel.data is {config.parallel.data}, and {size} ranks were started: start as many, or set "
                f"parallel.data to {size}"
            )
        self.config, self.world = config, world
        self.group = Group.alone() if world is None else Mesh(world, Layout(data=size)).data
        self.spread: Replicas | Sharded | None = None

    @property
    def leads(self) -> bool:
        """Whether this rank writes and shows things."""
        return self.group.rank == 0

    def take(
        self, trainable: Trainable, recompute: bool
    ) -> tuple[Mapping[str, nn.Parameter], Mapping[str, Sequence[int]]]:
        """Spread a model, which all ranks have with the same weights, over them.

        Args:
            recompute: layers are computed again in the backward pass; looked at where weights are sharded.

        Returns:
            What the optimizer of this rank updates, and the shapes of all the run's parameters.
        """
        parallel = self.config.parallel
        if self.group.size == 1:
            return trainable.parameters, {name: p.shape for name, p in trainable.parameters.items()}
        if parallel.zero == 3:
            self.spread = Sharded(
                self.group, trainable.model, recompute=recompute, reduce_dtype=REDUCE[parallel.reduce]
            )
        else:
            self.spread = Replicas(self.group, trainable.parameters, parallel.zero, REDUCE[parallel.reduce])
        return self.spread.owned, {name: p.shape for name, p in self.spread.parameters.items()}

    def offload(self) -> Offload | None:
        """How this rank offloads its optimizer; None: it does not."""
        parallel = self.config.parallel
        if parallel.offload == "none":
            return None
        rank = self.group.rank if self.world is None else self.world.rank
        cores = self.config.threads or len(os.sched_getaffinity(0)) // self.group.size
        return Offload(
            folder=str(Path(parallel.offload_path) / f"rank-{rank}") if parallel.offload_path else "",
            delay=parallel.delayed_update,
            watch=self.spread is None,
            wide=self.spread is not None or self.config.accumulate > 1,
            threads=max(1, cores),
        )

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
        if self.spread is None:
            for index, batch in enumerate(batches):
                if batch.num_labels:
                    _backward(loss_of(index, batch), batch.num_labels / labels, losses[index])
                    if len(batches) > 1:
                        optimizer.gather()
            return optimizer.gradient_norm()
        check_shares(len(batches), self.group.size)
        todo = list(enumerate(batches))[self.group.rank :: self.group.size]
        if isinstance(self.spread, Sharded):  # every rank runs as many, also one whose share has no labels
            some = next(batch for batch in batches if batch.num_labels)
            todo = [(index, batch if batch.num_labels else some) for index, batch in todo]
        else:
            todo = [(index, batch) for index, batch in todo if batch.num_labels]
        for place, (index, batch) in enumerate(todo):
            last = place + 1 == len(todo)
            with self.spread.last() if last else nullcontext():
                _backward(loss_of(index, batch), batches[index].num_labels / labels, losses[index])
            if not last:
                self.spread.collect()
        gradients = self.spread.reduce()
        self.group.all_reduce(losses)
        optimizer.give(gradients)
        return self.spread.norm(gradients)

    def stepped(self, optimizer: Optimizer) -> None:
        """After the optimizer's step: have everybody's updates, and forget the gradients."""
        optimizer.zero_grad()
        if self.spread is not None:
            self.spread.share()
            self.spread.clear()

    def any(self, flag: bool) -> bool:
        """Whether a rank says so; all ask together."""
        return flag if self.world is None else any(self.world.exchange(flag))

    def mean(self, numbers: Mapping[str, float]) -> Mapping[str, float]:
        """The mean of each number over the ranks that have it; all ask together."""
        if self.world is None:
            return numbers
        found: dict[str, list[float]] = {}
        for each in self.world.exchange(dict(numbers)):
            for name, value in each.items():
                found.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}

    def snapshot(self, trainable: Trainable) -> Callable[[Path], None]:
        """What writes the weights of now into a directory, see ``Trainable.snapshot``; of use on the first rank alone.
        All ask together."""
        if isinstance(self.spread, Sharded):
            return trainable.snapshot(self.spread.state())
        return trainable.snapshot() if self.leads else lambda directory: None

    def state(self, optimizer: Optimizer) -> Mapping[str, Tensor]:
        """The optimizer's whole state, as of a run on one rank, on the CPU of the first rank, nothing on the others;
        all ask together."""
        tensors = optimizer.state_tensors()
        if self.spread is not None:
            return self.spread.whole_state(tensors)
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def load_state(self, optimizer: Optimizer, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Put back this rank's part of a whole state, of a run on however many ranks.

        Raises:
            ValueError: it is of another run.
        """
        optimizer.load_state_tensors(tensors if self.spread is None else self.spread.own_state(tensors), steps)


def check(config: TrainConfig) -> None:
    """See that a run can be spread as it asks.

    Raises:
        ValueError: it cannot; the message names the nearest way that works.
    """
    parallel = config.parallel
    if parallel.offload != "none":
        _check_offload(config)
    if parallel.data == 1:
        return
    check_shares(config.accumulate, parallel.data)
    if config.objective == "grpo":
        raise ValueError('objective = "grpo" draws its answers on one device: set parallel.data to 1')
    if parallel.zero == 3 and config.task in ("lora", "qlora"):
        raise ValueError("parallel.zero = 3 is for runs that train all weights: set parallel.zero to 2 for adapters")
    if parallel.zero == 3 and config.samples.prompts:
        raise ValueError("samples are drawn from a whole model, and parallel.zero = 3 cuts it: set parallel.zero to 2")
    if parallel.zero == 3 and config.optimizer.name != "adamw":
        raise ValueError(
            f'parallel.zero = 3 updates pieces of matrices, which optimizer.name = "{config.optimizer.name}" cannot: '
            'set parallel.zero to 2, or optimizer.name to "adamw"'
        )


def _check_offload(config: TrainConfig) -> None:
    none = 'or parallel.offload to "none"'
    if config.optimizer.name != "adamw":
        raise ValueError(f'parallel.offload is for AdamW: set optimizer.name to "adamw", {none}')
    if config.task in ("lora", "qlora"):
        raise ValueError('parallel.offload is for runs that train all weights: set it to "none", adapters are small')
    if config.precision == "bfloat16":
        raise ValueError(f'parallel.offload keeps float32 states: set precision to "mixed", {none}')


def _backward(loss: Tensor, share: float, found: Tensor) -> None:
    loss = loss * share
    loss.backward()  # type: ignore[no-untyped-call]
    found.copy_(loss.detach())
