"""Writes the small data files of the recipes into ``recipes/data``; the files that are there are what it writes.

    python recipes/make_data.py

They are made of a few tables, so that every answer is right and a verifier can say so: units, sums, opening hours.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

UNITS = [
    ("kilometres", "metres", 1000), ("metres", "centimetres", 100), ("centimetres", "millimetres", 10),
    ("kilograms", "grams", 1000), ("tonnes", "kilograms", 1000), ("litres", "millilitres", 1000),
    ("hours", "minutes", 60), ("minutes", "seconds", 60), ("days", "hours", 24), ("weeks", "days", 7),
    ("dozens", "pieces", 12), ("feet", "inches", 12),
]  # fmt: skip
AMOUNTS = (2, 3, 4, 5, 7, 9)
HELD_OUT = 7
"""One row in this many is kept for validation."""
PLACES = {
    "library": ("9:00", "18:00"), "museum": ("10:00", "17:00"), "bakery": ("6:30", "14:00"),
    "pharmacy": ("8:00", "19:30"), "post office": ("8:30", "16:00"), "swimming pool": ("7:00", "21:00"),
    "town hall": ("9:30", "15:00"), "cinema": ("14:00", "23:00"),
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "opening_hours",
            "description": "When a place in town opens and closes.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
            },
        },
    }
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def conversions() -> Iterable[tuple[str, str]]:
    """Questions about units, and answers in the house style: the number with its unit, then why."""
    for amount in AMOUNTS:
        for large, small, factor in UNITS:
            question = f"How many {small} are {amount} {large}?"
            yield question, f"{amount * factor} {small}. One of the {large} is {factor} {small}."


def chats() -> Iterable[dict[str, Any]]:
    """One question and answer each."""
    for question, answer in conversions():
        yield {"messages": [user(question), assistant(answer)]}


def pairs() -> Iterable[dict[str, Any]]:
    """The short answer is preferred to one that begins with pleasantries."""
    openings = ("Great question! Let me think about that.", "I would be happy to help you with this today!")
    for number, (question, answer) in enumerate(conversions()):
        yield {
            "prompt": question,
            "chosen": answer,
            "rejected": f"{openings[number % 2]} The answer is {answer.lower()}",
        }


def sums() -> Iterable[dict[str, Any]]:
    """Sums for a verifier; the answer is not trained on."""
    for a in range(2, 10):
        for b in range(2, 10):
            yield {"prompt": f"What is {a} + {b}? Answer with the number alone.", "answer": str(a + b)}


def tool_chats() -> Iterable[dict[str, Any]]:
    """A question, a call, its result and the answer; and questions that need no tool."""
    for number, (place, (opens, closes)) in enumerate(PLACES.items()):
        call = {
            "type": "function",
            "function": {"name": "opening_hours", "arguments": {"place": place}},
        }
        for question, answer in (
            (f"When does the {place} open?", f"The {place} opens at {opens}."),
            (f"Until when is the {place} open?", f"The {place} closes at {closes}."),
        ):
            result = {"role": "tool", "content": json.dumps({"opens": opens, "closes": closes})}
            called = {"role": "assistant", "content": "", "tool_calls": [call]}
            yield {"messages": [user(question), called, result, assistant(answer)], "tools": TOOLS}
        question, answer = list(conversions())[5 * number]
        yield {"messages": [user(question), assistant(answer)], "tools": TOOLS}


def split(rows: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on, and rows to validate with."""
    every = list(rows)
    held_out = every[::HELD_OUT]
    return [row for row in every if row not in held_out], held_out


def write(folder: Path) -> None:
    """Write every file into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("chats", chats()), ("pairs", pairs()), ("sums", sums()), ("tools", tool_chats())):
        for suffix, part in zip(("", "-held-out"), split(rows), strict=True):
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
            (folder / f"{name}{suffix}.jsonl").write_text(text)
    with (folder / "questions.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["question", "answer"])
        table.writerows(conversions())


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "data")
