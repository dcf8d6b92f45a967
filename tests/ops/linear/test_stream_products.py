"""Products with the norms between them in their launches: what they refuse everywhere, their numbers on a GPU."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from cuda_kernels import loaded

from transect.hardware.targets import TARGETS
from transect.ops.linear import stream_products
from transect.ops.linear.few_rows import choices
from transect.ops.linear.few_rows.cuda import Beside, CudaRows, CudaTiling
from transect.ops.linear.stream_products import ResidualStream, StreamProducts
from transect.spec.shapes import PRESETS

EPS = 1e-5


def test_what_cannot_stand_beside_a_product_is_said() -> None:
    x, row = torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(32, dtype=torch.bfloat16)
    stream = torch.zeros(3, 32, dtype=torch.bfloat16)
    good = Beside(residual=stream, scale=row, squares=torch.zeros(3, 4))
    assert good.refusal(x, 32) is None
    assert "multiple of 16" in Beside(residual=stream[:, :24], scale=row[:24]).refusal(x, 24)
    assert "next norm's weight" in Beside(residual=stream).refusal(x, 32)
    assert "[3, 48]" in Beside(residual=stream, scale=row).refusal(x, 48)
    assert "contiguous" in Beside(residual=stream.T.contiguous().T, scale=row).refusal(x, 32)
    assert "multiple of 64" in Beside(squares=torch.zeros(3, 3)).refusal(x[:, :48], 32)
    assert "dtype" in Beside(residual=stream.float(), scale=row).refusal(x, 32)
    assert "float32" in Beside(squares=torch.zeros(3, 4, dtype=torch.bfloat16)).refusal(x, 32)


def test_nothing_runs_here_that_was_not_measured() -> None:
    products = StreamProducts(torch.device("cpu"), lambda m, n, k, gated: CudaTiling(2, 2, 2) if n == 32 else None)
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    assert not products.takes(x, [(32, 32, False), (48, 32, False)])
    assert not products.takes(torch.zeros(33, 32, dtype=torch.bfloat16), [(32, 32, False)])
    assert not products.takes(x.float(), [(32, 32, False)])
    with pytest.raises(ValueError, match="takes"):
        products.linear(ResidualStream(x, x, torch.zeros(3, 2), EPS), torch.zeros(48, 32))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b", "llama-3.2-1b"])
def test_one_row_of_a_model_runs_here_on_an_h200(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Measured or not."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("transect.hardware.device.own_target", lambda device: TARGETS["sm_90"])
    monkeypatch.setattr(choices, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(stream_products, "CudaRows", object)
    config, products = PRESETS[name], StreamProducts(torch.device("cuda", 0))
    d, f = config.dim, config.ffn_dim
    sizes = [(config.q_dim + 2 * config.kv_dim, d, False), (d, config.q_dim, False), (2 * f, d, True), (d, f, False)]
    assert products.takes(torch.zeros(1, d, dtype=torch.bfloat16), sizes)
    assert not products.takes(torch.zeros(1, d, dtype=torch.bfloat16), [*sizes, (d, d + 8, False)])
    choices.chosen.cache_clear()


def test_without_a_gpu_nothing_runs_here_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler() -> CudaRows:
        raise stream_products.Unavailable("no nvcc")

    monkeypatch.setattr(stream_products, "CudaRows", no_compiler)
    products = StreamProducts(torch.device("cpu"), lambda m, n, k, gated: CudaTiling(2, 2, 2))
    for _ in range(2):
        assert not products.takes(torch.zeros(1, 64, dtype=torch.bfloat16), [(64, 64, False)])
    assert caplog.text.count("no nvcc") == 1


ALONE = [CudaTiling(2, 2, 2, 4), CudaTiling(1, 4, 3), CudaTiling(2, 6, 4), CudaTiling(3, 3, 6)]
SHARED = [CudaTiling(2, 3, 2, 8, 4), CudaTiling(3, 2, 3, 4, 2), CudaTiling(2, 3, 4, 4, 8)]
"""Tilings of one rank and of several, of one group for a block and of more; deep rings take few rows."""


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 5, 8, 13, 17, 32])
@pytest.mark.parametrize(("dim", "width"), [(1024, 2048), (320, 576)])
def test_a_stream_is_what_norms_apart_make_of_it(m: int, dim: int, width: int) -> None:
    loaded(CudaRows)
    generator = torch.Generator("cuda").manual_seed(m + dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    x, residual, scale = normal(m, width), normal(m, dim), 1 + normal(dim) / 8
    inward, outward = normal(dim, width) * width**-0.5, normal(2 * width, dim) * dim**-0.5

    def exact(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In float64, or with torch's operators in bfloat16."""
        total = F.linear(x.to(dtype), inward.to(dtype)) + residual.to(dtype)
        normed = F.rms_norm(total, (dim,), scale.to(dtype), EPS)
        both = F.linear(normed, outward.to(dtype))
        return total, both, F.silu(both[:, :width]) * both[:, width:]

    want, of_torch = exact(torch.float64), exact(torch.bfloat16)
    limits = [2 * float((a.double() - b).norm()) for a, b in zip(of_torch, want, strict=True)]
    gated_tilings = cycle(tiling for tiling in ALONE if not tiling.refusal(m))
    for tiling, gates in zip(
        (tiling for tiling in ALONE + SHARED if not tiling.refusal(m)), gated_tilings, strict=False
    ):
        table = {(dim, width, False): tiling, (2 * width, dim, False): tiling, (2 * width, dim, True): gates}
        products = StreamProducts(torch.device("cuda", 0), lambda _, n, k, gated, table=table: table[n, k, gated])
        assert products.takes(residual, table) and not products.takes(residual.float(), table)
        runs = []
        for _ in range(3):
            stream = products.add(x, inward, residual, scale, EPS)
            runs.append((*stream[:3], products.linear(stream, outward), products.gate_up(stream, outward)))
        for got in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(got, runs[0], strict=True)), (tiling, gates)
        total, scaled, squares, both, gated = runs[0]
        for got, right, limit in zip((total, both, gated), want, limits, strict=True):
            assert (got.double() - right).norm() <= limit, (tiling, gates)
        torch.testing.assert_close(scaled, total * scale)
        torch.testing.assert_close(squares, total.float().square().view(m, -1, 16).sum(-1))
