"""Configure how a run is distributed over several devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ...spec.layouts.ranks import RankLayout
from ...spec.layouts.schedules.registry import schedule_kind, schedules
from ...spec.settings import About
from .parse import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Distribution of a run over ranks, each with its own device. A step is the same for any distribution, up to
    rounding. There are ``data * tensor * pipeline * context`` ranks.

    Attributes:
        data: ranks that share the ``accumulate`` micro-batches of a step.
        zero: state that the ``data`` ranks shard: 0 nothing; 1 the optimizer's state; 2 gradients too; 3 weights too,
            gathered layer by layer. Higher values need less memory and more communication.
        reduce: data type in which gradients are summed over the ``data`` ranks.
        sums: transport of gradients, and with ``zero`` 3 of weights: ``auto``, between GPUs of one host the copy
            engines, which leave the multiprocessors free, else NCCL; ``fused``, as ``auto``, with sum, copy and norm in
            one launch, and the gradient of a tied embedding sent in two parts (not yet run on a GPU); ``nccl``.
            ``zero`` 2 and offloaded runs always use NCCL.
        tensor: ranks that share every matrix, by heads, feed-forward units and tokens of the vocabulary.
        sequence: the ``tensor`` ranks also share the tokens between the matrices. Norms and additions are then computed
            and stored once, not by each rank.
        pipeline: number of stages with some layers each; micro-batches pass through them. A step needs several
            micro-batches, so that stages are rarely idle.
        schedule: order of forward and backward passes, a file of ``spec/layouts/schedules/``: ``1f1b``, a backward pass
            after each forward pass; ``gpipe``, all forward passes first; ``interleaved``, ``1f1b`` with ``chunks`` runs
            of layers per rank and shorter waits.
        chunks: runs of layers of each rank with ``interleaved``.
        context: ranks that share the tokens of each micro-batch, for long documents; keys and values circulate.
        expert: ranks that share the experts of a mixture: as many as ``data``, or 1: every rank has all experts.
        expert_way: transport of tokens to experts on other ranks: ``gather``, all ranks gather all tokens;
            ``all_to_all``, a token is sent only to ranks that have its experts; ``auto``, the second if it sends at
            most three quarters of the first.
        tiles: with ``zero`` 3 or ``offload = "all"``, number of parts in which each matrix of a layer is copied to the
            device, so that a device never holds a whole layer. Slower; for the largest models.
        offload: state kept in host memory: ``none``; ``optimizer``, its states and float32 weights, updated by the CPU
            (ZeRO-Offload); ``all``, the other weights too, copied to the device layer by layer. ``all`` works on one
            device, or with ``zero`` 3 on several.
        offload_path: folder on a fast disk (NVMe) for offloaded state, in files while the run lasts (ZeRO-Infinity);
            empty: host memory.
        delayed_update: update on the CPU while the device computes the next step, with gradients of weights that are
            one step old: another method, whose losses differ slightly.
        timeout: seconds without progress of any rank after which a run is ended, with the state of each rank; 0: never.
            A checkpoint, an evaluation and samples may take longer.
    """

    OTHER_NAMES: ClassVar[dict[str, str]] = {"nvme_path": "offload_path", "out_splits": "tiles"}

    data: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    reduce: Literal["float32", "bfloat16"] = "float32"
    sums: Literal["auto", "fused", "nccl"] = "auto"
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    schedule: Annotated[str, About(choices=schedules)] = "1f1b"
    chunks: int = 2
    context: int = 1
    expert: int = 1
    expert_way: Literal["auto", "gather", "all_to_all"] = "auto"
    tiles: int = 1
    offload: Literal["none", "optimizer", "all"] = "none"
    offload_path: str = ""
    delayed_update: bool = False
    timeout: float = 300.0

    def __post_init__(self) -> None:
        positive(self, "data", "tensor", "pipeline", "chunks", "context", "expert", "tiles")
        if self.tiles > 1 and not self.sharded:
            raise ValueError(
                "parallel.tiles is for layers that a device has only while they run: set parallel.zero to 3 or "
                'parallel.offload to "all"'
            )
        if self.expert not in (1, self.data):
            raise ValueError(
                f"parallel.expert = {self.expert} shares experts between the {self.data} ranks of parallel.data: set "
                f"both to {max(self.expert, self.data)}, or parallel.expert to 1"
            )
        if self.expert_way != "auto" and self.expert == 1:
            raise ValueError(
                "parallel.expert_way is for ranks that share experts: set both parallel.data and parallel.expert to 2 "
                "or more"
            )
        if not (math.isfinite(self.timeout) and self.timeout >= 0):
            raise ValueError(f"parallel.timeout must be 0 or a number of seconds, not {self.timeout}")
        if self.zero and self.data == 1 and not (self.zero == 3 and self.offload == "all"):
            raise ValueError(f"parallel.zero = {self.zero} cuts over several ranks: set parallel.data to 2 or more")
        if self.sums == "fused" and self.sharded:
            changes = ["parallel.zero to 0, 1 or 2"] if self.zero == 3 else []
            changes += ['parallel.offload to "optimizer"'] if self.offload == "all" else []
            raise ValueError(
                'parallel.sums = "fused" is for gradients of whole parameters: set '
                f'{" and ".join(changes)}, or parallel.sums to "auto"'
            )
        if self.sequence and self.tensor == 1:
            raise ValueError("parallel.sequence shares tokens between ranks of parallel.tensor: set that to 2 or more")
        for name in ("offload_path", "delayed_update"):
            if getattr(self, name) and self.offload == "none":
                raise ValueError(
                    f'parallel.{name} is for states outside the device: set parallel.offload to "optimizer"'
                )
        if self.delayed_update and self.offload_path:
            raise ValueError("parallel.delayed_update is for states in host memory: leave parallel.offload_path out")

        if self.schedule != "1f1b" and self.pipeline == 1:
            raise ValueError("parallel.schedule is for the stages of parallel.pipeline: set that to 2 or more")
        if self.pipeline > 1 and schedule_kind(self.schedule).chunked and self.chunks == 1:
            raise ValueError('parallel.chunks = 1 is schedule = "1f1b": set that, or parallel.chunks to 2 or more')

    @property
    def sharded(self) -> bool:
        """True if a device holds whole weights of a layer only while the layer runs."""
        return self.zero == 3 or self.offload == "all"

    @property
    def runs(self) -> int:
        """Runs of layers of each rank."""
        return self.chunks if self.pipeline > 1 and schedule_kind(self.schedule).chunked else 1

    @property
    def layout(self) -> RankLayout:
        """The ranks along each axis."""
        return RankLayout(
            tensor=self.tensor, pipeline=self.pipeline, data=self.data, context=self.context, expert=self.expert > 1
        )
