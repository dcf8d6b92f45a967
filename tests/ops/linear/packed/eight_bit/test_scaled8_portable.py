"""``scaled8_portable.cu``: its tilings everywhere, the source on a processor, the kernel on a GPU since Ampere."""

from types import SimpleNamespace

import cuda_host
import pytest
import torch
import torch.nn.functional as F
from cuda_kernels import loaded, miss

from transect.hardware.targets import TARGETS
from transect.ops.linear.few_rows.triton import Counters
from transect.ops.linear.packed.eight_bit import scaled8, scaled8_portable
from transect.ops.linear.packed.eight_bit.scaled8_portable import SPAN, PortableRows8
from transect.ops.linear.packed.eight_bit.scaled8_rounding import rounded
from transect.ops.linear.packed.portable_tiles import TilesTiling, choose_tiles, tiles_bytes
from transect.ops.numerics import sample

SMALL = TARGETS["sm_89"].block_bytes


def weight_of(n: int, k: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of all sizes, also below the normal range, and scales."""
    generator = torch.Generator().manual_seed(n + k)
    values = torch.randn(n, k, generator=generator) * 2.0 ** torch.randint(-9, 1, (n, k), generator=generator)
    codes, scale = rounded(values, True)
    return codes.to(device), (scale / k**0.5).to(device)


def gate_of(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    gate, up = scaled8.reference(x.double(), codes, scale, fp8=True).chunk(2, 1)
    return F.silu(gate) * up


def test_tiles_fit() -> None:
    for m in (9, 16, 17, 33, 64):
        for n, k in [(6144, 4096), (28672, 4096), (4096, 14336), (48, 128)]:
            tiling = choose_tiles(m, n, k, SPAN, 132, SMALL)
            assert tiles_bytes(tiling, SPAN) <= SMALL and 1 <= tiling.blocks <= 132


def test_what_it_does_not_take_is_said() -> None:
    codes, scale = weight_of(32, 128)
    x = sample(9, 128).bfloat16()
    assert scaled8_portable.refusal(x, codes, scale) is None
    assert "multiple of 64" in str(scaled8_portable.refusal(x[:, :96], codes[:, :96].contiguous(), scale))
    assert "of rows" in str(scaled8_portable.refusal(x, codes, scale[None]))
    assert "bfloat16" in str(scaled8_portable.refusal(x.float(), codes, scale))


@pytest.mark.parametrize(("m", "n", "k"), [(9, 288, 640), (16, 37, 64), (20, 320, 192), (40, 96, 256)])
def test_products_on_a_processor(monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int) -> None:
    """Also with rows that are not there, with parts of K, and with the gate."""
    monkeypatch.setattr(scaled8_portable, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    kernel = object.__new__(PortableRows8)
    kernel._target, kernel._counters = TARGETS["sm_89"], Counters()
    signature = "pppppppiiil" + "iii" + "iip"
    kernel._launch = cuda_host.Launcher("scaled8_portable", "transect_scaled8_portable", signature)
    codes, scale = weight_of(n, k)
    x, bias = sample(m, k).bfloat16(), sample(n, seed=2).bfloat16()
    want = scaled8.reference(x.double(), codes, scale, bias.double(), fp8=True)
    kernel._launch.reads((x, codes, scale, bias))
    assert miss(kernel(x, codes, scale, bias, tiling=TilesTiling(1, 1, 2)), want) < 4e-3
    kernel._launch.reads(())  # parts of sums are in memory of their own
    for seed in (1, 2):
        kernel._launch.draw(seed)
        assert miss(kernel(x, codes, scale, bias, tiling=TilesTiling(2, min(5, k // 64), 3)), want) < 4e-3
        assert miss(kernel(x, codes, scale, bias), want) < 4e-3
    if n % 32 == 0:
        assert miss(kernel(x, codes, scale, gated=True), gate_of(x, codes, scale)) < 6e-3


@pytest.mark.gpu
@pytest.mark.parametrize("m", [9, 16, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (6144, 4096), (28672, 4096), (4096, 14336)])
def test_error_is_that_of_rounding_the_result(m: int, n: int, k: int) -> None:
    kernel = loaded(PortableRows8)
    codes, scale = weight_of(n, k, "cuda")
    x = torch.randn(m, k, device="cuda").bfloat16()
    for gated in (False, True):
        want = gate_of(x, codes, scale) if gated else scaled8.reference(x.double(), codes, scale, fp8=True)
        got = kernel(x, codes, scale, gated=gated)
        assert miss(got, want) < 3e-3
        assert torch.equal(got, kernel(x, codes, scale, gated=gated))
