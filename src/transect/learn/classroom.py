"""Grades a folder of submissions, one folder a student, in a sandbox without network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .grade.grader import grade
from .grade.verdict import Verdict
from .grade.workshop import Workshop
from .record import Rung


@dataclass(frozen=True, slots=True)
class Graded:
    """One submission."""

    student: str
    verdict: Verdict


def students(rung: Rung, folder: Path) -> list[tuple[str, Path]]:
    """List (name, program) of each folder that has the rung's file.

    Raises:
        ValueError: there is none.
    """
    found = sorted((path.parent.name, path) for path in folder.glob(f"*/{rung.file}"))
    if not found:
        raise ValueError(f"{folder} has no */{rung.file}: each student's program must be in a folder of its own")
    return found


def grade_class(rung: Rung, folder: Path) -> Iterator[Graded]:
    """Grade each submission; its text is read here, and it runs in the sandbox.

    Raises:
        ValueError: this machine has no sandbox, or there is no submission.
    """
    found = students(rung, folder)
    with Workshop(shut=True) as shop:
        for student, path in found:
            yield Graded(student, grade(rung, path, shop=shop))


def table(rung: Rung, graded: Sequence[Graded]) -> str:
    """Write the outcome as Markdown: one row a student, and how many made each mistake."""
    lines = [f"# {rung.title}", "", "| student | outcome | work | reason |", "|---|---|---|---|"]
    mistakes: Counter[str] = Counter()
    for each in graded:
        verdict = each.verdict
        outcome = (
            "not graded" if verdict.cheats else "wrong" if not verdict.right else "slow" if verdict.slow else "right"
        )
        share = f"{verdict.count / verdict.reference_count:.2f}x" if verdict.count and verdict.reference_count else ""
        told = f"stops with an error: {verdict.detail}" if verdict.stopped and not verdict.cheats else verdict.reason
        reason, mistake = (text.replace("|", "\\|").replace("\n", " ") for text in (told, verdict.reason))
        mistakes.update([mistake] if mistake else [])
        lines.append(f"| {each.student} | {outcome} | {share} | {reason} |")
    if mistakes:
        lines += ["", "| mistake | students |", "|---|---|"]
        lines += [f"| {mistake} | {count} |" for mistake, count in mistakes.most_common()]
    return "\n".join(lines) + "\n"
