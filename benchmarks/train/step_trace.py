"""GPU activity of a training step, from the profiler's records: kernels, copies, and when nothing runs.

A step begins with a marker, a kernel that does nothing, launched when the GPU has nothing left to do. So the time from
the marker to the first kernel is what the host takes to begin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

STEPS = 2
LINKS = ("nccl", "ptop")
"""Parts of the names of what goes between GPUs: NCCL's kernels, copies from one GPU to another."""
MARKER = "spin_kernel"
SHORT = 90
"""Characters of a kernel's name that are kept."""

Span = tuple[float, float]


def watched(step: Callable[[], Any], most: int = 24) -> dict[str, Any]:
    """Measure the milliseconds of a step on this GPU.

    Returns:
        ``communication_ms``: between GPUs. ``exposed_ms``: of these, without any other kernel beside. ``computing_ms``:
        in other kernels. ``idle_ms``: in none. ``begin_ms``: of these, before the first kernel. ``kernels``: the
        ``most`` names that take longest, each with its milliseconds and launches of a step. ``gaps``: the five longest
        times in which nothing ran, with the names of what came before and after.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(STEPS):
            torch.cuda.synchronize()
            torch.cuda._sleep(1)
            step()
        torch.cuda.synchronize()
    events = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return account(events, most)


def account(events: Iterable[tuple[float, float, str]], most: int = 24) -> dict[str, Any]:
    """Compute ``watched`` from records: begin and end in microseconds, and a name."""
    spans: dict[bool, list[Span]] = {True: [], False: []}
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    ordered = sorted(events)
    begin, gaps = 0.0, []
    end, before = (ordered[0][0], "") if ordered else (0.0, "")
    for start, stop, name in ordered:
        if start > end:
            gaps.append((start - end, before[:SHORT], name[:SHORT]))
            if MARKER in before:
                begin += start - end
        if stop > end:
            end, before = stop, name
        if MARKER in name:
            continue
        spans[any(part in name.lower() for part in LINKS)].append((start, stop))
        kernels[name[:SHORT]][0] += (stop - start) / 1e3 / STEPS
        kernels[name[:SHORT]][1] += 1 / STEPS
    links, work = merged(spans[True]), merged(spans[False])
    times = {name: sum(b - a for a, b in spans) for name, spans in (("links", links), ("work", work))}
    between = sum(gap for gap, _, name in gaps if MARKER in name)  # from the end of a step to the next marker
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:most]
    per = 1e3 * STEPS
    return {
        "communication_ms": times["links"] / per,
        "exposed_ms": (times["links"] - overlap(links, work)) / per,
        "computing_ms": times["work"] / per,
        "idle_ms": (sum(gap for gap, *_ in gaps) - between) / per,
        "begin_ms": begin / per,
        "end_ms": between / max(1, STEPS - 1) / 1e3,
        "kernels": {name: [round(ms, 3), launches] for name, (ms, launches) in longest},
        "gaps": [[round(gap / 1e3, 3), a, b] for gap, a, b in sorted(gaps, reverse=True)[:5]],
    }


def merged(spans: Iterable[Span]) -> list[Span]:
    """Merge spans of time into ones that do not touch, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def overlap(a: list[Span], b: list[Span]) -> float:
    """Return the time that is in both of two lists of ``merged``."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
