"""Tasks with exact checkers, at which a model of 135 million parameters has a chance: arithmetic of few digits, sorting
letters, a format puzzle; and one without signal, whose answers are drawn by lot.

Each task is a conversation with solved examples as earlier turns; ``sum`` has none, for programs that read one message
only. ``guess`` is the accuracy of the best guess that does
not read the question.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

SYSTEM = "Answer as in the examples."


@dataclass(frozen=True)
class Task:
    """A question with its right answer."""

    messages: list[dict[str, str]]
    answer: str


@dataclass(frozen=True)
class Family:
    """Tasks of one kind.

    Attributes:
        make: random generator -> (question, answer, short answer to it).
        extract: extractor of ``search/extract.py`` that finds the short answer.
        guess: accuracy of guessing; None for the frequency of the most frequent answer.
        examples: solved examples before the question.
    """

    name: str
    make: Callable[[random.Random], tuple[str, str, str]]
    extract: str
    guess: float | None = None
    examples: int = 4

    def tasks(self, count: int, seed: int) -> list[Task]:
        """Make tasks; the examples of each are drawn anew."""
        rng = random.Random(f"{self.name} {seed}")
        found = []
        for _ in range(count):
            messages = [{"role": "system", "content": SYSTEM}] if self.examples else []
            for _ in range(self.examples):
                question, answer, _ = self.make(rng)
                messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            question, _, short = self.make(rng)
            found.append(Task([*messages, {"role": "user", "content": question}], short))
        return found

    def guessing(self, tasks: list[Task]) -> float:
        """Return the accuracy of guessing."""
        if self.guess is not None:
            return self.guess
        return Counter(task.answer for task in tasks).most_common(1)[0][1] / len(tasks)


def add(rng: random.Random) -> tuple[str, str, str]:
    """Add two numbers below 20."""
    a, b = rng.randint(2, 19), rng.randint(2, 19)
    return f"What is {a} + {b}?", f"{a} + {b} = {a + b}", str(a + b)


def small(rng: random.Random) -> tuple[str, str, str]:
    """Add two digits."""
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    return f"What is {a} + {b}?", f"{a} + {b} = {a + b}", str(a + b)


def sort(rng: random.Random) -> tuple[str, str, str]:
    """Sort three letters."""
    letters = rng.sample("abcdefghijklmnopqrstuvwxyz", 3)
    answer = " ".join(sorted(letters))
    return f"Sort these letters: {' '.join(letters)}", answer, answer


def puzzle(rng: random.Random) -> tuple[str, str, str]:
    """Write a word a number of times, between brackets."""
    word, times = rng.choice(("red", "cat", "sun", "tree", "book", "fish")), rng.randint(2, 5)
    answer = "[" + ", ".join([word] * times) + "]"
    return f"Write {word} {times} times.", answer, answer


def lot(rng: random.Random) -> tuple[str, str, str]:
    """Name a digit that is drawn by lot: the question says nothing about it."""
    digit = str(rng.randint(0, 9))
    return f"Which digit did I draw, in round {rng.randint(100, 999)}?", f"The digit is {digit}", digit


FAMILIES = {
    family.name: family
    for family in (
        Family("add", add, "number"),
        Family("sum", small, "number", examples=0),
        Family("sort", sort, "line", 1 / 6),
        Family("puzzle", puzzle, "line", 1 / 24),
        Family("lot", lot, "number", 1 / 10),
    )
}
