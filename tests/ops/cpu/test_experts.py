"""Mixtures of experts in the C++ stack, against the same layers by torch operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from transect.models.context import PagedContext
from transect.models.decoder import Decoder
from transect.models.native import NativeStack, native_model, refusal, run_natively
from transect.ops.cpu.library import Library, load
from transect.ops.opset import resolve_ops
from transect.spec.model import ModelConfig
from transect.spec.moe import MoEConfig

CONFIG = ModelConfig(
    architecture="qwen3_moe", vocab_size=61, dim=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=80,
    max_position=128, qk_norm=True, moe=MoEConfig(6, 2, 32),
)  # fmt: skip
MIXTURES = {
    "softmax": MoEConfig(6, 2, 32),
    "softmax of all, experts without rows": MoEConfig(40, 3, 16, renormalize=False, scale=1.5, router_bias=True),
    "sigmoid, groups": MoEConfig(
        16, 4, 32, score="sigmoid", groups=4, groups_kept=2, score_bias=True, scale=2.5, shared_dim=48
    ),
    "groups of one": MoEConfig(5, 2, 16, score="sigmoid", groups=5, groups_kept=3, renormalize=False),
    "a gate of shared experts, one dense layer": MoEConfig(
        7, 7, 16, shared_dim=32, shared_gate=True, bias=True, dense_layers=(0,)
    ),
    "gpt-oss": MoEConfig(8, 3, 16, clamp=1.5, bias=True, router_bias=True),
}
ATTENTION: dict[str, dict[str, Any]] = {
    "gpt-oss": {"attention_sinks": True, "qk_norm": False, "sliding_window": 9, "full_attention_layers": (1,)},
    "softmax of all, experts without rows": {"qk_norm_whole": True},
}
"""Attention beside some of the mixtures, as its family has it."""
LENGTHS = (1, 2, 17, 40)
"""Tokens of the sequences of a batch; 40 tokens to 2 of 6 experts are many rows of one."""


@torch.no_grad()
def drawn(config: ModelConfig) -> Decoder:
    """A model by torch operators, with random numbers in everything that a router and a bias have."""
    plain = Decoder(config, dtype=torch.float32, ops=resolve_ops("cpu", batch_invariant=True)).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    plain.init_weights(0.3, generator)
    for name, values in plain.state_dict().items():
        if name.endswith(("bias", "sinks")):
            values.copy_(0.3 * torch.randn(values.shape, generator=generator))
    return plain


@torch.no_grad()
def on(library: Library, plain: Decoder, *, half: bool = False) -> Decoder:
    """The same model in the C++ stack, ``half``: with matrices in bfloat16."""
    model = native_model(plain.config, library, torch.float32, half=half)
    values = {name: weight.dense() for name, weight in plain.weights()}
    state = plain.state_dict()
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    for name, weight in model.weights():
        weight.load(values[name], None)  # type: ignore[arg-type]
    model.embed.load(plain.embed.weight, None)  # type: ignore[operator, arg-type]
    return run_natively(model, library, torch.float32)


@torch.no_grad()
def hidden(model: Decoder, lengths: tuple[int, ...], start: int = 0) -> Tensor:
    """Hidden states of whole sequences; ``start``: number of the first one, on which its tokens depend."""
    columns = -(-max(lengths) // 16)
    caches = model.new_kv_cache(len(lengths) * columns, 16, torch.float32)
    tables = torch.arange(len(lengths) * columns, dtype=torch.int32).view(-1, columns)
    starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    context = PagedContext(*caches, tables, starts, torch.tensor(lengths, dtype=torch.int32), model.ops)
    tokens = [torch.arange(length) * 7 + 13 * (start + i) for i, length in enumerate(lengths)]
    return model(torch.cat(tokens) % 61, context.positions(), context)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_are_those_of_torch_and_the_same_in_any_batch(library: Library, name: str) -> None:
    config = replace(CONFIG, moe=MIXTURES[name], **ATTENTION.get(name, {}))
    assert refusal(config, 16) is None
    plain = drawn(config)
    model = on(library, plain)
    assert isinstance(model.stack, NativeStack)
    together = hidden(model, LENGTHS)
    torch.testing.assert_close(together, hidden(plain, LENGTHS), rtol=1e-4, atol=1e-4)
    for i, part in enumerate(together.split(LENGTHS)):
        assert torch.equal(hidden(model, LENGTHS[i : i + 1], start=i), part)


def test_threads_do_not_change_the_bits() -> None:
    plain = drawn(replace(CONFIG, moe=MIXTURES["sigmoid, groups"]))
    one, five = (hidden(on(load(threads), plain), LENGTHS) for threads in (1, 5))
    assert torch.equal(one, five)


@pytest.mark.parametrize("name", ["softmax", "a gate of shared experts, one dense layer"])
def test_inputs_in_bfloat16_are_the_same_in_any_batch(name: str) -> None:
    library = load(2, bfloat16=True)
    if not library.bfloat16:
        pytest.skip("this processor has no AVX512-BF16")
    plain = drawn(replace(CONFIG, moe=MIXTURES[name]))
    exact, rounded = (hidden(on(each, plain, half=True), LENGTHS) for each in (load(2), library))
    model = on(library, plain, half=True)
    assert 0 < (rounded - exact).abs().mean() < 0.05 * exact.abs().mean()
    for i, part in enumerate(rounded.split(LENGTHS)):
        assert torch.equal(hidden(model, LENGTHS[i : i + 1], start=i), part)


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"expert_dim": 24}, "experts of a width that is not a multiple of 16"),
        ({"shared_dim": 8}, "experts of a width that is not a multiple of 16"),
        ({"weighs_inputs": True}, "router weights on the inputs of experts"),
        ({"ranks": 2}, "experts that ranks share"),
    ],
)
def test_other_mixtures_are_refused(changes: dict[str, object], lacks: str) -> None:
    moe = replace(MIXTURES["softmax"], **changes)  # type: ignore[arg-type]
    assert refusal(replace(CONFIG, moe=moe), 16) == f"the C++ kernels do not have {lacks}"
