"""``parallelize(model, mesh, plan)``: split a model among the ranks of a mesh, for training.

It returns a ``Parallel``: this rank's part of the model, and what a training loop needs to know about the other parts:
the ranks over which each gradient is summed, the gradients that count in the norm, and how to join the parts into one
model for a checkpoint.

* along ``tensor`` matrices are cut (``spec/layouts/shards.py``, ``tensor.py``), and the loss is computed over a
  cut vocabulary (``split_loss.py``); with ``sequence`` the tokens between them are cut too (``differentiable.py``)
* along ``pipeline`` each rank has some layers, or several runs of them (``spec/layouts/schedule.py``, ``pipeline.py``)
* along ``context`` each rank has some tokens of a micro-batch (``ring.py``)
* along ``data`` whole micro-batches are shared (``replicas.py``, ``sharded.py``), and with ``expert`` the experts of a
  mixture too (``experts.py``)

Parameters have their names of the whole model in every part.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..checkpoints.load import fill
from ..models.context import AttentionContext, VarlenContext
from ..models.decoder import Decoder, Layer
from ..models.stored import StoredWeights, stored_tensor
from ..spec.layouts.refusals import RunSettings, refusal
from ..spec.layouts.schedule import Action, schedule
from ..spec.layouts.shards import Shard, vocabulary_share
from ..spec.weights import weight_shapes
from .differentiable import entered, gathered, own_rows
from .experts import meeting, spread_experts, way_of
from .group import Group
from .load import shard_embedding, shard_weights
from .mesh import Mesh
from .pipeline import Pipeline
from .plan import ParallelPlan, spread_of
from .replicas import GradientReplicas, gather_tensors, on_cpu, square_of
from .ring import RingContext
from .ring_pairs import own_tokens
from .sharded import Sharded
from .split_loss import split_cross_entropy
from .table_rows import shared_table
from .tensor import GatheredShard, ShardedEmbedding, sharded_kinds

if TYPE_CHECKING:
    from .peer_copies import PeerCopies
    from .peer_pieces import PeerPieces

log = logging.getLogger(__name__)


def parallelize(
    model: Decoder, mesh: Mesh, plan: ParallelPlan, weights: Callable[[], StoredWeights] | None = None
) -> Parallel:
    """Take this rank's part of a model, with the values that are equal on all ranks.

    Args:
        model: whole, on its device, alike on every rank; where it is cut it is not needed any more.
        weights: weights to read, if the model has only unwritten host memory. A rank reads its own part alone, and
            sharded layers one after the other, so that it never holds a whole model. ``plan.device`` is the device of
            the part.

    Raises:
        ValueError: the model cannot be trained so; the message names the nearest layout that works.
    """
    stages = mesh.layout.pipeline if plan.chunks > 1 else 1
    run = RunSettings(accumulate=mesh.layout.data * stages)  # the step itself is the caller's business
    reason = refusal(run, spread_of(mesh.layout, plan), model.config)
    if reason is not None:
        raise ValueError(reason)
    return Parallel(model, mesh, plan, weights)


class Parallel:
    """A model on the ranks of a mesh, seen from one of them.

    Attributes:
        model: this rank's part of the model.
        parameters: its trained parameters, by the names in the whole model.
        spread: the sums over ranks with the same weights, after ``share``; None where there are no others.
    """

    def __init__(
        self, model: Decoder, mesh: Mesh, plan: ParallelPlan, weights: Callable[[], StoredWeights] | None = None
    ) -> None:
        self._weights = weights
        """Weights of the whole model; None if they are in ``parts``."""
        self.whole_config, self.mesh, self.plan = model.config, mesh, plan
        layout, place = mesh.layout, mesh.place
        self._stages = layout.pipeline * plan.chunks
        self.shards = self._shards_of(mesh.rank)
        """Shards of this rank; several runs of layers with an interleaved schedule."""
        self.shares_experts = layout.expert
        """True if each rank along the data axis has some of the experts."""
        self.cut = mesh.parts.size > 1 or self.shares_experts
        """True if the model is divided between ranks."""
        self.spread: GradientReplicas | Sharded | None = None
        self.parts = [self._part(model, shard) for shard in self.shards] if self.cut else [model]
        self.parameters: dict[str, nn.Parameter] = {}
        for part, shard in zip(self.parts, self.shards, strict=True):
            for own, parameter in part.named_parameters():
                name = shard.whole_name(own.replace(".inner.", ".").replace(".table.", "."))
                if not parameter.numel() or (name.startswith("norm.") and not shard.last):
                    parameter.requires_grad_(False)
                if parameter.requires_grad:
                    self.parameters[name] = parameter
        self.shapes = weight_shapes(model.config)
        """Shape of every parameter of the whole model, in the same order on all ranks."""
        self.pipeline = Pipeline(self.parts, mesh.links) if layout.pipeline > 1 else None
        tied = model.config.tied_embeddings and layout.pipeline > 1
        self._shares_table = tied and place.pipeline in (0, layout.pipeline - 1)
        """True if this rank and another stage both have the embedding's table."""

    @property
    def model(self) -> Decoder:
        """This rank's part of the model, or its first run of layers."""
        return self.parts[0]

    def _part(self, model: Decoder, shard: Shard) -> Decoder:
        """Build one run of layers, filled unless it is sharded when its weights are read."""
        mesh, dtype, device = self.mesh, model.norm.weight.dtype, model.device
        later = self._later
        if self._weights is not None and not later:
            device = self.plan.device or device
        kinds = sharded_kinds(None, shard, mesh.tensor, sequence=self.plan.sequence)
        part = Decoder(shard.local, "meta", dtype, ops=model.ops, kinds=kinds)
        shard_embedding(part, shard, mesh, dtype)
        if isinstance(part.embed, ShardedEmbedding):
            part.embed.sequence = self.plan.sequence
        part = part.to_empty(device=device)
        if not later:
            fill(part, shard_weights(_held(model) if self._weights is None else self._weights(), shard))
        part.requires_grad_(True)
        if shard.model.moe is not None:
            way = way_of(mesh.data.size, shard.model.moe.per_token, self.plan.expert_way)
            spread_experts(part, shard, mesh, way)
        if mesh.tensor.size > 1:
            self._join_halves(part)
        return part

    def _join_halves(self, part: Decoder) -> None:
        """Insert the collectives before cut matrices, whose inputs all come from norms.

        After each norm the backward pass sums over ranks, and with ``sequence`` the rows of all ranks are gathered.
        """
        group, enter = self.mesh.tensor, gathered if self.plan.sequence else entered
        into: dict[int, nn.Module] = {id(part.norm): part.norm}
        for layer in part.layers:
            assert isinstance(layer, Layer)
            into |= {id(norm): norm for norm in (layer.attention_norm, layer.mlp_norm)}  # one where it does nothing
        for norm in into.values():
            norm.register_forward_hook(lambda _module, _inputs, out: enter(out, group))
        if self.plan.sequence and part.position_embed is not None:
            part.position_embed.register_forward_hook(lambda _module, _inputs, out: own_rows(out, group))

    # Parts

    @property
    def _later(self) -> bool:
        """True if weights are read only when they are sharded."""
        return self._weights is not None and self.plan.zero == 3

    def fill(self, weights: Callable[[], StoredWeights]) -> None:
        """Use the weights of a whole model, and read this rank's part, once for each run of layers."""
        if self._later:
            self._weights = weights
            return
        for part, shard in zip(self.parts, self.shards, strict=True):
            fill(part, shard_weights(weights(), shard) if self.cut else weights())

    def _shards_of(self, rank: int) -> list[Shard]:
        """Return the shards of a rank."""
        layout = self.mesh.layout
        place = layout.place(rank)
        stages = [chunk * layout.pipeline + place.pipeline for chunk in range(self.plan.chunks)]
        experts = (place.data, layout.data) if layout.expert else (0, 1)
        return [
            Shard(self.whole_config, place.tensor, layout.tensor, stage, self._stages, *experts) for stage in stages
        ]

    def _own_experts(self, name: str) -> bool:
        """Return True if a parameter belongs to experts that no other rank has."""
        return self.shares_experts and ".mlp.experts_" in name

    def _part_of(self, name: str, shards: Sequence[Shard]) -> tuple[slice, ...] | None:
        """Return the slices of the whole parameter that the shards hold; None if they hold none of it."""
        shape = self.shapes[name]
        found = (shard.part(name, shape) for shard in shards)
        part = next((part for part in found if part is not None), None)
        return None if part is None else part[:2][: len(shape)]

    def _replicated(self, name: str) -> bool:
        """Return True if all ranks of the tensor group have the whole of a parameter."""
        part = self._part_of(name, self.shards)
        return part is not None and all(cut == slice(None) for cut in part)

    def counts(self, name: str) -> bool:
        """Return True if this rank counts the parameter in a norm, of all ranks that have the same numbers."""
        if self._shares_table and name == "embed.weight" and self.mesh.place.pipeline:
            return False
        if self.shares_experts:
            return self._own_experts(name) or self.mesh.data.rank == 0
        return self.mesh.tensor.rank == 0 or not self._replicated(name)

    def _partial(self, name: str) -> bool:
        """Return True if ranks of the tensor group have a whole parameter but only a part of its gradient."""
        if self.mesh.tensor.size == 1 or not self._replicated(name):
            return False
        return self.plan.sequence or ".q_norm." in name or ".k_norm." in name

    # A step

    @property
    def token_multiple(self) -> int:
        """Divisor that the number of tokens of a micro-batch must have."""
        context = self.mesh.context.size
        return (2 * context if context > 1 else 1) * (self.mesh.tensor.size if self.plan.sequence else 1)

    def rows(self, tokens: int) -> int:
        """Return the number of a micro-batch's tokens that this rank has between layers."""
        return tokens // self.mesh.context.size // (self.mesh.tensor.size if self.plan.sequence else 1)

    def meet(self, tokens: int) -> None:
        """Prepare a micro-batch of ``tokens`` tokens for a model with shared experts; every rank must call it."""
        ranks = meeting(self.model) if self.shares_experts else None
        if ranks is not None:
            ranks.meet(tokens)

    def own_tokens(self, x_T: Tensor) -> Tensor:
        """Return the numbers of this rank's tokens, out of one for each token of a micro-batch."""
        context = self.mesh.context
        if context.size == 1:
            return x_T
        return torch.cat([x_T[part] for part in own_tokens(x_T.shape[0], context.rank, context.size)])

    def attention(self, cu_seqlens: Tensor) -> AttentionContext:
        """Return the attention context of a micro-batch; ``cu_seqlens``: starts of its documents."""
        if self.mesh.context.size > 1:
            return RingContext(cu_seqlens, self.mesh.context)
        return VarlenContext(cu_seqlens, self.model.ops)

    def loss(
        self, hidden_TD: Tensor, labels_T: Tensor, num_labels: int, ignore: int, whole: Callable[..., Tensor]
    ) -> Tensor:
        """Compute the mean loss over the labels of a micro-batch; if ranks share its tokens, this rank's part of it.

        Args:
            labels_T: of the own tokens. num_labels: of all.
            whole: computes the mean loss over labels where this rank has the whole head.
        """
        if self.mesh.context.size == 1:
            return self._own_loss(hidden_TD, labels_T, ignore, whole)
        own = int((labels_T != ignore).sum())
        if not own:
            return 0 * hidden_TD.float().sum()
        return own / num_labels * self._own_loss(hidden_TD, labels_T, ignore, whole)

    def whole_loss(self, loss: Tensor) -> Tensor:
        """Return a loss without a gradient, summed over the ranks that share tokens."""
        return self.mesh.context.all_reduce(loss.detach().reshape(1))[0]

    def _own_loss(self, hidden_TD: Tensor, labels_T: Tensor, ignore: int, whole: Callable[..., Tensor]) -> Tensor:
        head = self.parts[-1].head
        if not isinstance(head, GatheredShard):
            return whole(hidden_TD, head.dense(), labels_T, ignore)
        first = self.shards[-1].vocabulary.start
        group = self.mesh.tensor
        most = vocabulary_share(self.whole_config.vocab_size, group.size)
        return split_cross_entropy(hidden_TD, head.dense(), labels_T, ignore, first=first, most=most, group=group)

    def share(self, trained: Mapping[str, nn.Parameter], recompute: bool) -> Mapping[str, nn.Parameter]:
        """Divide the work with ranks that have the same weights, before the first step and after the weights are
        loaded.

        Args:
            trained: by name.
            recompute: layers are computed again in the backward pass; looked at where weights are sharded.

        Returns:
            What this rank updates.
        """
        group, plan = self.mesh.replicas, self.plan
        if group.size == 1 and not plan.host:
            return trained
        if plan.zero == 3:
            weights = self._weights() if self._later and self._weights is not None else None
            self.spread = Sharded(
                group,
                self.model,
                weights=shard_weights(weights, self.shards[0]) if weights is not None and self.cut else weights,
                recompute=recompute,
                reduce_dtype=plan.reduce_dtype,
                device=plan.device,
                host=plan.host,
                folder=plan.folder,
                copies=self._copies(group),
                shared=partial(self._pieces, group),
                parameters=trained,
                complete=self._join_parts if self.mesh.tensor.size > 1 else None,
                tiles=plan.tiles,
            )
        else:
            whole = {name: math.prod(self.shapes[name]) for name in trained} if self.cut else None
            alone = [name for name in trained if self._own_experts(name)]
            copies = self._copies(group) if plan.zero < 2 else None
            table = shared_table(self.model, trained) if plan.fused and self.pipeline is None else None
            self.spread = GradientReplicas(group, trained, plan.zero, plan.reduce_dtype, whole, copies, alone, table)
        return self.spread.owned

    @property
    def _may_copy(self) -> bool:
        device = self.plan.device or self.model.device  # a model that is still to be read is on the host
        return self.plan.copies and device.type == "cuda" and self.mesh.replicas.size > 1

    def _pieces(self, group: Group, sizes: list[int]) -> PeerPieces | None:
        """Allocate memory of sharded weights that other ranks read by copy engines, if possible. All ranks call it."""
        if not self._may_copy:
            return None
        from .peer_pieces import PeerPieces, room, shared_pieces

        made = shared_pieces(self.mesh.world, group, sum(map(room, sizes)))
        if isinstance(made, PeerPieces):
            return made
        log.info("weights are gathered by NCCL: %s", made)
        return None

    def _copies(self, group: Group) -> PeerCopies | None:
        """Return sums by copy engines, if the ranks are GPUs of one host that support it. All ranks call it."""
        if not self._may_copy:
            return None
        from .peer_copies import PeerCopies, shared_copies

        made = shared_copies(self.mesh.world, group, fused=self.plan.fused)
        if isinstance(made, PeerCopies):
            log.info("gradients are summed by copy engines, beside the backward pass")
            return made
        log.info("gradients are summed by NCCL: %s", made)
        return None

    def actions(self, micro_batches: int) -> list[Action]:
        """Return this rank's actions in a pipeline's step. Raises ValueError if there is no such schedule."""
        layout, plan = self.mesh.layout, self.plan
        return schedule(plan.schedule, layout.pipeline, micro_batches, plan.chunks)[self.mesh.place.pipeline]

    @torch.no_grad()
    def join_ends(self, gradient_of: Callable[[str], Tensor | None]) -> None:
        """Sum, in place, the gradients of a table that the first and the last stage share; before any other sum."""
        if not self._shares_table:
            return
        group, gradient = self.mesh.pipeline, gradient_of("embed.weight")
        assert gradient is not None
        if group.rank:
            work = group.send(gradient, 0)
            assert work is not None
            work.wait()
            gradient.copy_(group.receive(torch.empty_like(gradient), 0))
            return
        gradient.add_(group.receive(torch.empty_like(gradient), group.size - 1))
        work = group.send(gradient, group.size - 1)
        assert work is not None
        work.wait()

    def complete(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum, in place, gradients that ranks of the tensor group have in parts; sharded gradients are complete
        already."""
        if not isinstance(self.spread, Sharded):
            self._join_parts(gradients)

    @torch.no_grad()
    def _join_parts(self, gradients: Mapping[str, Tensor]) -> None:
        found = [gradients[name] for name in gradients if self._partial(name)]
        if not found:
            return
        flat = self.mesh.tensor.all_reduce(torch.cat([gradient.reshape(-1).float() for gradient in found]))
        for gradient, values in zip(found, flat.split([g.numel() for g in found]), strict=True):
            gradient.copy_(values.view_as(gradient))

    @torch.no_grad()
    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the 2-norm of all ranks' gradients together, each number counted once: a float32 scalar, equal on all
        ranks."""
        mine = {name: gradient for name, gradient in gradients.items() if self.counts(name)}
        return self.norm_of(square_of(mine, self.model.device))

    @torch.no_grad()
    def norm_of(self, square: Tensor) -> Tensor:
        """Compute ``norm`` of gradients whose squares sum to ``square`` on this rank."""
        square = square.reshape(1).to(self.model.device)
        if (self.spread is not None and self.plan.zero) or self.shares_experts:
            self.mesh.replicas.all_reduce(square)
        return self.mesh.parts.all_reduce(square)[0].sqrt()

    # Checkpoints

    def weights(self) -> dict[str, Tensor] | None:
        """Return every whole parameter on the CPU of the first rank, nothing on others; None if each rank has them all.
        All ranks call it."""
        if isinstance(self.spread, Sharded):
            found = self.spread.state()
            return self._together(found) if self.cut else found
        if not self.cut:
            return None
        return self._together({name: parameter.detach() for name, parameter in self.parameters.items()})

    def whole_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the optimizer's whole state (``name/kind``), as of a run on one rank, on the CPU of the first rank,
        nothing on others. All ranks call it."""
        if self.spread is not None and not self.shares_experts:
            tensors = self.spread.whole_state(tensors)
        if not self.cut:
            return on_cpu(tensors) if self.mesh.rank == 0 else {}
        return self._together(tensors)

    def own_state(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the part of a whole state that this rank updates."""
        found = tensors
        if self.cut:
            cut: dict[str, Tensor] = {}
            for name in tensors:
                parameter = name.rpartition("/")[0]
                part = self._part_of(parameter, self.shards) if parameter in self.parameters else None
                if part is not None:
                    cut[name] = tensors[name][part].clone()
            found = cut
        return found if self.spread is None else self.spread.own_state(found)

    def _together(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of all parts, of the form of parameters and by their names, put together."""
        group = self.mesh.parts
        if self.shares_experts:
            group = self.mesh.data
            if group.rank:
                tensors = {name: t for name, t in tensors.items() if self._own_experts(name)}
        elif self.mesh.replicas.rank:  # the first ranks of all parts have everything between them
            return {}
        parts = gather_tensors(group, {f"{group.rank:06}/{name}": tensor for name, tensor in tensors.items()})
        found: dict[str, Tensor] = {}
        for key, tensor in parts.items():
            place, _, name = key.partition("/")
            shape = self.shapes[name.partition("/")[0]]
            if name not in found:
                found[name] = torch.empty(shape, dtype=tensor.dtype)
            part = self._part_of(name.partition("/")[0], self._shards_of(group.ranks[int(place)]))
            assert part is not None
            found[name][part] = tensor
        return found


def _held(model: Decoder) -> StoredWeights:
    """Yield the weights of a model in memory, as those of a file."""
    for name, parameter in model.named_parameters():
        yield name, stored_tensor(parameter.detach())
