"""``transect models``: the models that can be named directly."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model's name, kind, description, and bytes on this disk (0 if absent)."""

    name: str
    kind: str
    about: str
    size: int


def command(json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """List built-in models, shapes for --load-format dummy, and hub models on this disk."""
    entries = found()
    if json:
        from json import dumps

        print(dumps([asdict(entry) for entry in entries], indent=1))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "kind", "what it is", "on this disk"):
        table.add_column(column, justify="right" if column == "on this disk" else "left", overflow="fold")
    for entry in entries:
        table.add_row(entry.name, entry.kind, entry.about, f"{entry.size / 1e6:,.0f} MB" if entry.size else "")
    Console().print(table, highlight=False)


def found() -> list[ModelEntry]:
    """List built-in models, shapes, and models in the hub's cache."""
    from ..checkpoints.pull import BUILTIN_MODELS
    from ..spec.shapes import PRESETS

    entries = []
    for name, model in BUILTIN_MODELS.items():
        there = model.path.is_file()
        entries.append(ModelEntry(name, "built-in", model.about, model.path.stat().st_size if there else 0))
    for name, config in PRESETS.items():
        about = f"{config.architecture}, {config.n_layers} layers of {config.dim}; random weights"
        entries.append(ModelEntry(name, "shape", about, 0))
    return [*entries, *_hub_models()]


def _hub_models() -> list[ModelEntry]:
    """List models in huggingface_hub's cache; none if there is no cache."""
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = huggingface_hub.scan_cache_dir()
    except (CacheNotFound, OSError):
        return []
    repos = [repo for repo in cache.repos if repo.repo_type == "model"]
    return [
        ModelEntry(repo.repo_id, "hub", f"fetched from the hub, revisions: {len(repo.revisions)}", repo.size_on_disk)
        for repo in sorted(repos, key=lambda repo: repo.repo_id)
    ]
