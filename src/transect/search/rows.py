"""Rows of training data from searches: pairs for DPO, prompts with answers for GRPO, chats for next-token training.

Where a row has an ``answer``, answers that agree with it are the good ones. Without it the search decides: votes give
the majority's answer (Zuo et al. 2025, arXiv:2504.16084), and scores the best and the worst.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from .extract import extract
from .result import SearchResult
from .tree import Branch

Kind = Literal["dpo", "grpo", "sft"]
KINDS: tuple[Kind, ...] = ("dpo", "grpo", "sft")


def row_of(result: SearchResult, record: Mapping[str, Any], kind: Kind) -> dict[str, Any] | None:
    """Build a row of training data from a search.

    Args:
        record: row with the prompt, and perhaps with its ``answer``.
        kind: objective that the row is for.

    Returns:
        The row; None if the branches do not differ in a way that teaches something, or none is good.
    """
    branches = [branch for branch in result.tree.branches if branch.complete and branch.root.messages is None]
    right = record.get("answer")
    by = getattr(result.search.options, "extract", "auto")
    answers = {branch.id: extract(result.tree.answer_of(branch), by) for branch in branches}
    truth = None if right is None else str(right).strip()
    if truth is None and result.votes:
        truth = next(iter(result.votes))
    if truth is None:
        return _row_by_score(result, branches, record, kind)
    good = [branch for branch in branches if answers[branch.id] == truth]
    bad = [branch for branch in branches if answers[branch.id] != truth]
    if not good or (kind != "sft" and not bad):
        return None
    if kind == "grpo":
        return {"prompt": record["prompt"], "answer": truth, "share": round(len(good) / len(branches), 4)}
    first = result.branch if result.branch in good else good[0]
    return _row(result, record, kind, first, bad[0] if bad else None)


def _row_by_score(
    result: SearchResult, branches: list[Branch], record: Mapping[str, Any], kind: Kind
) -> dict[str, Any] | None:
    """Build a row from the best and the worst scores."""
    if kind == "grpo":
        raise ValueError(
            "rows for grpo need the right answer: give rows with an answer, or a method that votes, such as majority"
        )
    name = next(iter(result.search.options.judges), "")
    scores = {branch.id: branch.scores.get(name) for branch in branches}
    scored = [branch for branch in branches if scores[branch.id] is not None]
    if not scored:
        return None
    worst = min(scored, key=lambda branch: scores[branch.id] or 0.0)
    if kind == "dpo" and not (scores[worst.id] or 0.0) < (scores.get(result.branch.id) or 0.0):
        return None
    return _row(result, record, kind, result.branch, worst)


def _row(
    result: SearchResult, record: Mapping[str, Any], kind: Kind, good: Branch, bad: Branch | None
) -> dict[str, Any]:
    said = {"role": "assistant", "content": result.tree.answer_of(good)}
    if kind == "sft":
        return {"messages": [*(result.tree.messages or ()), said]}
    assert bad is not None
    rejected = {"role": "assistant", "content": result.tree.answer_of(bad)}
    return {"prompt": list(result.tree.messages or ()), "chosen": [said], "rejected": [rejected]}
