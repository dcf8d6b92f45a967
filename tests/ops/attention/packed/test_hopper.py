"""The Hopper kernel: what it takes, and on a GPU that it is right and gives the same bits in every run."""

import pytest
import torch

from transect.ops.attention.packed import flash_attention as fa
from transect.ops.attention.packed import hopper as hopper
from transect.ops.registry import Unavailable

ON_HOPPER = hopper.device_refusal() is None
NEEDS_HOPPER = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")


@pytest.mark.skipif(ON_HOPPER, reason="this machine has a Hopper GPU")
def test_elsewhere_it_says_why_it_cannot_run() -> None:
    q = torch.randn(5, 2, 64, dtype=torch.bfloat16)
    assert not hopper.takes(q, q, q)
    with pytest.raises(Unavailable, match="Hopper"):
        hopper.available(hopper.forward)()
    with pytest.raises(ValueError, match=r"Hopper.*flash_attention\.forward"):
        hopper.forward(q, q, q, torch.tensor([0, 5], dtype=torch.int32), 0.125)


@pytest.mark.parametrize(
    ("heads", "group", "tokens", "documents"), [(32, 4, 8192, 1), (16, 1, 65536, 1), (6, 3, 64, 9)]
)
def test_heads_taken_together_share_their_keys(heads: int, group: int, tokens: int, documents: int) -> None:
    share = hopper.share_of(heads, group, tokens, documents, 128)
    assert heads % share == 0
    assert share % group == 0
    key_bytes = share // group * 2 * tokens // documents * 128 * 2
    assert share == group or key_bytes <= 2**24


@pytest.mark.gpu
@NEEDS_HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [64, 96, 128])
@pytest.mark.parametrize("lengths", [(300, 1, 699), (1024,), (7, 4000, 129), 50 * (64,)], ids=str)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 100), (False, 300), (True, 1)])
def test_right_and_the_same_in_every_run(
    dtype: torch.dtype, size: int, lengths: tuple[int, ...], causal: bool, window: int | None
) -> None:
    cu = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).cuda()
    joined = torch.randn(sum(lengths), 6 + 2 + 2, size, device="cuda").to(dtype)
    q, k, v = joined.split((6, 2, 2), dim=1)
    assert hopper.takes(q, k, v)
    exact = fa.reference(q.double(), k.double(), v.double(), cu, size**-0.5, causal, window)
    other, other_lse = fa.forward(q, k, v, cu, size**-0.5, causal, window, tiling=fa.choose(q))
    for parts in (2, 3) if size == 64 else (2,):
        runs = [hopper.forward(q, k, v, cu, size**-0.5, causal, window, parts=parts) for _ in range(4)]
        error = [float((out.double() - exact).norm() / exact.norm()) for out in (runs[0][0], other)]
        assert error[0] <= 1.2 * error[1]
        assert float((runs[0][1] - other_lse).abs().max()) < 1e-3
        assert all(torch.equal(out, runs[0][0]) and torch.equal(lse, runs[0][1]) for out, lse in runs)


@pytest.mark.gpu
@NEEDS_HOPPER
def test_what_the_copy_engine_cannot_address_is_copied() -> None:
    q, k, v = (torch.randn(200, 64, h, device="cuda").bfloat16().transpose(1, 2) for h in (4, 2, 2))
    cu = torch.tensor([0, 200], dtype=torch.int32, device="cuda")
    assert not hopper.takes(q[:, :, 1:], k, v)
    same = hopper.forward(q.contiguous(), k.contiguous(), v.contiguous(), cu, 0.125)
    assert torch.equal(hopper.forward(q, k, v, cu, 0.125)[0], same[0])
    shared = k[:1].expand(200, -1, -1)
    assert not hopper.takes(q, shared, v)
    assert hopper.forward(q, shared, v, cu, 0.125)[0].isfinite().all()
    with pytest.raises(ValueError, match="3 parts are for heads of 64"):
        wide = torch.zeros(5, 2, 128, device="cuda", dtype=torch.float16)
        hopper.forward(wide, wide, wide, torch.tensor([0, 5], dtype=torch.int32, device="cuda"), 0.1, parts=3)
