"""Keys and values of prompts copied out of their pages, and attention to the copies."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from transect.engine.gpu.step_plan import key_room
from transect.ops.attention.paged import gathered, prefill_hopper
from transect.ops.attention.paged.batch import KEY_TILE, PagedBatch
from transect.ops.attention.paged.paged_attention import PagedTriton, reference

ROWS = ((40, 40), (1, 7), (33, 130), (0, 0), (2, 129), (1, 90), (5, 256), (0, 0))
hopper = pytest.mark.skipif(prefill_hopper.device_refusal() is not None, reason=str(prefill_hopper.device_refusal()))


def paged(rows: tuple, kv_heads: int, d: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    """Caches of rows (tokens of this step, tokens in all) in scattered blocks of 16, NaN in slots that no row owns."""
    generator = torch.Generator().manual_seed(5)
    needed = [-(-length // 16) for _, length in rows]
    pool = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    tables = torch.full((len(rows), max(needed) + 2), 2**30, dtype=torch.int32)
    caches = torch.full((2, len(pool), kv_heads, 16, d), torch.nan)
    for row, (_, length) in enumerate(rows):
        for column in range(needed[row]):
            tables[row, column] = block = pool.pop()
            owned = min(16, length - column * 16)
            caches[:, block, :, :owned] = torch.randn(2, kv_heads, owned, d, generator=generator)
    new, lengths = torch.tensor(rows, dtype=torch.int32).T.contiguous()
    starts = torch.cat((new.new_zeros(1), new.cumsum(0, dtype=torch.int32)))
    room = key_room(new.numpy(), lengths.numpy())
    return *caches.to(dtype), PagedBatch(tables, starts, lengths, 16, key_room=room)


@pytest.mark.parametrize("d", [64, 96])
def test_keys_lie_side_by_side_and_zeros_behind_them(d: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    k_cache, v_cache, batch = paged(ROWS, 2, d, torch.float32)
    found = gathered.gather(k_cache.to(device), v_cache.to(device), batch.to(device))
    starts = batch.key_starts.tolist()
    assert starts[-1] == batch.key_room and not any(start % KEY_TILE for start in starts)
    for row, (new, length) in enumerate(ROWS):
        places = slice(starts[row], starts[row + 1])
        position = torch.arange(length if new > 1 else 0)
        block = batch.block_tables[row].long()[position // 16]
        for copy, cache in zip(found, (k_cache, v_cache), strict=True):
            mine = copy[places].cpu()
            assert torch.equal(mine[: len(position)], cache[block, :, position % 16])
            assert not mine[len(position) :].any()


def test_rows_that_are_too_long_stay_in_their_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered.hopper, "takes", lambda *_: True)
    q, cache = torch.empty(2048, 4, 128), torch.empty(1, 2, 16, 128)
    _, _, batch = paged(((2048, 2048),), 2, 128, torch.float32)
    assert gathered.pays(q, cache, batch) and not gathered.pays(q[:1000], cache, batch)
    batch.key_room = gathered.MOST_BYTES // (4 * 2 * 128) + KEY_TILE
    assert not gathered.pays(q, cache, batch)
    batch.key_room = None
    assert not gathered.pays(q, cache, batch)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(32, 8, 128), (28, 4, 128), (24, 8, 128), (8, 2, 64), (4, 4, 96)])
def test_as_the_kernel_that_takes_keys_out_of_pages(heads: int, kv_heads: int, d: int) -> None:
    for rows in (ROWS, ((1200, 3000), (1, 500), (31, 257), (129, 384)), ((1024, 1024),)):
        k_cache, v_cache, batch = (each.to("cuda") for each in paged(rows, kv_heads, d, torch.bfloat16))
        q = 2 * torch.randn(sum(new for new, _ in rows), heads, d, device="cuda", dtype=torch.bfloat16)
        out = torch.full_like(q, torch.nan)
        gathered.prefill(q, k_cache, v_cache, batch, d**-0.5, out)
        exact = reference(q.double(), k_cache.double(), v_cache.double(), batch, d**-0.5)
        in_pages = PagedTriton(bulk=True)(q, k_cache, v_cache, batch, d**-0.5)
        mine = torch.cat([torch.full((new,), new > 1, device="cuda") for new, _ in rows])
        error, usual = ((each.double() - exact)[mine].norm() for each in (out, in_pages))
        assert error <= 1.3 * usual
        assert out[~mine].isnan().all()
