"""Run a flow many times, each killed (SIGKILL) at another write, then run to its end: the results must be equal.

The steps are the shipped ones, but for training and the gate, which are replaced by quick ones behind the same
interface. The server is a small one in a process of its own. Prints a line of JSON.

    python tests/helpers/killed_flows.py FOLDER STRIDE

With a stride of 1 there is a kill at every write, with 10 at every tenth.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors.numpy import save_file

from transect.flow.catalog.models import model_of
from transect.flow.chain import FlowChain
from transect.flow.digests import key_of
from transect.flow.folder import write_bytes, write_json
from transect.flow.settings import FlowConfig
from transect.flow.steps.gate import compared_with
from transect.flow.steps.registry import steps as shipped
from transect.flow.steps.step import FlowStep, StepContext, StepOutcome

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16, "hidden_size": 16,
    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
FLOW = """
name = "m"
[data]
files = ["rows.jsonl"]
[train]
[release]
server = "http://127.0.0.1:PORT"
[watch]
requests = 30
looks = 3
every_s = 0.001
errors = 0.5
refusals = 0.5
"""


class SmallServer(BaseHTTPRequestHandler):
    """The routes that a flow asks; every reading of the counters finds ten more requests of each released version."""

    adapters: ClassVar[set[str]] = set()
    releases: ClassVar[dict[str, dict[str, float]]] = {}
    requests: ClassVar[Counter[str]] = Counter()

    def answer(self, value: Any, code: int = 200) -> None:
        content = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer({"data": [{"id": "base"}, *({"id": name, "parent": "base"} for name in self.adapters)]})
        elif self.path == "/metrics":
            lines = []
            for name, versions in self.releases.items():
                for version in versions:
                    self.requests[version] += 10
                    labels = f'{{release="{name}",version="{version}"}}'
                    lines += [
                        f"transect_version_{kind}_total{labels} {count}"
                        for kind, count in (("requests", self.requests[version]), ("answers", self.requests[version]))
                    ]
            self.answer("\n".join(lines) + "\n")
        else:
            found = self.releases.get(self.path.rpartition("/")[2])
            versions = [{"model": name, "share": share} for name, share in (found or {}).items()]
            self.answer({"versions": versions}, 404 if found is None else 200)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert Path(body["lora_path"]).is_dir()
        self.adapters.add(body["lora_name"])
        self.answer({})

    def do_PUT(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        versions = {each["model"]: each["weight"] for each in body["versions"]}
        unknown = versions.keys() - self.adapters - {"base"}
        if unknown:
            self.answer({"error": {"message": f"{unknown} are not served"}}, 400)
            return
        self.releases[self.path.rpartition("/")[2]] = versions
        self.answer({})

    def log_message(self, *_: Any) -> None:
        pass


def serve() -> tuple[int, int]:
    """Start a server in a process of its own; returns process id and port."""
    server = HTTPServer(("127.0.0.1", 0), SmallServer)
    pid = os.fork()
    if not pid:
        server.serve_forever()
    server.server_close()
    return pid, server.server_port


@dataclass(frozen=True)
class NoSettings:
    """No settings."""

    def files(self) -> tuple[str, ...]:
        return ()


def train(context) -> StepOutcome:
    """Write an adapter that depends on the data alone."""
    base = context.root / "model"
    content = context.file("data", "train").read_bytes()
    values = np.frombuffer(key_of(content.decode()).encode(), np.uint8).astype(np.float32).reshape(2, 8)
    folder = context.folder / "adapter"
    folder.mkdir(parents=True, exist_ok=True)
    names = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({names: values}, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": "../model"}
    write_bytes(json.dumps(settings).encode(), folder / "adapter_config.json")
    outputs = {
        "digest": model_of(str(folder), base=str(base)).digest, "base": str(base), "start": "", "settings": {},
        "data": context.output("data", "version"), "made_from": "these rows",
    }  # fmt: skip
    return StepOutcome("trained", outputs=outputs, files={"model": "adapter"})


def quick_steps() -> dict[str, FlowStep]:
    """The shipped steps, with a quick training and a gate that passes all."""
    made = dict(shipped())
    quick = {"settings": NoSettings, "plan": lambda context: "be quick"}

    def inputs(context: StepContext) -> dict[str, Any]:
        return {"data": context.output("data", "version")}

    made["train"] = FlowStep(name="train", place=20, run=train, inputs=inputs, **quick)

    def judge(context: StepContext) -> StepOutcome:
        against, version, _ = compared_with(context)
        return StepOutcome("passed", outputs={"against": against, "version": version})

    def judged(context: StepContext) -> dict[str, Any]:
        return {"candidate": context.output("train", "digest"), "against": compared_with(context)[1]}

    made["gate"] = FlowStep(name="gate", place=30, run=judge, inputs=judged, **quick)
    return made


def run_flow(folder: Path, kill_at: int | None, count: Callable[[], None] = lambda: None) -> None:
    """Run the flow; the process is killed at the write of this number, half of them before it and half after."""
    done = 0

    def killing(write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            nonlocal done
            for after in (False, True):
                result = write(*arguments) if after else None
                if done == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                done += 1
            return result

        return wrapped

    for place, name in ((Path, "replace"), (Path, "rename"), (os, "link")):
        setattr(place, name, killing(getattr(place, name)))
    steps = quick_steps()
    FlowChain(FlowConfig.from_toml(folder / "flow.toml", [], steps), steps, tell=lambda line: None).run()
    (folder / "writes").write_text(str(done))


def in_a_child(folder: Path, kill_at: int | None) -> int:
    """Run the flow in a child; returns its signal, or 0."""
    pid = os.fork()
    if not pid:
        try:
            run_flow(folder, kill_at)
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def result(folder: Path) -> dict[str, Any]:
    """Return all that must be equal: data, versions and their states, the chain. Times and the folder are left out."""
    found: dict[str, Any] = {}
    for path in sorted((folder / "flows").rglob("*.jsonl")) + sorted((folder / "registry").rglob("*")):
        if path.is_file() and path.name != "events.jsonl":
            found[str(path.relative_to(folder))] = path.read_bytes().decode("latin-1")
    for name, text in found.items():
        if name.endswith("lineage.json"):
            values = json.loads(text)
            found[name] = {key: values[key] for key in ("key", "digest", "version", "parents", "made_from", "bytes")}
        elif name == "registry/m.json":
            values = json.loads(text)
            history = [[each["version"], each["state"], each.get("replaced")] for each in values["history"]]
            found[name] = [values["current"], history]
    chain = json.loads((folder / "flows" / "m" / "chain.json").read_text())
    found["chain"] = [[step["name"], step["state"], step["outcome"].get("passed")] for step in chain["steps"]]
    return found


def prepare(folder: Path, port: int) -> None:
    """Write rows, a model and the flow's file."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "model").mkdir(parents=True)
    rows = [{"question": f"{key_of(number)} is what?", "answer": str(number)} for number in range(30)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "flow.toml").write_text(FLOW.replace("PORT", str(port)))
    write_json(MODEL, folder / "model" / "config.json")
    save_file({"a": np.zeros(4, np.float32)}, folder / "model" / "model.safetensors")


def run_once_here(folder: Path) -> None:
    """Import what a flow needs, so that no child has to."""
    pid, port = serve()
    try:
        prepare(folder, port)
        steps = quick_steps()
        FlowChain(FlowConfig.from_toml(folder / "flow.toml", [], steps), steps, tell=lambda line: None).run()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main(place: Path, stride: int) -> None:
    folder = place / "flow"
    run_once_here(place / "warm")
    expected, writes, kills, different = None, 1, 0, []
    number: int | None = None
    while number is None or number < writes:
        pid, port = serve()
        try:
            prepare(folder, port)
            if number is not None:
                kills += in_a_child(folder, number) == signal.SIGKILL
            assert in_a_child(folder, None) == 0
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if expected is None:
            expected, writes = result(folder), int((folder / "writes").read_text())
        elif result(folder) != expected:
            different.append(number)
        number = 0 if number is None else number + stride
    print(json.dumps({"writes": writes, "kills": kills, "different": different, "steps": expected["chain"]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
