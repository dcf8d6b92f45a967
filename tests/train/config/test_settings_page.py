"""The page of settings: every setting is on it, with what it means, what it may be and what it is by default."""

import dataclasses
import typing
from pathlib import Path

from transect.spec.settings import meanings, table
from transect.train.config import TrainConfig
from transect.train.config.defaults import BY_TASK

ROOT = Path(__file__).resolve().parents[3]


def page() -> str:
    return "\n".join(table(TrainConfig, by_task=BY_TASK))


def settings(kind=TrainConfig, where=""):
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[item.name]):
            yield from settings(hints[item.name], f"{where}{item.name}.")
        else:
            yield kind, where, item


def test_every_setting_is_on_the_page_and_explained() -> None:
    text = page()
    for kind, where, item in settings():
        table = text.split(f"## `[{where.rstrip('.')}]`")[1] if where else text
        row = next(line for line in table.splitlines() if line.startswith(f"| `{item.name}` |"))
        assert len(row.rsplit("|", 2)[1].strip()) > 3, f"{where}{item.name} is not explained"
        assert not set(meanings(kind)) - {field.name for field in dataclasses.fields(kind)}  # nothing that is gone
    assert text in (ROOT / "docs" / "train" / "settings.md").read_text(), "run python benchmarks/render.py"


def test_a_row_says_values_default_and_meaning() -> None:
    rows = page().splitlines()
    assert any(
        r.startswith('| `rounding` | `stochastic`, `nearest` | `"stochastic"` | rounding of weights') for r in rows
    )
    assert any(r.startswith("| `learning_rate` | number | by task | 3e-4 to pretrain") for r in rows)
    assert any(r.startswith("| `model` | string | needed |") for r in rows)
