"""``Spread``: the layout of a training run over ranks. Plain arithmetic, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Layout of a training run. The sizes of the axes multiply to the number of ranks.

    Attributes:
        data: ranks that share the micro-batches of a step.
        zero: level of sharding over ``data`` and ``context`` ranks, which have the same weights; see
            ``parallel/replicas.py``.
        tensor: ranks that share each layer. sequence: these ranks share the tokens of norms too.
        pipeline: stages of layers.
        schedule: pipeline schedule, see ``schedule.py``. chunks: runs of layers of each rank, with ``interleaved``.
        context: ranks that share the tokens of a sequence.
        expert: the data ranks share the experts.
        reduce: bytes of a number while gradients are summed: 4 or 2.
        tiles: number of parts in which matrices of sharded layers come to the device (``parallel/tiled.py``).
        copies: copy engines may sum gradients, in memory that GPUs share (``parallel/peer_copies.py``).
        fused: with copies, a sum, its copy and the norm are one launch, and the gradient of a tied embedding is sent in
            two parts (``parallel/table_rows.py``).
        host_state: master weights and the optimizer's state are in host memory. host_weights: with zero 3, the weights
            too, on one rank or several.

    Raises:
        ValueError: a size is not at least 1, or settings exclude each other.
    """

    data: int = 1
    zero: int = 0
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    context: int = 1
    expert: bool = False
    reduce: int = 4
    tiles: int = 1
    copies: bool = True
    fused: bool = False
    host_state: bool = False
    host_weights: bool = False

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name} must be at least 1, not {getattr(self, name)}")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"parallel.zero is 0, 1, 2 or 3, not {self.zero}")
        if self.zero and self.data == 1 and not (self.zero == 3 and self.host_weights):
            raise ValueError(f"parallel.zero = {self.zero} cuts over several ranks: set parallel.data to 2 or more")
        if self.tiles > 1 and self.zero != 3:
            raise ValueError("parallel.tiles cuts matrices of sharded layers: set parallel.zero to 3")
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence parallelism is between tensor ranks: set parallel.tensor to 2 or more")

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def settings(self) -> str:
        """Settings that differ from one device, in the form of a run's file."""
        sizes = ("data", "zero", "tensor", "pipeline", "context")
        found = [f"{name} = {getattr(self, name)}" for name in sizes if getattr(self, name) > (name != "zero")]
        found = [each for each in found if self.data > 1 or not each.startswith("zero")]
        found += [f"expert = {self.data}"] if self.expert else []
        found += [f'schedule = "{self.schedule}"'] if self.schedule != "1f1b" else []
        found += [f"chunks = {self.chunks}"] if self.chunks > 1 else []
        found += ["sequence = true"] if self.sequence else []
        found += [f"tiles = {self.tiles}"] if self.tiles > 1 else []
        found += ['reduce = "bfloat16"'] if self.reduce == 2 and self.data * self.context > 1 else []
        found += [f'offload = "{"all" if self.host_weights else "optimizer"}"'] if self.host_state else []
        return ", ".join(found)

    def __str__(self) -> str:
        names = (("dp", self.data), ("tp", self.tensor), ("pp", self.pipeline), ("cp", self.context))
        found = [f"{name} {size}" for name, size in names if size > 1] or ["one device"]
        found += [f"zero {self.zero}"] if self.zero else []
        found += ["experts shared"] if self.expert else []
        found += [self.schedule + f" {self.chunks}" * (self.chunks > 1)] if self.schedule != "1f1b" else []
        found += ["sp"] if self.sequence else []
        found += [f"tiles {self.tiles}"] if self.tiles > 1 else []
        return ", ".join([*found, *(["states on the host"] if self.host_state else [])])
