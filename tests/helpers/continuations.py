"""Answers that are cut and continued in another engine, on the checking device: each must end as if undisturbed."""

from __future__ import annotations

from dataclasses import replace

from engine_workloads import Arrival, Workload
from expected_answers import can_fit, expected_tokens
from hypothesis import strategies as st


def cuts(arrival: Arrival, workload: Workload, uneven: int) -> list[Arrival]:
    """The request, cut after every number of tokens: choice i after ``uneven * i`` tokens more than choice 0."""
    if not can_fit(arrival, workload.config):
        return []
    answers = [expected_tokens(arrival, workload.config, choice) for choice in range(arrival.params.n)]
    found: list[Arrival] = []
    for first in range(1 + max(len(tokens) for tokens, _, _ in answers)):
        begun: list[tuple[int, ...] | None] = []
        for choice, (tokens, reason, _) in enumerate(answers):
            count = first + choice * uneven if first else 0
            ended = count >= len(tokens) and (reason != "error" or count > len(tokens))
            begun.append(None if ended else tuple(tokens[:count]))
        if any(tokens is not None for tokens in begun):
            found.append(replace(arrival, begun=tuple(begun)))
    return found


@st.composite
def continuations(draw: st.DrawFn, workloads: st.SearchStrategy[Workload]) -> Workload:
    """A workload of which every request comes again, cut after every number of its tokens, into an engine that has
    other work, chunks, blocks and memory than any that may have drawn those tokens."""
    whole = draw(workloads)
    steady = [replace(each, fail=None if each.fail and each.fail[0] == -1 else each.fail) for each in whole.arrivals]
    again = [cut for each in steady for cut in cuts(each, whole, draw(st.integers(0, 2)))]
    moved = [replace(each, step=draw(st.integers(0, 20))) for each in again]
    return replace(whole, arrivals=(*steady, *moved))
