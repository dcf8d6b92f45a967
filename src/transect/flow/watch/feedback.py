"""Turn feedback into rows for preference training, in the layouts of ``train/data/layouts.py``.

* A correction is preferred to the answer that it corrects: ``prompt``, ``chosen``, ``rejected`` (``dpo``, ``orpo``).
* Answers to the same conversation with a good and a bad judgement are a pair, too.
* Every judged answer is a row ``prompt``, ``completion``, ``label`` (``kto``); a correction is a good one.

A score counts as good from 0.75 on and as bad up to 0.25. Of several judgements of an answer the last one of each kind
counts. Answers with calls, and conversations whose texts are empty, are left out.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

GOOD, BAD = 0.75, 0.25
Kind = Literal["pairs", "labels"]


@dataclass(slots=True)
class JudgedAnswer:
    """An answer with the judgements of its users. ``good`` is None without a clear one."""

    prompt: list[dict[str, Any]]
    text: str
    tools: list[Any]
    good: bool | None = None
    correction: str = ""


@dataclass(slots=True)
class FeedbackRows:
    """Rows, and counts of feedback that gave none, by reason."""

    rows: list[dict[str, Any]]
    left_out: dict[str, int] = field(default_factory=dict)


def feedback_rows(records: Iterable[Mapping[str, Any]], kind: Kind = "pairs", model: str = "") -> FeedbackRows:
    """Build rows from the records of captures.

    Args:
        kind: ``pairs`` for ``dpo`` and ``orpo``, ``labels`` for ``kto``.
        model: only feedback on this version; empty for all.
    """
    left_out: dict[str, int] = defaultdict(int)
    judged = list(_judged(records, model, left_out))
    rows = list(_pairs(judged) if kind == "pairs" else _labels(judged))
    unique = {json.dumps(row, sort_keys=True): row for row in rows}
    if kind == "pairs":
        used = sum(bool(each.correction) for each in judged)
        alone = sum(each.good is not None and not each.correction for each in judged) - 2 * (len(rows) - used)
        if alone > 0:
            left_out["thumbs on answers without a counterpart; --kind labels uses them"] = alone
    return FeedbackRows(list(unique.values()), dict(left_out))


def _judged(records: Iterable[Mapping[str, Any]], model: str, left_out: dict[str, int]) -> Iterator[JudgedAnswer]:
    """Yield the answers that have feedback, in the order of their requests."""
    requests: dict[str, Mapping[str, Any]] = {}
    given: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        if record.get("kind") == "request":
            requests[str(record.get("id"))] = record
        elif record.get("kind") == "feedback" and model in ("", record.get("model")):
            given[str(record.get("id")), int(record.get("choice") or 0)].append(record)
    for (answer, choice), feedback in given.items():
        request = requests.get(answer)
        answers = {each.get("choice"): each for each in _first_prompt(request)}
        if request is None or choice not in answers:
            left_out["the answer is not captured any more"] += 1
            continue
        prompt, text = _prompt(request), str(answers[choice].get("text") or "")
        if not prompt or not text.strip() or answers[choice].get("calls"):
            left_out["empty texts, or an answer with calls"] += 1
            continue
        found = JudgedAnswer(prompt, text, list(request.get("tools") or ()))
        for each in feedback:
            verdict = _verdict(each)
            found.good = found.good if verdict is None else verdict
            found.correction = str(each.get("correction") or found.correction)
        if found.correction.strip() == text.strip():
            found.correction = ""
        if found.good is None and not found.correction:
            left_out["comments and middling scores alone"] += 1
            continue
        yield found


def _first_prompt(request: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the answers of a request to its first prompt."""
    return [each for each in (request or {}).get("answers") or () if not each.get("prompt")]


def _prompt(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = request.get("messages")
    if messages is None:
        texts = request.get("prompts") or [""]
        return [{"role": "user", "content": texts[0]}] if texts[0].strip() else []
    return [dict(each) for each in messages]


def _verdict(feedback: Mapping[str, Any]) -> bool | None:
    if feedback.get("thumb") in ("up", "down"):
        return bool(feedback["thumb"] == "up")
    score = feedback.get("score")
    if not isinstance(score, int | float):
        return None
    return True if score >= GOOD else False if score <= BAD else None


def _pairs(judged: Iterable[JudgedAnswer]) -> Iterator[dict[str, Any]]:
    by_prompt: dict[str, list[JudgedAnswer]] = defaultdict(list)
    for each in judged:
        if each.correction:
            yield _pair(each, each.correction, each.text)
        by_prompt[json.dumps([each.prompt, each.tools], sort_keys=True)].append(each)
    for same in by_prompt.values():
        good = [each for each in same if each.good is True]
        bad = [each for each in same if each.good is False]
        texts = {each.text.strip() for each in good}
        # Each answer is in one pair, so that a prompt with many judgements does not outweigh the others.
        for better, worse in zip(good, (each for each in bad if each.text.strip() not in texts), strict=False):
            yield _pair(better, better.text, worse.text)


def _labels(judged: Iterable[JudgedAnswer]) -> Iterator[dict[str, Any]]:
    for each in judged:
        if each.correction:
            yield {**_row(each), "completion": _said(each.correction), "label": True}
        if each.good is not None or each.correction:
            good = each.good is True and not each.correction
            yield {**_row(each), "completion": _said(each.text), "label": good}


def _pair(each: JudgedAnswer, chosen: str, rejected: str) -> dict[str, Any]:
    return {**_row(each), "chosen": _said(chosen), "rejected": _said(rejected)}


def _row(each: JudgedAnswer) -> dict[str, Any]:
    return {"prompt": each.prompt} | ({"tools": each.tools} if each.tools else {})


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]
