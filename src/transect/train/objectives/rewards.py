"""Rewards of answers: the functions that a configuration names, and the prompts that they judge answers to.

A function is called as ``function(answer_text, record)``; ``record`` is the prompt's row of the data. It returns a
number, or None where it has nothing to say about the answer.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..data.documents import RowCounts
from ..data.files import find
from ..data.layouts import check_columns, prompt_of, renamed
from ..data.messages import Messages
from .base import StepFailed

LARGEST = 1e100
"""Largest magnitude of a reward; squares of larger ones overflow."""
Reward = Callable[[str, Mapping[str, Any]], float | None]


def exact(answer: str, record: Mapping[str, Any]) -> float | None:
    """Return 1 if the answer, stripped, equals the row's ``answer``, else 0; None if the row has no answer."""
    right = record.get("answer")
    return None if right is None else float(answer.strip() == str(right).strip())


def reward_function(name: str) -> Reward:
    """Return ``exact``, or the function that ``module:function`` or ``path/to/file.py:function`` names.

    Modules are looked for in the working directory too.

    Raises:
        ValueError: it is not there, or importing it fails.
    """
    if name == "exact":
        return exact
    place, _, function = name.rpartition(":")
    try:
        if not place or not function:
            raise ImportError("there is no colon in it")
        found = getattr(_module(place), function)
    except Exception as error:  # the file is the user's: anything may happen in it
        raise ValueError(
            f'grpo.reward must be "exact", "module:function" or "path/to/file.py:function"; {name!r} cannot be used '
            f"({type(error).__name__}: {error})"
        ) from error
    if not callable(found):
        raise ValueError(f"grpo.reward: {name!r} is not a function")
    reward: Reward = found
    return reward


def _module(place: str) -> Any:
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ImportError(f"there is no file {path.resolve()}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(place)
    finally:
        sys.path.remove(here)


class Judge:
    """Several reward functions and their weights.

    Args:
        names: as ``reward_function`` takes them. weights: one for each; empty: 1.

    Raises:
        ValueError: as ``reward_function``.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float]) -> None:
        self.names = list(names)
        self._functions = [reward_function(name) for name in names]
        self.weights = np.array(weights or [1.0] * len(self.names))

    def __call__(self, answer: str, record: Mapping[str, Any]) -> list[float]:
        """Call each function; return its reward, or NaN for None.

        Raises:
            StepFailed: a function raises, or returns no finite number; the message names it and the record.
        """
        found = []
        for name, function in zip(self.names, self._functions, strict=True):
            where = f"the reward {name} of the answer {answer!r:.200} to the record {dict(record)!r:.400}"
            try:
                value = function(answer, copy.deepcopy(record))
                number = math.nan if value is None else float(value)
            except (Exception, SystemExit) as error:  # the function is the user's: anything may happen in it
                raise StepFailed(f"{where} raised {type(error).__name__}: {error}") from error
            if value is not None and not abs(number) < LARGEST:
                raise StepFailed(f"{where} is {value}: the function must return a finite number or None")
            found.append(number)
        return found

    def total(self, rewards: np.ndarray) -> np.ndarray:
        """Compute weighted sums ``[answers]`` of rewards ``[answers, functions]``; NaN if no function gave a reward."""
        sums = np.nansum(rewards * self.weights, axis=1)
        return np.where(np.isnan(rewards).all(1), np.nan, sums)


Prompt = tuple[dict[str, Any], list[int]]
"""(row of the data, tokens of its prompt)."""


def read_prompts(
    paths: Sequence[str],
    encode: Callable[[Messages, list[Any] | None], list[int]],
    *,
    setting: str = "data.train",
    skip: bool = False,
    columns: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda said: None,
) -> list[Prompt]:
    """Read rows with a ``prompt``: a string or messages.

    Args:
        encode: the tokens of a prompt's messages and tools; ValueError for one that cannot be answered.
        skip: leave out rows that cannot be used.
        columns: as ``data.columns``.
        tell: receives a summary of each file with such rows.

    Raises:
        ValueError: no file, no prompt in any, or a row that cannot be used; its place is named.
    """
    check_columns(columns or {})
    prompts: list[Prompt] = []
    why: list[str] = []
    for file in find(list(paths), setting):
        if file.kind in ("text", "tokens"):
            raise ValueError(f'{file.path} holds no prompts: objective = "grpo" needs rows with a "prompt"')
        tally = RowCounts(str(file.path), "prompts", "the answers to them")
        for where, row in file.rows():
            try:
                if isinstance(row, ValueError):
                    raise row
                row = renamed(row, columns or {})
                prompts.append((dict(row), encode(*prompt_of(row))))
                tally.read += 1
            except ValueError as error:
                tally.leave_out(where, error, skip=skip)
        if tally.left_out:
            why.append(str(tally))
            tell(why[-1])
    if not prompts:
        raise ValueError("; ".join(why) or f"no prompts: name a file with them in {setting}")
    return prompts
