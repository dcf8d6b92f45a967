"""Other people's clients against ``transect serve``: which features of which client work, at which version.

Each client is installed into an environment of its own under the cache folder (``~/.cache/transect/clients``): together
they would not agree on the packages that they want. There its program of ``client_programs/`` runs against a real
server of the built-in model, and says of each feature whether it works.

    python benchmarks/server/clients.py                    all of them; writes benchmarks/results/cpu/clients.json
    python benchmarks/server/clients.py openai litellm     these; the others keep what is recorded of them
    python benchmarks/server/clients.py --upgrade          with the newest versions that the package index has
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from transect.checkpoints.pull import BUILTIN_MODELS
from transect.hardware.cache import cache_folder

PROGRAMS = record.ROOT / "benchmarks" / "server" / "client_programs"
BUILTIN = next(iter(BUILTIN_MODELS))
OUT = record.RESULTS / "cpu" / "clients.json"
FEATURES = {
    "models": "models",
    "chat": "chat",
    "streamed chat": "streamed",
    "text completions": "completions",
    "structured output": "structured output",
    "tools": "tools",
    "streamed tools": "tools, streamed",
    "responses": "responses",
    "embeddings": "embeddings",
    "context overflow": "knows a full context",
}
"""Features by the names that the programs use, and the heads of their columns."""
TITLES = {"litellm-proxy": " (proxy)"}
"""Shown behind the names of packages that are two clients."""
INSTALL_S, RUN_S = 900, 600


class Unavailable(Exception):
    """A client cannot be had here; the text says why."""


@dataclass(frozen=True, slots=True)
class Client:
    """One client.

    Attributes:
        program: its file in ``client_programs/``.
        packages: installed packages; the first is the client. Empty: the program sends what the client ``calls`` sends.
        shared: it sees the packages of this environment, so that PyTorch is not installed again.
        bare: a package that is installed without what it wants: ``packages`` are what it needs for this.
        node: it runs in Node.
        calls: title of a client that no package index has, whose HTTP calls are sent.
    """

    program: str
    packages: tuple[str, ...]
    shared: bool = False
    bare: str | None = None
    node: bool = False
    calls: str = ""

    @property
    def package(self) -> str:
        """The name of the client's package."""
        return self.calls or (self.bare or self.packages[0]).split("[")[0]


CLIENTS = {
    "openai": Client("openai_python.py", ("openai",)),
    "openai-node": Client("openai_node.mjs", ("openai", "zod"), node=True),
    "litellm": Client("litellm_client.py", ("litellm", "mcp")),  # its tools and responses import mcp
    "langchain": Client("langchain_client.py", ("langchain-openai",)),
    "llama-index": Client("llama_index_client.py", ("llama-index-llms-openai-like",)),
    "instructor": Client("instructor_client.py", ("instructor",)),
    "pydantic-ai": Client("pydantic_ai_client.py", ("pydantic-ai-slim[openai]",)),
    "llm": Client("llm_client.py", ("llm",)),
    "guidellm": Client("guidellm_client.py", ("guidellm",), shared=True),
    "lm-eval": Client("lm_eval_client.py", ("lm-eval[api]",), shared=True),
    "openai-agents": Client("openai_agents_client.py", ("openai-agents",)),
    "ai": Client("ai_node.mjs", ("ai", "@ai-sdk/openai-compatible", "zod"), node=True),
    "litellm-proxy": Client("litellm_proxy_client.py", ("litellm[proxy]", "openai")),
    "aider": Client("aider_client.py", ("aider-chat",)),
    "open-webui": Client("open_webui_calls.py", (), calls="Open WebUI (its HTTP calls)"),
    "librechat": Client("librechat_calls.py", (), calls="LibreChat (its HTTP calls)"),
    # It wants an older transformers, gradio, spacy and selenium: none of them for a proxy.
    "optillm": Client(
        "optillm_client.py",
        ("flask", "cerebras_cloud_sdk", "z3-solver", "networkx", "math-verify"),
        shared=True,
        bare="optillm",
    ),
}


def installed(name: str, *, upgrade: bool = False) -> Path:
    """Return the folder of a client's environment, which is created if it does not exist.

    Raises:
        Unavailable: there is no Node, or the packages cannot be had.
    """
    client = CLIENTS[name]
    folder = cache_folder() / "clients" / name
    if client.calls:
        return folder
    wanted = json.dumps([*client.packages, client.bare, client.shared])
    note = folder / "installed.json"
    if note.is_file() and note.read_text() == wanted and not upgrade:
        return folder
    if client.node and shutil.which("npm") is None:
        raise Unavailable("node and npm are not installed")
    folder.mkdir(parents=True, exist_ok=True)
    if client.node:
        (folder / "package.json").write_text('{"private": true}')
        newest = [f"{package}@latest" for package in client.packages]
        _install(["npm", "install", "--silent", "--no-fund", "--no-audit", *newest], folder)
    else:
        _install([sys.executable, "-m", "venv", "--clear", str(folder)], folder)
        if client.shared:
            own = Path(sysconfig.get_path("purelib"))
            place = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
            (place / "shared.pth").write_text(f"{own}\n")
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--upgrade"]
        if client.bare:
            _install([*pip, "--no-deps", client.bare], folder)
        _install([*pip, *client.packages], folder)
    note.write_text(wanted)
    return folder


def _install(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    if done.returncode:
        raise Unavailable((done.stderr or done.stdout).strip().splitlines()[-1][:300])


def _environment() -> dict[str, str]:
    """Return the environment of a client's process, with nothing of this project on its path."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def version(name: str) -> str:
    """Return the version of an installed client."""
    folder, client = installed(name), CLIENTS[name]
    if client.calls:
        return "-"
    if client.node:
        manifest = folder / "node_modules" / client.package / "package.json"
        return str(json.loads(manifest.read_text())["version"])
    asking = f"import importlib.metadata as m; print(m.version({client.package!r}))"
    asked = [str(folder / "bin" / "python"), "-c", asking]
    return subprocess.run(asked, env=_environment(), capture_output=True, text=True, check=True).stdout.strip()


def run(name: str, url: str, model: str = BUILTIN) -> dict[str, Any]:
    """Try each feature of an installed client, and return the outcomes.

    Raises:
        Unavailable: see ``installed``.
        RuntimeError: its program did not come to its end.
    """
    folder, client = installed(name), CLIENTS[name]
    if client.node:  # Node looks for packages beside the program
        program = Path(shutil.copy(PROGRAMS / client.program, folder))
        shutil.copy(PROGRAMS / "outcomes.mjs", folder)
        command = [shutil.which("node") or "node", str(program)]
    else:
        python = sys.executable if client.calls else str(folder / "bin" / "python")
        command = [python, str(PROGRAMS / client.program)]
    done = subprocess.run(
        [*command, url, model], env=_environment(), capture_output=True, text=True, timeout=RUN_S, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{client.program} ended with {done.returncode}: {done.stderr[-500:]}")
    features = {line.pop("feature"): line for line in lines}
    if unknown := features.keys() - FEATURES.keys():
        raise RuntimeError(f"{client.program} names a feature that has no column: {', '.join(sorted(unknown))}")
    return {"package": client.package, "release": version(name), "node": client.node, "features": features}


@contextmanager
def server(*options: str, model: str = BUILTIN) -> Iterator[str]:
    """Yield the address of a server of the built-in model, on the processor."""
    command = [sys.executable, "-m", "transect", "serve", model, "--port", "0", "--device", "cpu", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if " ready on " not in line:
            raise RuntimeError(f"the server did not start: {line}")
        yield line.split(" ready on ")[1].split()[0]
    finally:
        process.terminate()
        process.wait(60)


def table(result: dict[str, Any]) -> str:
    """Format clients by feature."""
    said = {"works": "yes", "skipped": "not tried", "fails": "**no**"}
    head = ["client", "version", *FEATURES.values()]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    order = sorted(result["clients"].items(), key=lambda each: (each[1]["package"].lower(), each[0]))
    for name, found in order:
        tried = (found["features"].get(feature) for feature in FEATURES)
        cells = ("" if what is None else said[what["outcome"]] for what in tried)
        title = f"{found['package']}{TITLES.get(name, '')}{' (Node)' if found['node'] else ''}"
        lines.append(f"| {' | '.join([title, found['release'], *cells])} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--upgrade", action="store_true", help="install again")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    names = arguments.names or list(CLIENTS)
    if unknown := set(names) - CLIENTS.keys():
        parser.error(f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}")
    result = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {"clients": {}}
    result["command"] = "python benchmarks/server/clients.py"
    result["environment"] = record.environment(("torch", "transformers"))
    made = {name: result["environment"][name] for name in ("version", "commit")}
    failed = False
    with server("--max-model-len", "2048", "--max-num-seqs", "16") as url:
        for name in names:
            try:
                installed(name, upgrade=arguments.upgrade)
                found = run(name, url)
            except Unavailable as error:
                print(f"{name}: left out: {error}", file=sys.stderr)
                continue
            for feature, what in found["features"].items():
                failed |= what["outcome"] == "fails"
                print(f"{name} {found['release']}: {feature}: {what['outcome']} {what['said']}", flush=True)
            result["clients"][name] = {**found, **made}
    record.write(arguments.out, result)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
