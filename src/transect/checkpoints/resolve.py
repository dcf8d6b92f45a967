"""Resolution of the name that a user gives to the files of a model.

In this order: a directory in Hugging Face layout, a ``.gguf`` file, a built-in name (``pull.py``), a hub id
(``organisation/name``, or ``organisation/name:Q4_K_M`` for the GGUF file of that type). With ``load_format="dummy"`` no
weights are read, and a directory with config.json or a name of ``spec/shapes.py`` is enough. No torch here: a process
that only needs the tokenizer or the configuration stays light.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..formats.gguf_file import GGUFFile
from ..spec.gguf import from_gguf
from ..spec.hf import from_hf_directory
from ..spec.model import ModelConfig
from ..spec.shapes import PRESETS, WEIGHTS_OF
from .own_head import has_own_head
from .peft_config import CONFIG, adapted_config, is_adapter, read_settings
from .pull import BUILTIN_MODELS, Progress, pull_builtin, pulled

log = logging.getLogger(__name__)

LoadFormat = Literal["auto", "dummy"]

_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_HUB_GGUF = re.compile(r"([\w.-]{1,96}/[\w.-]{1,96}):([\w.-]{1,96})")
"""A GGUF file of a hub id, by a part of its name: its type (``organisation/name:Q4_K_M``)."""
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt"]
_TOKENIZER_FILES = ["*.json", "*.jinja", "merges.txt", "vocab.txt"]
_NO_LANGUAGE_MODEL = ["*mmproj*"]
"""GGUF files of models that turn images into embeddings."""
_HUB_IGNORED = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class AdapterPlace:
    """The directory of an adapter in PEFT's layout, and its base model."""

    path: Path
    base: ModelSource


@dataclass(frozen=True)
class ModelSource:
    """The location and description of a model.

    Attributes:
        kind: ``hf`` (``path`` is a directory with config.json), ``gguf`` (``path`` is a file), or ``shape``: a
            configuration without weights.
        path: absolute; of a shape that is built in, its name.
        config: configuration of the model, from its files.
        name: as the user gave it.
        adapter: beside or in the weights, in PEFT's layout; ``config`` is that of the model with it.
    """

    kind: Literal["hf", "gguf", "shape"]
    path: Path
    config: ModelConfig
    name: str
    adapter: AdapterPlace | None = None
    text: Path | None = None
    """Directory with a tokenizer that replaces the model's."""

    @property
    def text_folder(self) -> Path | None:
        """Directory of the tokenizer's files: the adapter's, if it has them; None if they are in the GGUF file."""
        if self.text is not None:
            return self.text
        if self.adapter is not None and (self.adapter.path / "tokenizer.json").is_file():
            return self.adapter.path
        return None if self.kind == "gguf" else self.path

    @cached_property
    def gguf(self) -> GGUFFile:
        """The open GGUF file (``kind`` is ``gguf``); opened once in each process."""
        return GGUFFile.open(self.path)

    @property
    def gguf_files(self) -> tuple[Path, ...]:
        """The GGUF file, or all parts of one in parts."""
        return self.gguf.parts or (self.path,)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "gguf"}


def resolve(
    name: str,
    *,
    allow_download: bool = True,
    progress: Progress | None = None,
    load_format: LoadFormat = "auto",
    revision: str | None = None,
    adapter: str | None = None,
) -> ModelSource:
    """Find a model, downloading it if necessary.

    Args:
        name: a directory, a ``.gguf`` file, a built-in name or a hub id. The directory of an adapter stands for the
            model that its ``adapter_config.json`` names, with the adapter.
        allow_download: False uses what is on disk and never the network.
        progress: told how far a fetch of a built-in model is; by default a bar on stderr.
        load_format: ``dummy`` finds a configuration only.
        revision: branch, tag or commit of a hub id.
        adapter: the directory or hub id of an adapter in PEFT's layout for this model.

    Raises:
        ValueError: no such model (nearest names are offered), damaged files, an unsupported architecture, no network.
    """
    if adapter is not None:
        return with_adapter(
            resolve(name, allow_download=allow_download, progress=progress, load_format=load_format, revision=revision),
            adapter,
            allow_download,
        )
    if not name or "\0" in name:
        raise ValueError(f"{name!r} is not a model name; give {_choices()}")
    path = Path(name).expanduser()
    of_hub = _HUB_ID.fullmatch(name) or _HUB_GGUF.fullmatch(name)
    if revision is not None and (load_format == "dummy" or path.exists() or not of_hub):
        raise ValueError(f"revision {revision!r} is for hub ids (organisation/name), and {name[:80]!r} is none")
    if load_format == "dummy":
        return _shape(path, name)
    try:
        if path.is_dir():
            return _from_directory(path, name)
        if path.is_file():
            return _from_file(path, name)
    except OSError as error:  # a name that is too long for a path, a directory that cannot be entered
        raise ValueError(f"cannot read {name[:80]!r}: {error.strerror or error}; give {_choices()}") from None
    if name in BUILTIN_MODELS:
        return _from_builtin(name, allow_download, progress)
    if name.lower().endswith(".gguf") or name.startswith(("/", "./", "../", "~")) or name.endswith("/"):
        raise ValueError(f"there is no file or directory {name!r}{_near_paths(path)}; give {_choices()}")
    if _HUB_ID.fullmatch(name):
        folder = _from_hub(name, allow_download, revision=revision)
        if not (folder / "config.json").is_file() and not is_adapter(folder):
            raise ValueError(
                f"the hub model {name!r} has no config.json; if it has GGUF files, name one by its type ({name}:Q4_K_M)"
            )
        return _from_directory(folder, name)
    if (found := _HUB_GGUF.fullmatch(name)) is not None:
        return _from_file(_hub_gguf(found[1], found[2], allow_download, revision), name)
    if name in PRESETS:
        raise ValueError(
            f"{name!r} is a shape without weights. Weights come from a hub id ({WEIGHTS_OF[name]}), a model directory "
            "or a .gguf file; random ones, to measure with, from load_format dummy (--load-format of serve and bench)"
        )
    near = _near_names(name, (*BUILTIN_MODELS, *PRESETS))
    note = " (shapes, without weights)" if any(each in PRESETS for each in near) else ""
    raise ValueError(f"unknown model {name!r}; {_give(near, note)} {_choices()}")


def tokenizer_files(name: str, *, revision: str | None = None) -> Path:
    """Find the tokenizer of that name: a directory with tokenizer.json, or a GGUF file. Weights are not downloaded.

    Args:
        name: a directory, a ``.gguf`` file, a built-in name or a hub id.
        revision: branch, tag or commit of a hub id.

    Raises:
        ValueError: there is none.
    """
    path = Path(name).expanduser()
    if revision is not None and (path.exists() or not _HUB_ID.fullmatch(name)):
        raise ValueError(f"tokenizer_revision {revision!r} is for hub ids (organisation/name), and {name!r} is none")
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf"):
        return path.resolve()
    if path.is_file() and path.name == "tokenizer.json":
        return path.resolve().parent
    if name in BUILTIN_MODELS:
        return _from_builtin(name, True, None).path
    if _HUB_ID.fullmatch(name) and not path.exists():
        return _from_hub(name, True, revision=revision, patterns=_TOKENIZER_FILES)
    raise ValueError(f"there is no tokenizer {name[:80]!r}; give {_choices()}")


def described(name: str, *, presets: bool = True) -> ModelSource:
    """Resolve a model without its weights: a directory needs only a configuration.

    Args:
        presets: built-in shapes are meant by their names, which then have no tokenizer.

    Raises:
        ValueError: as for ``resolve``.
    """
    shape = (presets and name in PRESETS) or (Path(name).expanduser() / "config.json").is_file()
    return resolve(name, load_format="dummy" if shape else "auto")


def _shape(path: Path, name: str) -> ModelSource:
    """Return a model to be filled with random weights."""
    if (path / "config.json").is_file():
        path = path.resolve()
        return ModelSource("shape", path, from_hf_directory(path), name)
    if name in PRESETS:
        return ModelSource("shape", Path(name), PRESETS[name], name)
    raise ValueError(
        f"load_format dummy knows no shape {name[:80]!r}; {_give(_near_names(name[:80], PRESETS))} a directory with a "
        f"config.json, or one of {', '.join(PRESETS)}"
    )


def _near_names(name: str, names: Iterable[str]) -> list[str]:
    """List up to three names that are like ``name``, the nearest first; one if none is very like it."""
    names = list(names)
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.7)
    return near or difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)


def _give(near: list[str], note: str = "") -> str:
    """Begin a sentence that says what to give instead, with a question that offers the names ``near``."""
    return f"did you mean {' or '.join(map(repr, near))}{note}? Otherwise give" if near else "give"


def _choices() -> str:
    builtin = ", ".join(BUILTIN_MODELS)
    return f"a model directory, a .gguf file, a built-in name ({builtin}) or a hub id (organisation/name)"


def _near_paths(path: Path) -> str:
    """Suggest similar names beside a path that does not exist."""
    try:
        beside = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, beside, n=3, cutoff=0.6)
    return f" (near it: {', '.join(near)})" if near else ""


def with_adapter(source: ModelSource, adapter: str, allow_download: bool = True) -> ModelSource:
    """Return a model with an adapter, the directory or hub id of one in PEFT's layout.

    Raises:
        ValueError: there is none, it does not fit the model, or the model has one already.
    """
    if source.adapter is not None:
        raise ValueError(
            f"{source.name} is an adapter already, and one at a time can be used: merge it with `transect export "
            f"--merge {source.name} -o DIR` and give DIR as the model"
        )
    if source.kind == "shape":
        raise ValueError("load_format dummy has random weights, and no adapter fits those: leave one of them out")
    path = Path(adapter).expanduser()
    if not path.is_dir():
        if not _HUB_ID.fullmatch(adapter):
            raise ValueError(f"there is no directory {adapter!r} with an adapter{_near_paths(path)}")
        path = _from_hub(adapter, allow_download)
    path = path.resolve()
    read_settings(path)
    config = adapted_config(source.config, path)
    return replace(source, config=config, adapter=AdapterPlace(path, source))


def _with_own_base(path: Path, name: str) -> ModelSource:
    """Return the model that an adapter's configuration names, with the adapter."""
    base = read_settings(path).base
    if not base:
        raise ValueError(
            f"{path / CONFIG} does not name the model that it is for: give that as the model, and --adapter"
        )
    try:
        source = resolve(str(path / base) if (path / base / "config.json").is_file() else base)
    except ValueError as error:
        raise ValueError(f"the model of the adapter {path} is not here: {error}") from None
    return replace(with_adapter(source, str(path)), name=name)


def _from_directory(path: Path, name: str) -> ModelSource:
    path = path.resolve()
    if is_adapter(path):
        return _with_own_base(path, name)
    if not (path / "config.json").is_file():
        files = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; give one of its GGUF files: {', '.join(files[:5])}" if files else ""
        if (path / "last").is_dir():
            hint = f": it is a training run, whose newest checkpoint is {path / 'last'}"
        raise ValueError(f"the directory {path} has no config.json, so it is not a model in Hugging Face layout{hint}")
    config = from_hf_directory(path)
    if config.tied_embeddings and has_own_head(path):
        log.warning("%s has a head with values of its own, so tie_word_embeddings of its config.json is not true", name)
        config = replace(config, tied_embeddings=False)
    return ModelSource("hf", path, config, name)


def _from_file(path: Path, name: str) -> ModelSource:
    path = path.absolute()  # not resolved: the hub's cache has links to files with other names
    if path.suffix.lower() != ".gguf":
        raise ValueError(f"{path} is not a .gguf file; give {_choices()}")
    file = GGUFFile.open(path)
    try:
        config = from_gguf(file.metadata, file.tensors)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    source = ModelSource("gguf", path, config, name)
    source.__dict__["gguf"] = file  # what the cached property would open again
    return source


def _from_builtin(name: str, allow_download: bool, progress: Progress | None) -> ModelSource:
    model = BUILTIN_MODELS[name]
    path = pulled(model)
    if path is None:
        if not allow_download:
            raise ValueError(f"{name} is not in the cache ({model.path.parent}); run `transect pull {name}` first")
        path = pull_builtin(model, progress=progress)
    return _from_file(path, name)


def _hub_gguf(name: str, wanted: str, allow_download: bool, revision: str | None) -> Path:
    """Return the GGUF file of a hub id whose name contains ``wanted`` as a word; of several parts the first. Nothing
    else is downloaded: F16 does not match BF16, nor Q4_K Q4_K_M."""
    spellings = dict.fromkeys((wanted, wanted.upper(), wanted.lower()))
    patterns = [f"{before}{each}[!a-zA-Z0-9_]*gguf" for each in spellings for before in ("", "*[!a-zA-Z0-9]")]
    folder = _from_hub(name, allow_download, revision=revision, patterns=patterns, ignored=_NO_LANGUAGE_MODEL)
    says = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?!\w)", re.IGNORECASE)
    files = [
        file
        for file in sorted(folder.rglob("*.gguf"))
        if says.search(file.relative_to(folder).as_posix()) and "mmproj" not in file.name
    ]
    firsts = [file for file in files if not (part := re.search(r"-(\d{5})-of-\d{5}$", file.stem)) or int(part[1]) == 1]
    if len(firsts) != 1:
        listed = ", ".join(file.name for file in firsts[:5]) or "none"
        raise ValueError(
            f"the hub model {name!r} should have one GGUF file whose name says {wanted!r}, and has {listed}: give "
            f"another part of its name ({name}:Q4_K_M)"
        )
    return firsts[0]


def find_on_hub(name: str, allow_download: bool, patterns: Sequence[str]) -> Path:
    """Return the directory of a hub id's files that match ``patterns``.

    Raises:
        ValueError: ``name`` has another form than a hub id, or the hub does not have it.
    """
    if not _HUB_ID.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is neither a directory nor a hub id (organisation/name)")
    return _from_hub(name, allow_download, patterns=patterns)


def _from_hub(
    name: str,
    allow_download: bool,
    *,
    revision: str | None = None,
    patterns: Sequence[str] = _HUB_FILES,
    ignored: Sequence[str] = _HUB_IGNORED,
) -> Path:
    """Return the snapshot directory of a hub id; huggingface_hub keeps it in its own cache and shows its own
    progress."""
    import huggingface_hub
    from huggingface_hub import errors

    near = difflib.get_close_matches(name.split("/")[1].lower(), BUILTIN_MODELS, n=1, cutoff=0.5)
    hint = f" (the built-in {near[0]!r} is near it)" if near else ""
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
            local_files_only=not allow_download,
        )
    except errors.GatedRepoError:
        raise ValueError(
            f"the hub model {name!r} is gated; accept its terms there and log in with `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"the hub model {name!r} has no revision {revision!r}: give a branch, tag or commit") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise ValueError(
            f"the hub has no model {name!r}{hint}; check the spelling, or log in with `hf auth login` if it is private"
        ) from None
    except errors.LocalEntryNotFoundError:
        if not allow_download:
            raise ValueError(f"the hub model {name!r} is not on this machine; allow downloads to fetch it") from None
        raise ValueError(
            f"no network: cannot reach the hub for {name!r}{hint}; check the connection or {_local()}"
        ) from None
    except (errors.HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"cannot fetch {name!r} from the hub: {reason[0] if reason else type(error).__name__}; check the "
            f"connection and the disk, or {_local()}"
        ) from None
    return Path(folder)


def _local() -> str:
    return "give a model directory or a .gguf file"
