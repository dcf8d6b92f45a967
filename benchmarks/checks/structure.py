"""Figures of the source tree and of what programs import and enter, before the restructuring and now.

    python benchmarks/checks/structure.py [--before COMMIT] [--out FILE]

Both trees are measured by this program, in this environment, on one tiny model. Read from the sources: lines by folder,
class names that several classes share, comparisons with the names of number formats, families and schedules, and small
files with one caller, and what each guide changes. From runs of a CPU: modules that programs import, climbs of
``build_engine``, and folders and files that weights enter, and a chat request in the HTTP process and in the engine's.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from transect.spec.families.registry import families
from transect.spec.layouts.schedules.registry import schedules
from transect.spec.numbers.registry import formats

BEFORE = "b69223fb"
"""The commit before the restructuring, with which speed was compared too."""
SMALL = 60
AXES = (
    *("families", "numbers", "presets", "schedules", "orders", "policies", "drafters", "objectives", "strategies"),
    *("rungs", "traces", "cli"),
)
"""Folders of entries, which may be small."""
LEVELS = (
    *("spec", "costs", "hardware", "formats", "ops", "models", "checkpoints", "text", "parallel", "engine", "train"),
    *("bench", "explain", "plan", "learn", "server", "cluster", "cli"),
)
"""Folders, lowest first."""
MODULES = """
import atexit, sys
ours = lambda: [name for name in sys.modules if name.split(".")[0] == "transect"]
atexit.register(lambda: open(sys.argv[1], "w").write(f"{len(ours())} {'torch' in sys.modules}"))
"""
PROGRAMS = {
    "import transect": "import transect",
    "transect --help": "from transect.cli import main; sys.argv[1:] = [sys.argv[1]]; main(['--help'])",
    "an engine on a CPU": "from transect import LLM; LLM('model', device='cpu', threads=1).generate([[1, 2]])",
    "a LoRA run on a CPU": "from transect.cli import main; main(['train', 'run.toml'])",
}
RUN = """
model = "model"
task = "lora"
steps = 1
device = "cpu"
threads = 1
log_to = []
data = {train = ["text.txt"], seq_len = 32, micro_batch = 64}
"""
WEIGHTS = """
import json, sys
try:
    from transect.checkpoints.load import load_model
    from transect.checkpoints.resolve import resolve
except ImportError:
    from transect.models.load import load_model
    from transect.models.resolve import resolve
entered = set()
source = resolve("model")
sys.setprofile(lambda frame, event, argument: event == "call" and entered.add(frame.f_code.co_filename))
load_model(source)
sys.setprofile(None)
json.dump(sorted(entered), open(sys.argv[1], "w"))
"""
CLIMBS = """
import json, sys
from transect.engine.config import EngineConfig
from transect.engine.build import build_engine
entered, calls = [], set()
def note(frame, event, argument):
    name = frame.f_code.co_filename
    if event == "call" and "/transect/" in name:
        above = frame.f_back
        while above is not None and "/transect/" not in above.f_code.co_filename:
            above = above.f_back
        calls.add((above.f_code.co_filename if above else name, name))
        if not entered or entered[-1] != name:
            entered.append(name)
sys.setprofile(note)
build_engine(EngineConfig(model="model", device="cpu", threads=1))
sys.setprofile(None)
json.dump([entered, sorted(calls)], open(sys.argv[1], "w"))
"""
ENTERED = """
import os, sys, threading, time
if os.environ.get("ENTERED"):
    seen, on = set(), [False]
    def note(frame, event, argument):
        if on[0] and event == "call":
            seen.add(frame.f_code.co_filename)
    def watch():
        folder = os.environ["ENTERED"]
        while not os.path.exists(folder + "/begin"):
            time.sleep(0.01)
        on[0] = True
        while not os.path.exists(folder + "/end"):
            time.sleep(0.01)
        on[0] = False
        with open(f"{folder}/{os.getpid()}.files", "w") as file:
            file.write("\\n".join(seen))
    threading.Thread(target=watch, daemon=True).start()
    threading.setprofile(note)
    sys.setprofile(note)
"""
"""A ``sitecustomize`` that notes the files of all functions called between two moments, in every process."""


def trees(source: Path) -> Iterator[tuple[Path, ast.Module, str]]:
    """Yield each source file of a tree, parsed, with its text."""
    for path in sorted(source.rglob("*.py")):
        text = path.read_text()
        yield path.relative_to(source), ast.parse(text), text


def read(source: Path) -> dict[str, Any]:
    """Return the figures that the sources alone give; ``source`` is the folder ``transect``."""
    lines: Counter[str] = Counter()
    classes: dict[str, set[Path]] = defaultdict(set)
    compared: Counter[str] = Counter()
    callers: dict[str, set[str]] = defaultdict(set)
    sizes: dict[str, int] = {}
    names = {"formats": set(formats()), "families": set(families()), "schedules": set(schedules())}
    for path, tree, text in trees(source):
        folder = path.parts[0] if len(path.parts) > 1 else "transect"
        lines[folder] += len(text.splitlines())
        module = ".".join(path.with_suffix("").parts)
        if path.name != "__init__.py":
            sizes[module] = len(text.splitlines())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].add(path)
            elif isinstance(node, ast.Compare):
                words = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                words = {word for word in words if isinstance(word, str)}
                for kind, known in names.items():
                    compared[kind] += bool(words & known)
            elif isinstance(node, ast.ImportFrom):
                for target in imported(node, path):
                    callers[target].add(module)
    axis = re.compile(rf"\b({'|'.join(AXES)})\.")
    small = (each for each, size in sizes.items() if size < SMALL and len(callers[each]) == 1)
    crumbs = [each for each in small if not axis.search(each)]
    shared = {name: len(places) for name, places in classes.items() if len(places) > 1}
    return {
        "lines": dict(sorted(lines.items())),
        "files": len(sizes),
        "shared_class_names": len(shared),
        "classes_of_shared_names": sum(shared.values()),
        "compared_names": dict(compared),
        "small_files_with_one_caller": len(crumbs),
    }


def guides(docs: Path) -> dict[str, dict[str, int]]:
    """Count files, places and lines that each guide of ``docs/extend`` changes to add its example."""
    found = {}
    for page in sorted(docs.glob("extend/*.md")):
        if change := "".join(re.findall(r"```diff\n(.*?)```", page.read_text(), re.DOTALL)):
            lines = change.splitlines()
            found[page.stem] = {
                "files": sum(line.startswith("diff --git") for line in lines),
                "places": sum(line.startswith("@@") for line in lines),
                "lines": sum(line.startswith("+") and not line.startswith("+++") for line in lines),
            }
    return found


def imported(node: ast.ImportFrom, path: Path) -> Iterator[str]:
    """Yield the modules, below ``transect``, that an import may mean."""
    if node.level:
        above = path.parent.parts
        above = above[: len(above) - (node.level - 1)]
        base = ".".join((*above, *filter(None, [node.module])))
    elif (node.module or "").split(".")[0] == "transect":
        base = (node.module or "")[len("transect.") :]
    else:
        return
    yield base
    for name in node.names:
        yield f"{base}.{name.name}" if base else name.name


def run(tree: Path, folder: Path, program: str) -> str:
    """Run a program on a tree, in ``folder``, and return what it wrote to the file that its argument names."""
    out = folder / "figures"
    out.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", program, str(out)], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(tree)}, timeout=280, check=False,
    )  # fmt: skip
    if not out.exists():
        raise RuntimeError(done.stdout + done.stderr)
    return out.read_text()


def climbs(entered: list[str], calls: list[tuple[str, str]]) -> dict[str, int]:
    """Count folders and files of ``build_engine``, and how often it goes to a higher level than it was at.

    A climb between folders is mostly a return, after which the caller enters its next file. ``calls`` are pairs of
    files; of those, the last two counts are from one folder to a lower one, and to a higher one.
    """
    folders = [Path(name.rpartition("/transect/")[2]).parts[0] for name in entered]
    firsts = list(dict.fromkeys(zip(folders, entered, strict=True)))
    order = [folder for folder, _ in firsts]
    levels = [LEVELS.index(folder) for folder in order if folder in LEVELS]
    ups = sum(b > a for a, b in pairwise(levels))
    plain = [level for level in levels if level >= LEVELS.index("hardware")]
    aside = sum(b > a for a, b in pairwise(plain))
    pairs = [[Path(name.rpartition("/transect/")[2]).parts[0] for name in call] for call in calls]
    steps = [LEVELS.index(b) - LEVELS.index(a) for a, b in pairs if a in LEVELS and b in LEVELS]
    return {
        "files": len(set(entered)),
        "folders": len(set(folders)),
        "climbs between folders": ups,
        "climbs, descriptions and costs aside": aside,
        "pairs of files with calls down": sum(step < 0 for step in steps),
        "pairs of files with calls up": sum(step > 0 for step in steps),
    }


def counted(files: list[str]) -> dict[str, int]:
    """Count the package's files among those that were entered, and their folders."""
    ours = {name.rpartition("/transect/")[2] for name in files if "/transect/" in name}
    return {"files": len(ours), "folders": len({name.rpartition("/")[0] for name in ours})}


def chat(tree: Path, folder: Path) -> dict[str, int]:
    """Count folders and files that a chat request enters, in all processes of a server."""
    hook, noted = folder / "hook", folder / "noted"
    hook.mkdir(exist_ok=True)
    noted.mkdir(exist_ok=True)
    for each in noted.iterdir():
        each.unlink()
    (hook / "sitecustomize.py").write_text(ENTERED)
    server = subprocess.Popen(
        [sys.executable, "-m", "transect", "serve", "model", "--port", "0", "--device", "cpu", "--threads", "1"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": f"{hook}:{tree}", "ENTERED": str(noted)},
    )  # fmt: skip
    try:
        assert server.stdout is not None
        said: list[str] = []
        url = ""
        for line in server.stdout:
            said.append(line)
            if found := re.search(r"ready on (http://[\w.:]+)", line):
                url = found[1]
                break
        if not url:
            raise RuntimeError("".join(said))
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as reply:
            model = json.load(reply)["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True}
        ask(url, body)  # what is done once is done
        (noted / "begin").touch()
        time.sleep(2.0)  # for every process to see it, also on a busy machine
        ask(url, body)
        time.sleep(1.0)
        (noted / "end").touch()
        time.sleep(3.0)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
    return counted([name for each in noted.glob("*.files") for name in each.read_text().splitlines()])


def ask(url: str, body: dict[str, Any]) -> None:
    """Send a chat request and read the whole answer."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        reply.read()


def measure(tree: Path, folder: Path) -> dict[str, Any]:
    """Return all figures of a tree; ``tree`` holds the package, ``folder`` a model, a text and a run."""
    found = read(tree / "transect")
    found["guides"] = guides(tree.parent / "docs")
    found["modules"] = {}
    for name, program in PROGRAMS.items():
        count, torch = run(tree, folder, MODULES + program).split()
        found["modules"][name] = {"ours": int(count), "torch": torch == "True"}
        print(f"  {name}: {count} of our modules", flush=True)
    found["build_engine"] = climbs(*json.loads(run(tree, folder, CLIMBS)))
    found["weights"] = counted(json.loads(run(tree, folder, WEIGHTS)))
    found["chat_request"] = chat(tree, folder)
    print(f"  {found['build_engine']}, chat {found['chat_request']}", flush=True)
    return found


def table(result: dict[str, Any]) -> str:
    """Return the table of ``docs/understand/architecture.md``."""
    before, now = result["before"], result["now"]
    rows: list[tuple[str, Any, Any]] = [
        (f"our modules that `{name}` imports" if " " in name and "CPU" not in name else f"the same, {name}",
         before["modules"][name]["ours"], now["modules"][name]["ours"])
        for name in PROGRAMS
    ]  # fmt: skip
    labels = {
        "shared_class_names": "class names that several classes have",
        "small_files_with_one_caller": f"files under {SMALL} lines with one caller, entries of an axis aside",
    }
    rows += [(label, before[key], now[key]) for key, label in labels.items()]
    rows += [
        (f"comparisons with names of {kind}", before["compared_names"][kind], now["compared_names"][kind])
        for kind in now["compared_names"]
    ]
    for key, label in (
        ("build_engine", "`build_engine` on a CPU"),
        ("weights", "a model's weights as they are loaded"),
        ("chat_request", "a chat request"),
    ):
        for what in now.get(key, {}):
            rows.append((f"{what} of {label}", before[key][what], now[key][what]))
    rows.append(("lines of `src/`", sum(before["lines"].values()), sum(now["lines"].values())))
    lines = [
        "| | before | now |",
        "|---|---|---|",
        *(f"| {label} | {a:,} | {b:,} |" for label, a, b in rows),
    ]
    lines += ["", "| guide: files, places, lines that it changes | before | now |", "|---|---|---|"]
    for name, counts in now.get("guides", {}).items():
        old = "/".join(map(str, before["guides"].get(name, {}).values()))
        lines.append(f"| `{name}` | {old} | {'/'.join(map(str, counts.values()))} |")
    folders = sorted(set(before["lines"]) | set(now["lines"]))
    lines += ["", "| folder | lines before | lines now |", "|---|---|---|"]
    lines += [f"| `{each}` | {before['lines'].get(each, 0):,} | {now['lines'].get(each, 0):,} |" for each in folders]
    made = record.made_at([result["environment"]])
    return "\n".join([*lines, "", f"`{result['command']}`, {made}; before: commit {result['before_commit']}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "structure.json")
    options = parser.parse_args()
    sys.path.insert(0, str(record.ROOT / "tests" / "helpers"))
    from tiny_llm import save_tiny_llm

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        save_tiny_llm(folder / "model")
        (folder / "text.txt").write_text("The cat sat on the mat. " * 100)
        (folder / "run.toml").write_text(RUN)
        archive = subprocess.run(
            ["git", "archive", options.before, "src", "docs/extend"], cwd=record.ROOT, capture_output=True, check=True
        )
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as file:
            file.extractall(folder / "before", filter="data")
        result = {
            "command": "python benchmarks/checks/structure.py",
            "environment": record.environment(("torch",)),
            "before_commit": options.before,
        }
        for label, tree in (("before", folder / "before" / "src"), ("now", record.ROOT / "src")):
            print(label, flush=True)
            result[label] = measure(tree, folder)
            record.write(options.out, result)


if __name__ == "__main__":
    main()
