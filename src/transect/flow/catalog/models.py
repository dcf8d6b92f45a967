"""A model on disk as a flow sees it: a whole model, or an adapter over a base, with the hash of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...checkpoints.peft_config import WEIGHTS, AdapterFiles, is_adapter, read_settings
from ...checkpoints.resolve import ModelSource, resolve
from ..digests import file_digest, files_digest, key_of


@dataclass(frozen=True, slots=True)
class FlowModel:
    """A model.

    Attributes:
        path: directory or file; of a built-in model, its name.
        base: name of the model below an adapter; that of a whole model itself.
        adapter: directory of the adapter; None of a whole model.
        digest: hash of the weights, the base's included.
        size: bytes of the weights: of an adapter, its own.
    """

    path: str
    base: str
    adapter: Path | None
    digest: str
    size: int


def model_of(name: str, base: str = "") -> FlowModel:
    """Describe a model.

    Args:
        name: as for ``transect serve``.
        base: name of the model below, if ``name`` is an adapter; empty for the one that its configuration names.

    Raises:
        ValueError: there is no such model.
    """
    path = Path(name).expanduser()
    if path.is_dir() and is_adapter(path):
        below = base or read_settings(path).base or ""
        if not below:
            raise ValueError(f"{path} does not name its base: set base_model_name_or_path in its adapter_config.json")
        under = model_of(below)
        digest = key_of([under.digest, AdapterFiles.of(path).id])
        return FlowModel(name, below, path.resolve(), digest, (path / WEIGHTS).stat().st_size)
    source = resolve(name)
    if source.adapter is not None:
        return model_of(str(source.adapter.path), base=source.adapter.base.name)
    files = _weights(source)
    return FlowModel(name, name, None, files_digest(files), sum(file.stat().st_size for file in files))


def _weights(source: ModelSource) -> list[Path]:
    path = Path(source.path)
    if source.kind == "shape":
        raise ValueError(f"{source.name} is a shape without weights: set model to one that has weights")
    return sorted(path.glob("*.safetensors")) if path.is_dir() else list(source.gguf_files)


def newest_model(run_dir: Path) -> Path:
    """Return the checkpoint of a run to use: that with the best validation loss, else the last.

    Raises:
        ValueError: there is none.
    """
    for name in ("best", "last"):
        if (run_dir / name).is_dir():
            return (run_dir / name).resolve()
    raise ValueError(f"{run_dir} has no checkpoint: run the flow again to train it")


def adapter_digest(folder: Path) -> str:
    """Hash the weights of an adapter alone."""
    return file_digest(folder / WEIGHTS)
