"""Which part of a model a rank has: all parts together are the model, once, and each rank's fits its memory account."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from tiny_checkpoints import save_mxfp4

from transect.checkpoints.layouts import held_layouts
from transect.checkpoints.load import fill, load_model, stored_weights
from transect.checkpoints.resolve import resolve
from transect.costs.memory.serving import ServingPlan, smallest_layout, stages
from transect.costs.model import weight_bytes
from transect.costs.storage import storage_for
from transect.models.decoder import Decoder
from transect.models.stored import BlockCodes, Codes4, Codes8, Stored
from transect.models.weights.kinds import kinds_for
from transect.ops.opset import resolve_ops
from transect.parallel.group import Group
from transect.parallel.load import part_of, shard_embedding, shard_weights
from transect.parallel.tensor import sharded_kinds
from transect.spec.layouts.ranks import RankLayout
from transect.spec.layouts.shards import Shard, WeightPart, vocabulary_part
from transect.spec.model import ModelConfig
from transect.spec.moe import MoEConfig
from transect.spec.numbers.gguf import UNITS
from transect.spec.numbers.layouts import BlockLayout, GroupLayout, ScaledLayout
from transect.spec.shapes import PRESETS
from transect.spec.weights import weight_shapes

MODEL = ModelConfig("qwen3", 101, 64, 3, 8, 2, 16, 96, 128, qk_norm=True, tied_embeddings=True, sliding_window=8,
                    full_attention_layers=(1,))  # fmt: skip


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (4, 1), (8, 3), (1, 3), (2, 2)])
@pytest.mark.parametrize("tied", [True, False])
def test_all_parts_are_the_model(ranks, stages, tied):
    model = replace(MODEL, tied_embeddings=tied)
    shards = [Shard(model, rank, ranks, stage, stages) for stage in range(stages) for rank in range(ranks)]
    for name, shape in weight_shapes(model).items():
        held = torch.zeros(shape)
        for shard in shards:
            part = shard.part(name, shape)
            if part is not None:
                held[part[: len(shape)]] += 1
        wanted = 1 if "embed" not in name else 1 + (tied and stages > 1)
        if any(word in name for word in ("norm", "position")):
            wanted = ranks * (stages if name.startswith("norm") else 1)
        if ".k." in name or ".v." in name:
            wanted = max(1, ranks // model.n_kv_heads)  # key heads are repeated
        assert torch.all(held == wanted), name


EXPERTS = {
    "gpt_oss": replace(MODEL, architecture="gpt_oss", qk_norm=False, attention_sinks=True, tied_embeddings=False,
                       moe=MoEConfig(8, 2, 24, router_bias=True, bias=True, clamp=7.0)),
    "qwen2_moe": replace(MODEL, architecture="qwen2_moe", qk_norm=False,
                         moe=MoEConfig(8, 2, 24, shared_dim=40, shared_gate=True, dense_layers=(1,))),
    "olmoe": replace(MODEL, architecture="olmoe", qk_norm_whole=True, moe=MoEConfig(8, 2, 24)),
}  # fmt: skip


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("family", EXPERTS)
def test_all_parts_of_experts_are_the_experts(family, shared):
    """Each number once, in what the four ranks have of a model with experts; and each rank's model fits its part."""
    model = EXPERTS[family]
    shards = [Shard(model, rank, 4, 0, 1, rank if shared else 0, 4 if shared else 1) for rank in range(4)]
    weights = {name: torch.arange(math.prod(shape)).view(shape) for name, shape in weight_shapes(model).items()}
    seen = {name: [] for name in weights}
    for shard in shards:
        stored = ((n, Stored(w.shape, lambda r, c, w=w: w[r] if w.ndim == 1 else w[r, c])) for n, w in weights.items())
        for name, part in shard_weights(stored, shard):
            values = part.read()
            assert tuple(values.shape) == part.shape == shard.shapes()[name]
            if values.ndim == 2 and len(values) > 2:
                assert torch.equal(part.read(slice(1, len(values) - 1)), values[1:-1])
            seen[name].append(values.flatten())
        own = Decoder(shard.local, "meta", kinds=sharded_kinds(None, shard, FakeMesh.tensor)).state_dict()
        layers = {n.replace(".inner", ""): tuple(v.shape) for n, v in own.items() if n.startswith("layers.")}
        assert layers == {n: shape for n, shape in shard.shapes().items() if n.startswith("layers.")}
    for name, parts in seen.items():
        whole = any(word in name for word in ("router", "norm", "o.bias"))
        if not whole and ".k." not in name and ".v." not in name:
            assert torch.equal(torch.cat(parts).sort().values, torch.arange(weights[name].numel())), name


def test_what_cannot_be_cut_names_what_can():
    model = EXPERTS["qwen2_moe"]
    with pytest.raises(ValueError, match=r"24 units of an expert, 40 units of shared experts.* can be 1, 2, 4, 8$"):
        Shard(model, 0, 3)
    with pytest.raises(ValueError, match=r"3 ranks cannot share 8 experts evenly.*data_parallel_size be 2"):
        Shard(model, 0, 1, 0, 1, 0, 3)
    with pytest.raises(ValueError, match="qwen3 model has no experts"):
        Shard(MODEL, 0, 2, 0, 1, 0, 2)


@pytest.mark.parametrize("vocab", [3, 96, 101, 50257, 128256])
def test_the_vocabulary_is_cut_without_gaps(vocab):
    for ranks in (1, 2, 3):
        parts = [vocabulary_part(vocab, rank, ranks) for rank in range(ranks)]
        assert [parts[0].start, parts[-1].stop] == [0, vocab]
        assert all(a.stop == b.start and a.start < a.stop for a, b in itertools.pairwise(parts))


class FakeMesh:
    """A rank of four whose group never meets: for what is built, not for what is computed."""

    tensor = Group(tuple(range(4)), 1, None)


def test_a_rank_has_no_more_memory_than_its_account_says():
    shard = Shard(MODEL, 1, 4, 0, 1)
    kinds = sharded_kinds(None, shard, FakeMesh.tensor)
    model = Decoder(shard.local, "meta", torch.float32, ops=resolve_ops("cpu"), kinds=kinds)
    shard_embedding(model, shard, FakeMesh, torch.float32)
    assert model.nbytes == weight_bytes(MODEL, storage_for(4), shard.shapes())
    own = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert {n.replace(".inner", "").replace(".table", ""): s for n, s in own.items() if n != "head.inner.weight"} == (
        shard.shapes()
    )


def test_a_rank_reads_its_part_and_nothing_else():
    read = []

    def stored(shape):
        return Stored(shape, lambda rows, columns: read.append((shape, rows, columns)) or torch.zeros(shape)[rows])

    weights = ((name, stored(shape)) for name, shape in weight_shapes(MODEL).items())
    for name, each in shard_weights(weights, Shard(MODEL, 1, 2, 1, 2)):
        if name == "layers.0.attention.q.weight":  # its first layer is the model's third
            assert each.shape == (64, 64)
            each.read(slice(3, 5))
    assert read == [((128, 64), slice(67, 69), slice(0, 64))]


@pytest.mark.parametrize("kind", ["blocks", "8 bits", "4 bits"])
def test_a_part_of_each_expert_stays_packed(kind):
    """Two experts of 6 rows, of which the second rank of two has the last 3 each."""
    rows = torch.arange(12.0)
    layout = {"blocks": BlockLayout(UNITS["Q4_0"]), "4 bits": GroupLayout(32), "8 bits": ScaledLayout(fp8=True)}[kind]

    def codes(part, columns):
        own = rows[part, None] + torch.arange(64.0)[columns]
        if kind == "blocks":
            return BlockCodes(layout, own)
        return Codes8(layout, own, rows[part]) if kind == "8 bits" else Codes4(layout, own, own[:, :2], own[:, 2:4])

    part = part_of(Stored((12, 64), lambda *_: None, layout, codes), WeightPart(slice(3, 6), slice(None), 2))
    found = part.codes(slice(1, 6), slice(32, 64))
    whole = codes(slice(None), slice(32, 64))
    wanted = [4, 5, 9, 10, 11]
    assert part.shape == (6, 64) and part.layout is layout and type(found) is type(whole)
    for name in ("blocks",) if kind == "blocks" else ("codes", "scale"):
        assert torch.equal(getattr(found, name), getattr(whole, name)[wanted])


def test_experts_in_mxfp4_are_cut_as_they_are_packed(tmp_path):
    """Their values are those of the whole model's rows (gate, up) and columns (down)."""
    save_mxfp4(tmp_path, intermediate_size=128)
    source = resolve(str(tmp_path))
    kinds = kinds_for(None, "cpu", layouts=held_layouts(source))
    shard, group = Shard(source.config, 1, 2), Group((0, 1), 1, None)
    ops = resolve_ops("cpu")
    model = Decoder(shard.local, torch.device("meta"), torch.float32, ops=ops, kinds=sharded_kinds(kinds, shard, group))
    shard_embedding(model, shard, type("Mesh", (), {"tensor": group}), torch.float32)
    fill(model.to_empty(device="cpu"), shard_weights(stored_weights(source), shard))
    whole = load_model(source, native=False, dtype="float32").layers[0].mlp
    own = model.layers[0].mlp
    for name in ("experts_gate", "experts_up", "experts_down"):
        packed, experts = getattr(own, name), source.config.moe.experts
        values = getattr(whole, name).dense().unflatten(0, (experts, -1))
        part = values[:, :, 64:] if name == "experts_down" else values[:, 64:]
        assert packed.format.name == "MXFP4" and torch.equal(packed.dense(), part.flatten(0, 1))


def test_the_smallest_layout_that_fits():
    model = PRESETS["llama-3.1-8b"]
    storage = storage_for(2)
    plan = ServingPlan(weights=int(weight_bytes(model, storage)), max_num_seqs=16, max_num_batched_tokens=2048)
    assert smallest_layout(model, plan, storage, 80 * 2**30) == RankLayout(1)
    found = smallest_layout(model, plan, storage, 8 * 2**30)
    assert found is not None and found.size > 2
    whole = [stage.estimate.fits for stage in stages(model, found, plan, storage, 8 * 2**30)]
    assert all(whole) and len(whole) == found.pipeline
    for fewer in range(1, found.size):
        assert not all(s.estimate.fits for s in stages(model, RankLayout(pipeline=fewer), plan, storage, 8 * 2**30))
    assert smallest_layout(model, plan, storage, 2**30, most=8) is None


def test_shares_of_the_weights_add_up():
    storage = storage_for(2)
    parts = [weight_bytes(MODEL, storage, Shard(MODEL, rank, 2).shapes()) for rank in range(2)]
    doubled = sum(2 * math.prod(s) for n, s in weight_shapes(MODEL).items() if "norm" in n)
    assert sum(parts) == weight_bytes(MODEL, storage) + doubled


def test_what_gpus_share_is_in_the_account():
    model = PRESETS["llama-3.1-8b"]
    plan = ServingPlan(weights=16 << 30, max_num_seqs=256)
    found = stages(model, RankLayout(tensor=2), plan, storage_for(2), 80 << 30)[0].estimate.account
    shared = next(term.bytes for term in found.terms if term.name == "shared memory")
    assert shared == 256 + (64 << 20) + 256 * 64128 * 2
    for layout, backend in ((RankLayout(pipeline=2), "gpu"), (RankLayout(tensor=2), "cpu")):
        account = stages(model, layout, replace(plan, backend=backend), storage_for(2), 80 << 30)[0].estimate.account
        assert "shared memory" not in [term.name for term in account.terms]
