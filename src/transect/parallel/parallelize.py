"""``parallelize(model, mesh, plan)``: a model that is to be trained, on the ranks of a mesh.

What comes of it is a ``Parallel``: this rank's part of the model, and what a training loop must know about the others:
which gradients are to be summed where, what counts in a norm, and how the parts make one whole again, as of one rank,
for a checkpoint.

* along ``tensor`` matrices are cut (``shards.py``, ``tensor.py``), and the loss is computed over a cut vocabulary
  (``split_loss.py``); with ``sequence`` the tokens between them are cut too (``differentiable.py``)
* along ``data`` whole micro-batches are shared (``replicas.py``, ``sharded.py``)

Parameters go by their names in the whole model, whatever the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..models.config import ModelConfig
from ..models.decoder import Decoder, Layer
from ..models.load import fill
from ..models.shapes import weight_shapes
from ..models.stored import Stored, StoredWeights
from .differentiable import entered, gathered, own_rows
from .layout import Layout
from .load import shard_embedding, shard_of, shard_weights
from .mesh import Mesh
from .replicas import Replicas, gather_tensors, on_cpu, square_of
from .sharded import Sharded
from .shards import Shard
from .split_loss import split_cross_entropy
from .tensor import GatheredShard, ShardedEmbedding, sharded_kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model is trained on the ranks of a mesh.

    Attributes:
        zero: what is cut over the ranks that share micro-batches, see ``replicas.py``.
        reduce_dtype: what gradients are summed in over them.
        sequence: ranks of a tensor group share the tokens between matrices.
        host: with ``zero`` 3, weights are in host memory and on the device a layer at a time.
    """

    zero: int = 0
    reduce_dtype: torch.dtype = torch.float32
    sequence: bool = False
    host: bool = False


def refusal(config: ModelConfig, layout: Layout, plan: Plan) -> str | None:
    """Why such a model cannot be trained in a layout, and the nearest that works; None: it can."""
    if layout.tensor > 1:
        possible = [n for n in range(1, layout.tensor) if config.n_kv_heads % n == 0 and _cuts(config, n)]
        nearest = f"set parallel.tensor to {possible[-1]}"
        if config.moe is not None:
            return "a model with experts is not cut between ranks for training: set parallel.tensor to 1"
        if config.n_kv_heads % layout.tensor:
            return f"{config.n_kv_heads} key heads cannot be cut for {layout.tensor} ranks: {nearest}"
        if not _cuts(config, layout.tensor):
            return (
                f"{config.n_heads} heads and {config.ffn_dim} feed-forward units cannot be cut for {layout.tensor} "
                f"ranks: {nearest}"
            )
        if config.qk_norm_whole or config.attention_sinks:
            odd = "norms of queries over all heads" if config.qk_norm_whole else "attention sinks"
            return f"a model with {odd} is not cut between ranks for training: set parallel.tensor to 1"
        if plan.zero == 3:
            return (
                "parallel.zero = 3 cuts whole layers, and parallel.tensor has cut them already: set parallel.zero to 2"
            )
    return None


def _cuts(config: ModelConfig, ranks: int) -> bool:
    try:
        config.local(ranks)
    except ValueError:
        return False
    return True


def parallelize(model: Decoder, mesh: Mesh, plan: Plan) -> Parallel:
    """This rank's part of a model, with the values that all ranks have alike.

    Args:
        model: whole, on its device, alike on every rank; where it is cut it is not needed any more.

    Raises:
        ValueError: the model cannot be trained so; the message names the nearest layout that works.
    """
    reason = refusal(model.config, mesh.layout, plan)
    if reason is not None:
        raise ValueError(reason)
    return Parallel(model, mesh, plan)


class Parallel:
    """A model on the ranks of a mesh, seen from one of them.

    Attributes:
        model: what this rank computes.
        parameters: what of it is trained, by the names in the whole model.
        spread: the sums over ranks with the same weights, after ``share``; None where there are no others.
    """

    def __init__(self, model: Decoder, mesh: Mesh, plan: Plan) -> None:
        self.whole_config, self.mesh, self.plan = model.config, mesh, plan
        self.shard = shard_of(model.config, mesh)
        self.cut = mesh.parts.size > 1
        """Whether the model is cut."""
        self.spread: Replicas | Sharded | None = None
        self.model = self._part(model) if self.cut else model
        self.parameters = {self._name(name): p for name, p in self.model.named_parameters() if p.requires_grad}
        self._shapes = weight_shapes(model.config)

    def _part(self, model: Decoder) -> Decoder:
        """The rank's part, filled."""
        mesh, shard, dtype, device = self.mesh, self.shard, model.norm.weight.dtype, model.device
        kinds = sharded_kinds(None, shard, mesh.tensor, sequence=self.plan.sequence)
        part = Decoder(shard.local, "meta", dtype, ops=model.ops, kinds=kinds)
        shard_embedding(part, shard, mesh, dtype)
        if isinstance(part.embed, ShardedEmbedding):
            part.embed.sequence = self.plan.sequence
        part = fill(part.to_empty(device=device), shard_weights(_held(model), shard))
        part.requires_grad_(True)
        if mesh.tensor.size > 1:
            self._join_halves(part)
        return part

    def _join_halves(self, part: Decoder) -> None:
        """What goes into cut matrices comes from norms: behind each of them the backward pass sums, and with
        ``sequence`` the rows of all ranks come together."""
        group, enter = self.mesh.tensor, gathered if self.plan.sequence else entered
        into: dict[int, nn.Module] = {id(part.norm): part.norm}
        for layer in part.layers:
            assert isinstance(layer, Layer)
            into |= {id(norm): norm for norm in (layer.attention_norm, layer.mlp_norm)}  # one where it does nothing
        for norm in into.values():
            norm.register_forward_hook(lambda _module, _inputs, out: enter(out, group))
        if self.plan.sequence and part.position_embed is not None:
            part.position_embed.register_forward_hook(lambda _module, _inputs, out: own_rows(out, group))

    # Names and parts

    def _name(self, own: str) -> str:
        """The name in the whole model of a parameter of this part."""
        return self.shard.whole_name(own.replace(".inner.", ".").replace(".table.", "."))

    def local(self, weights: StoredWeights) -> StoredWeights:
        """Of the weights of a whole model those of this part, under its names."""
        return shard_weights(weights, self.shard) if self.cut else weights

    def _replicated(self, name: str) -> bool:
        """Whether all ranks of the tensor group have the whole of a parameter."""
        part = self.shard.part(name, self._shapes[name])
        return part is not None and all(cut == slice(None) for cut in part[:2])

    def _partial(self, name: str) -> bool:
        """Whether a rank of the tensor group has only its own part of the gradient of what it has whole."""
        if self.mesh.tensor.size == 1 or not self._replicated(name):
            return False
        return self.plan.sequence or ".q_norm." in name or ".k_norm." in name

    # A step

    @property
    def token_multiple(self) -> int:
        """The number of tokens of a micro-batch must be a multiple of this."""
        return self.mesh.tensor.size if self.plan.sequence else 1

    def loss(self, hidden_TD: Tensor, labels_T: Tensor, ignore: int, whole: Callable[..., Tensor]) -> Tensor:
        """The mean loss over the labels; ``whole`` computes it where this rank has the whole head."""
        head = self.model.head
        if not isinstance(head, GatheredShard):
            return whole(hidden_TD, head.dense(), labels_T, ignore)
        first = self.shard.vocabulary.start
        return split_cross_entropy(hidden_TD, head.dense(), labels_T, ignore, first=first, group=self.mesh.tensor)

    def share(self, trained: Mapping[str, nn.Parameter], recompute: bool) -> Mapping[str, nn.Parameter]:
        """Before the first step, when all weights are there: share the work with ranks that have the same weights.

        Args:
            trained: by name.
            recompute: layers are computed again in the backward pass; looked at where weights are sharded.

        Returns:
            What this rank updates.
        """
        group, plan = self.mesh.replicas, self.plan
        if group.size == 1:
            return trained
        if plan.zero == 3:
            self.spread = Sharded(
                group, self.model, recompute=recompute, reduce_dtype=plan.reduce_dtype, host=plan.host
            )
        else:
            self.spread = Replicas(group, trained, plan.zero, plan.reduce_dtype)
        return self.spread.owned

    @torch.no_grad()
    def complete(self, gradients: Mapping[str, Tensor]) -> None:
        """Add up, in place, what ranks of the tensor group have in parts."""
        found = [gradients[name] for name in gradients if self._partial(name)]
        if not found:
            return
        flat = self.mesh.tensor.all_reduce(torch.cat([gradient.reshape(-1).float() for gradient in found]))
        for gradient, values in zip(found, flat.split([g.numel() for g in found]), strict=True):
            gradient.copy_(values.view_as(gradient))

    @torch.no_grad()
    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The 2-norm of all ranks' gradients together, each number counted once: a float32 scalar, alike on all."""
        first = self.mesh.tensor.rank == 0
        mine = {name: g for name, g in gradients.items() if first or not self._replicated(name)}
        return self.norm_of(square_of(mine, self.model.device))

    @torch.no_grad()
    def norm_of(self, square: Tensor) -> Tensor:
        """``norm`` of gradients whose squares add up to ``square`` on this rank."""
        square = square.reshape(1).to(self.model.device)
        if self.spread is not None and self.plan.zero:
            self.mesh.replicas.all_reduce(square)
        return self.mesh.parts.all_reduce(square)[0].sqrt()

    # Checkpoints

    def weights(self) -> dict[str, Tensor] | None:
        """Every whole parameter on the CPU of the first rank, nothing on others; None where each rank has them all. All
        ranks call it."""
        if isinstance(self.spread, Sharded):
            return self.spread.state()
        if not self.cut:
            return None
        return self._together({name: parameter.detach() for name, parameter in self.parameters.items()})

    def whole_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The optimizer's whole state (``name/kind``), as of a run on one rank, on the CPU of the first rank, nothing
        on others. All ranks call it."""
        if self.spread is not None:
            tensors = self.spread.whole_state(tensors)
        if not self.cut:
            return on_cpu(tensors) if self.mesh.world.rank == 0 else {}
        return self._together(tensors)

    def own_state(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Of a whole state what this rank updates."""
        found = tensors
        if self.cut:
            cut: dict[str, Tensor] = {}
            for name, tensor in tensors.items():
                part = self.shard.part(name.rpartition("/")[0], tuple(tensor.shape))
                if part is not None:
                    cut[name] = tensor[part[:2][: tensor.ndim]].clone()
            found = cut
        return found if self.spread is None else self.spread.own_state(found)

    def _together(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all parts, of the form of parameters and by their names, put together."""
        group = self.mesh.parts
        if self.mesh.replicas.rank:  # the first ranks of all parts have everything between them
            return {}
        parts = gather_tensors(group, {f"{group.rank:06}/{name}": tensor for name, tensor in tensors.items()})
        found: dict[str, Tensor] = {}
        for key, tensor in parts.items():
            place, _, name = key.partition("/")
            shape = self._shapes[name.partition("/")[0]]
            if name not in found:
                found[name] = torch.empty(shape, dtype=tensor.dtype)
            part = self._shard_of(group.ranks[int(place)]).part(name.partition("/")[0], shape)
            assert part is not None
            found[name][part[:2][: len(shape)]] = tensor
        return found

    def _shard_of(self, rank: int) -> Shard:
        """The part of another rank."""
        layout = self.mesh.layout
        place = layout.place(rank)
        return Shard(self.whole_config, place.tensor, layout.tensor, place.pipeline, layout.pipeline)


def _held(model: Decoder) -> Iterator[tuple[str, Stored]]:
    """The weights of a model in memory, as those of a file."""

    def stored(values: Tensor) -> Stored:
        if values.ndim == 1:
            return Stored(tuple(values.shape), lambda rows, _columns: values[rows])
        return Stored(tuple(values.shape), lambda rows, columns: values[rows, columns])

    for name, parameter in model.named_parameters():
        yield name, stored(parameter.detach())
