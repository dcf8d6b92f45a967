"""Merged layers whose matrices are cut, or gathered layer by layer, give the gradients of plain ones."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from thread_group import on_threads

pytest.importorskip("triton")
from triton.runtime import interpreter

from transect.models.context import VarlenContext
from transect.models.decoder import Decoder
from transect.ops.lang.jit import INTERPRETED
from transect.ops.opset import resolve_ops
from transect.parallel.group import Group
from transect.parallel.parallelize import Parallel
from transect.parallel.plan import ParallelPlan
from transect.parallel.sharded import Sharded
from transect.spec.layouts.ranks import RankLayout
from transect.spec.model import ModelConfig
from transect.train.model import merged_products
from transect.train.model.merged_layers import MergedLayers

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter (TRITON_INTERPRET=1)"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CONFIG = ModelConfig(
    architecture="llama", vocab_size=32, dim=32, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=16, ffn_dim=64,
    max_position=64,
)  # fmt: skip
TOKENS = 12


@pytest.fixture(autouse=True)
def one_kernel_at_a_time(monkeypatch):
    lock = threading.RLock()

    def locked(call):
        def alone(*given, **named):
            with lock:
                return call(*given, **named)

        return alone

    for kind, name in ((interpreter.GridExecutor, "__call__"), (interpreter.InterpretedFunction, "rewrite")):
        monkeypatch.setattr(kind, name, locked(getattr(kind, name)))
    monkeypatch.setattr(merged_products.matmul, "matmul", by_torch)  # the interpreter is slow at it
    torch.set_num_threads(1)


def by_torch(x, weight, out=None):
    return torch.mm(x, weight.T, out=out)


def model_of(config=CONFIG):
    model = Decoder(config, device="cpu", dtype=torch.float32, ops=resolve_ops("cpu"))
    return model.init_weights(std=0.3, generator=torch.Generator().manual_seed(1))


def passed(model, ranks=1, parameters=None):
    """Forward and backward; the hidden states and the gradients."""
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 32, (TOKENS,), generator=generator)
    bounds = torch.tensor([0, 5, TOKENS], dtype=torch.int32)
    positions = torch.cat([torch.arange(5), torch.arange(TOKENS - 5)])
    hidden = model(tokens, positions, VarlenContext(bounds))
    weights = torch.randn(hidden.shape, generator=generator)
    ((hidden * weights).sum() / ranks).backward()
    return hidden.detach(), {name: p.grad for name, p in parameters.items() if p.grad is not None}


def same(found, expected):
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        atol = 2e-5 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(found[name], gradient, atol=atol, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("sequence", "keep"), [(False, "none"), (True, "selective")])
def test_ranks_that_share_matrices(sequence, keep):
    def work(group):
        found = []
        for merged in (False, True):
            layout, alone = RankLayout(tensor=2), Group.alone()
            mesh = SimpleNamespace(
                layout=layout, place=layout.place(group.rank), world=group, parts=group, tensor=group, links=[],
                context=alone, pipeline=alone, data=alone, replicas=alone,
            )  # fmt: skip
            parallel = Parallel(model_of(), mesh, ParallelPlan(sequence=sequence))
            if merged:
                parallel.model.stack = MergedLayers(parallel.model, keep)
            hidden, gradients = passed(parallel.model, 2, parallel.parameters)
            parallel.complete(gradients)
            found.append((hidden, gradients))
        return found

    for plain, merged in on_threads(2, work):
        torch.testing.assert_close(merged[0], plain[0], atol=2e-5, rtol=1e-3)
        same(merged[1], plain[1])


@pytest.mark.parametrize(("ranks", "keep", "change"), [(1, "full", {"qkv_bias": True}), (2, "none", {})])
def test_layers_that_are_whole_while_they_run(ranks, keep, change):
    config = replace(CONFIG, **change, architecture="qwen2") if change else CONFIG
    expected_hidden, expected = passed(model_of(config))
    expected["head.weight"] = torch.zeros(config.vocab_size, config.dim)  # nothing asks it

    def work(group):
        group = group if ranks > 1 else Group.alone()
        model = model_of(config)
        sharded = Sharded(group, model)
        model.stack = MergedLayers(model, keep, units=sharded)
        with torch.no_grad():  # an evaluation before: no layer stays whole
            model(torch.arange(4), torch.arange(4), VarlenContext(torch.tensor([0, 4], dtype=torch.int32)))
        assert not any(unit.whole for unit in sharded.layers)
        hidden, _ = passed(model)
        assert not any(unit.whole for unit in sharded.layers)
        sharded.collect()
        return hidden, sharded.reduce(), {name: sharded._bounds[name] for name in sharded.owned}

    together = on_threads(ranks, work)
    for hidden, gradients, bounds in together:
        torch.testing.assert_close(hidden, expected_hidden, atol=2e-5, rtol=1e-3)
        cut = {name: ranks * expected[name].reshape(-1)[slice(*ends)] for name, ends in bounds.items()}
        same(gradients, cut)
    assert sum(g.numel() for _, gradients, _ in together for g in gradients.values()) == sum(
        g.numel() for g in expected.values()
    )
