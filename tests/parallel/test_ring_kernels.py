"""Ring attention by the kernels of one device, in Triton's interpreter, with threads as the ranks."""

import threading

import pytest
import torch
from thread_group import on_threads

pytest.importorskip("triton")

from transect.models.context import VarlenContext
from transect.ops.attention.packed import backward as flash_attention_backward
from transect.ops.attention.packed import flash_attention
from transect.ops.lang.jit import INTERPRETED
from transect.parallel import ring_kernels
from transect.parallel.ring_kernels import KernelRing, parts
from transect.parallel.ring_pairs import own_tokens

needs_kernels = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter (TRITON_INTERPRET=1)")


@pytest.mark.parametrize("least", [1, 5])
@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("ends", [[0, 48], [0, 1, 20, 21, 47, 48], [0, 5, 48]])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_pair_is_computed_once(monkeypatch, ranks, ends, window, least):
    monkeypatch.setattr(ring_kernels, "LEAST", least)
    index = torch.arange(ends[-1])
    document = torch.bucketize(index, torch.tensor(ends[1:]), right=True)
    distance = index[:, None] - index
    expected = (document[:, None] == document) & (distance >= 0) & (distance < (window or 99))
    found = torch.zeros_like(expected, dtype=torch.int64)
    own = [torch.cat([index[part] for part in own_tokens(ends[-1], rank, ranks)]) for rank in range(ranks)]
    for rank in range(ranks):
        for step, part in enumerate(parts(ends, rank, ranks, window)):
            mine, theirs = own[rank], own[(rank - step) % ranks]
            if part.ends is not None:
                for begin, end in zip(part.ends[:-1], part.ends[1:], strict=True):
                    row = torch.arange(begin, end)
                    apart = row[:, None] - row
                    found[mine[row][:, None], mine[row]] += (apart >= 0) & (apart < (window or 99))
            for squares in part.rounds:
                assert sum(n for *_, n in squares) == len({row for q, _, n in squares for row in range(q, q + n)})
                assert sum(n for *_, n in squares) == len({row for _, k, n in squares for row in range(k, k + n)})
                for q, k, n in squares:
                    found[mine[q : q + n][:, None], theirs[k : k + n]] += 1
            for queries, keys, ahead, back in part.rest:
                q, k = mine[queries], theirs[keys]
                apart = q[:, None] - k
                seen = torch.ones_like(apart) if ahead is None else (apart >= 0) & (apart < (back or 99))
                found[q[:, None], k] += seen
    assert torch.equal(found, expected.long())


@needs_kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("ends", "window"), [([0, 32], None), ([0, 3, 26, 32], None), ([0, 32], 7)])
def test_attention_and_its_gradients_are_those_of_one_rank(monkeypatch, ends, window):
    monkeypatch.setattr(ring_kernels, "LEAST", 4)
    lock = threading.Lock()  # the interpreter is for one thread at a time

    def one_at_a_time(call):
        def alone(*given, **named):
            with lock:
                return call(*given, **named)

        return alone

    for module, name in ((flash_attention, "forward"), (flash_attention_backward, "backward")):
        monkeypatch.setattr(module, name, one_at_a_time(getattr(module, name)))
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(ends[-1], heads, 8, generator=generator) for heads in (2, 1, 1, 2))
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    expected = VarlenContext(torch.tensor(ends, dtype=torch.int32)).attend(0, *whole, 0.3, window)
    expected.backward(g.double())

    def work(group):
        tokens = own_tokens(ends[-1], group.rank, group.size)
        mine = [torch.cat([x[part] for part in tokens]) for x in (q, k, v, g)]
        ring = KernelRing(ends, group)
        out, sums = ring.forward(*mine[:3], 0.3, window)
        return out, *ring.backward(mine[3], *mine[:3], out, sums, 0.3, window)

    for rank, found in enumerate(on_threads(2, work)):
        tokens = own_tokens(ends[-1], rank, 2)
        for x, like in zip(found, (expected, *(each.grad for each in whole)), strict=True):
            torch.testing.assert_close(x.double(), torch.cat([like[part] for part in tokens]), rtol=1e-4, atol=1e-5)
