"""Ranks read their parts of a model's weights; none ever holds the whole."""

import torch
from allocated import shape_of
from parallel_runs import curve, same_curves
from tiny_llm import save_tiny_llm
from training_runs import tiny_run

from transect.checkpoints.resolve import resolve
from transect.models.decoder import Decoder
from transect.ops.opset import resolve_ops
from transect.parallel.group import Group
from transect.parallel.sharded import Sharded

torch.set_num_threads(1)
OPS = resolve_ops(torch.device("cpu"), ("torch",), differentiable=True)


def generator():
    return torch.Generator().manual_seed(3)


def test_weights_that_are_read_are_those_that_are_drawn(tmp_path):
    for tied in (False, True):
        folder = tmp_path / str(tied)
        folder.mkdir()
        save_tiny_llm(folder, tie_word_embeddings=tied)
        config = resolve(str(folder)).config
        drawn = dict(Decoder(config, ops=OPS).init_weights(generator=generator()).named_parameters())
        read = Decoder(config, device="meta", ops=OPS).drawn_weights(generator=generator())
        found = {name: stored.read().clone() for name, stored in read}
        assert found.keys() == drawn.keys()
        assert all(torch.equal(found[name], drawn[name]) for name in drawn)


def test_a_layer_is_cut_before_the_next_one_is_read(tmp_path):
    config = resolve(shape_of(tmp_path), load_format="dummy").config
    model = Decoder(config, device="meta", ops=OPS).to_empty(device="cpu")
    held = []

    def watched(weights):
        for name, stored in weights:
            storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in written.values()}
            held.append(sum(storages.values()))
            yield name, stored
            written[name] = parameters[name]

    parameters, written = dict(model.named_parameters()), {}
    weights = Decoder(config, device="meta", ops=OPS).drawn_weights(generator=generator())
    sharded = Sharded(Group.alone(), model, weights=watched(weights))
    layer, outside = 4 * 786432 + 2048, 4 * sharded.root.each
    assert max(held) <= layer + outside
    whole = dict(Decoder(config, ops=OPS).init_weights(generator=generator()).named_parameters())
    found = sharded.state()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_runs_from_random_weights_begin_alike(pair, tmp_path):
    """However a run is spread: each rank draws all of them, and keeps its part."""
    how = {"model": shape_of(tmp_path, num_hidden_layers=2), "load_format": "dummy", "task": "pretrain", "steps": 1}
    how |= {"accumulate": 2, "data": {"seq_len": 32, "micro_batch": 64}}
    one = curve(None, tiny_run(tmp_path, **how))
    for name, parallel in {"tensor": {"tensor": 2}, "zero": {"data": 2, "zero": 3}, "stages": {"pipeline": 2}}.items():
        two = curve(pair, tiny_run(tmp_path, run_dir=str(tmp_path / name), parallel=parallel, **how))
        same_curves(two[0], one[0])
