"""What a step begins with in one launch: the rows that torch reads in three."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from effort import quick_first

pytest.importorskip("triton")

from transect.ops.attention.paged import rotary_kv_write  # noqa: F401  (they enter the registry)
from transect.ops.attention.paged.batch import PagedBatch
from transect.ops.lang.jit import INTERPRETED
from transect.ops.norm import rms_norm  # noqa: F401  (they enter the registry)
from transect.ops.position.embed_tokens import reference, triton_embed_tokens
from transect.ops.registry import get

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)
DEVICE = "cpu" if INTERPRETED else "cuda"


def inputs(tokens: int, width: int, angles: int, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)

    def draw(most: int, count: int) -> torch.Tensor:
        return torch.randint(0, most, (count,), generator=generator)

    made = {
        "ids": draw(50, tokens + 7),
        "places": draw(tokens + 7, tokens).to(torch.int32),
        "positions": draw(40, tokens).to(torch.int32),
        "embedding": torch.randn(50, width, generator=generator).to(dtype),
        "rotations": torch.randn(40, angles, generator=generator),
    }
    return {name: value.to(DEVICE) for name, value in made.items()}


@pytest.mark.parametrize(
    ("tokens", "sizes", "dtype"),
    quick_first(
        itertools.product([1, 5, 64], [(64, 16), (1024, 128), (100, 6)], [torch.float32, torch.float16]),
        [(1, (64, 16), torch.float32), (5, (1024, 128), torch.float16), (64, (100, 6), torch.float32)],
    ),
)
def test_rows_are_copied(tokens: int, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    width, angles = sizes
    made = inputs(tokens, width, angles, dtype)
    for wide in (False, True):
        given = dict(made, positions=made["positions"].long()) if wide else made
        for got, wanted in zip(triton_embed_tokens(**given), reference(**given), strict=True):
            assert torch.equal(got, wanted)
    made["places"][::3] = -1
    got, wanted = triton_embed_tokens(**made)[0], reference(**made)[0]
    assert torch.equal(got, wanted) and not got[::3].any() and (tokens == 1 or got[1].any())
    in_order = {name: value for name, value in made.items() if name != "places"}
    in_order["ids"] = made["ids"][:tokens]
    for got, wanted in zip(triton_embed_tokens(**in_order), reference(**in_order), strict=True):
        assert torch.equal(got, wanted)


def test_what_does_not_fit_is_said() -> None:
    made = inputs(5, 8, 4, torch.float32)
    with pytest.raises(ValueError, match="both tables must be matrices"):
        triton_embed_tokens(**made | {"rotations": made["rotations"][0]})
    with pytest.raises(ValueError, match="one position, and one place"):
        triton_embed_tokens(**made | {"places": made["places"][:4]})
    with pytest.raises(ValueError, match="one position"):
        triton_embed_tokens(**made | {"places": None})


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("dependent_launch", [False, True])
def test_a_step_from_its_ids_to_turned_heads_in_a_graph(dependent_launch: bool) -> None:
    """In a decoder, norm and rotation begin early where they are launched dependent, and miss nothing."""
    tokens, width, heads = 64, 1024, 8
    made = inputs(tokens, width, 128, torch.bfloat16)
    numbers = torch.arange(tokens + 1, dtype=torch.int32, device=DEVICE)
    batch = PagedBatch(numbers[:-1, None], numbers, torch.ones_like(numbers[:-1]), 16, max_query_len=1)
    caches = torch.zeros(2, tokens, heads, 16, 128, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.ones(width, device=DEVICE, dtype=torch.bfloat16)
    kernels = {name: get(name).implementations["triton"].load() for name in ("rms_norm", "rotary_kv_write")}
    drawn = made["ids"].clone()

    def step(dependent_launch: bool) -> torch.Tensor:
        x, rotation = triton_embed_tokens(**made, dependent_launch=dependent_launch)
        normed = kernels["rms_norm"](x, weight, 1e-6, dependent_launch=dependent_launch).view(tokens, heads, 128)
        cos, sin = rotation.chunk(2, dim=-1)
        return kernels["rotary_kv_write"](
            normed, normed, normed, cos, sin, *caches, batch, dependent_launch=dependent_launch
        )

    step(dependent_launch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turned = step(dependent_launch)
    for number in range(50):
        made["ids"].copy_(drawn.roll(number))
        made["positions"].copy_(made["positions"].roll(1))
        graph.replay()
        got = turned.clone()
        assert torch.equal(got, step(False)), number
