"""Adapters that requests choose by ``model``: their names, their files, and who uses them.

A name means the files that it was last loaded with. Requests carry the content id of these, so a name that is used
again for other files disturbs no stream, and no cached prefix of the earlier adapter is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from ..checkpoints.peft_config import AdapterFiles, adapter_folder
from .http.errors import ApiError
from .options import ServerOptions, named_modules


@dataclass(slots=True)
class Entry:
    """An adapter by name. ``files`` is None until it is first loaded; ``users`` counts requests that run with it."""

    name: str
    path: Path
    files: AdapterFiles | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    users: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


class Adapters:
    """Adapters of a server.

    Args:
        engine: reads and serves them.
        options: names that are served from the start, and the directory from which others may come.
        registry: of metrics.
    """

    def __init__(self, engine: Any, options: ServerOptions, registry: CollectorRegistry) -> None:
        self._engine = engine
        self._folder = None if options.allowed_lora_dir is None else Path(options.allowed_lora_dir).resolve()
        modules = named_modules(options.lora_modules)
        self._entries = {name: Entry(name, Path(path)) for name, path in modules.items()}
        self._requests = Counter("transect_adapter_requests", "Requests by adapter", ["adapter"], registry=registry)
        self._tokens = Counter(
            "transect_adapter_tokens",
            "Tokens of prompts and answers by adapter",
            ["adapter", "kind"],
            registry=registry,
        )

    async def start(self) -> None:
        """Load the adapters that were named at the start.

        Raises:
            ValueError: one cannot be served.
        """
        for entry in self._entries.values():
            entry.files = await self._read(entry.path)

    def entries(self) -> list[Entry]:
        """List all adapters that requests can name: those that were loaded, and those in the allowed directory."""
        if self._folder is not None:
            for each in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
                self.find(each.name)
        return list(self._entries.values())

    def find(self, name: str) -> Entry | None:
        """Return the adapter of a name, or None."""
        entry = self._entries.get(name)
        if entry is None and self._folder is not None and name and Path(name).name == name and name[0] != ".":
            try:
                path = adapter_folder(str(self._inside(name)))
            except (ApiError, ValueError, OSError):
                return None
            entry = self._entries[name] = Entry(name, path)
        return entry

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[AdapterFiles]:
        """Yield the files of an adapter for as long as a request runs with it; they are read when first requested.

        Raises:
            ApiError: 404 if it was unloaded meanwhile, 400 if it cannot be served.
        """
        entry = self.find(name)
        if entry is None:
            raise unknown(name)
        entry.users += 1
        entry.idle.clear()
        try:
            async with entry.loading:
                if entry.files is None:
                    try:
                        entry.files = await self._read(entry.path)
                    except ValueError as error:
                        raise ApiError(400, str(error), param="model", code="adapter_error") from None
            self._requests.labels(name).inc()
            yield entry.files
        finally:
            entry.users -= 1
            if not entry.users:
                entry.idle.set()

    def count(self, name: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Count tokens of a request that has ended."""
        self._tokens.labels(name, "prompt").inc(prompt_tokens)
        self._tokens.labels(name, "answer").inc(completion_tokens)

    async def load(self, name: str, path: str, *, replace: bool = False) -> Entry:
        """Serve an adapter from the allowed directory under a name.

        Args:
            path: absolute, or below that directory.
            replace: the name may be in use; requests that run keep their adapter.

        Raises:
            ApiError: 403 for a path elsewhere, 400 if the name is in use or the adapter cannot be served.
        """
        if name in self._entries and self._entries[name].files is not None and not replace:
            message = f"the adapter {name!r} is loaded already: unload it first, or send load_inplace"
            raise ApiError(400, message, param="lora_name", code="adapter_exists")
        inside = self._inside(path)
        try:
            folder = adapter_folder(str(inside))
            files = await self._read(folder)
        except ValueError as error:
            raise ApiError(400, str(error), param="lora_path", code="adapter_error") from None
        entry = self._entries.setdefault(name, Entry(name, folder))
        entry.path, entry.files, entry.created = folder, files, int(time.time())
        return entry

    async def unload(self, name: str) -> None:
        """Serve an adapter no longer: new requests are refused at once, and this returns when running ones have ended.

        Raises:
            ApiError: 404 if there is none of this name.
        """
        entry = self._entries.pop(name, None)
        if entry is None or entry.files is None:
            raise unknown(name)
        if entry.users:
            await entry.idle.wait()
        if all(each.files is None or each.files.id != entry.files.id for each in self._entries.values()):
            await self._engine.forget_adapter(entry.files)

    def _inside(self, path: str) -> Path:
        """Resolve links and ``..`` of a path, if it is in the allowed directory."""
        if self._folder is None:
            message = "adapters are loaded at run time only under --allowed-lora-dir: start the server with it"
            raise ApiError(403, message, code="no_adapter_directory")
        found = (self._folder / path).resolve()
        if not found.is_relative_to(self._folder) or found == self._folder:
            message = f"lora_path must be a directory below {self._folder}, links resolved"
            raise ApiError(403, message, param="lora_path", code="outside_adapter_directory")
        return found

    async def _read(self, path: Path) -> AdapterFiles:
        files = await asyncio.to_thread(lambda: AdapterFiles.of(adapter_folder(str(path))))
        await self._engine.load_adapter(files)
        return files


def unknown(name: str) -> ApiError:
    """Return the error for an adapter that is not served."""
    return ApiError(404, f"the adapter {name[:100]!r} is not served", param="model", code="model_not_found")
