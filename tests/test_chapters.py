"""The pages that go from data to a model: their files are written and their commands run, in order, in one folder.

The files and commands are those of the page, but for what makes a run long: a tiny model stands in for the built-in
one, and runs take two steps. Servers are started with ``--prove`` alone.
"""

from __future__ import annotations

import glob
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from commands import run_here
from effort import proving
from pages import CHAPTERS
from tiny_llm import save_tiny_llm

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
LONGEST = "docs/learn/chat-model.md"
FAST = ("steps=2", "eval_every=0", "schedule.warmup=0", "schedule.decay=0", "device=cpu", "data.seq_len=512",
        "data.micro_batch=1024", "lora.rank=2")  # fmt: skip


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(folder, max_position_embeddings=1024, intermediate_size=128)
    return folder


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.prove] if page == LONGEST else []) for page in CHAPTERS]
)
def test_a_chapter_can_be_followed(page: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("docs", "examples", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    server: subprocess.Popen[str] | None = None
    ran = 0
    try:
        for kind, title, text in FENCE.findall((ROOT / page).read_text()):
            text = text.replace("smollm2-135m", shlex.quote(str(tiny)) if kind == "bash" else str(tiny))
            if title:
                (tmp_path / title).write_text(text)
            for line in text.splitlines() if kind == "bash" else ():
                ran += 1
                words = shlex.split(line, comments=True)
                if words[:2] == ["transect", "serve"]:
                    server = _serve(words) if proving() else None
                elif words[0] == "curl":
                    if server is not None:
                        _ask(server, words)
                else:
                    _run(words, tiny)
    finally:
        if server is not None:
            server.terminate()
            server.wait(60)
    assert ran >= 2


def _run(words: list[str], tiny: Path) -> None:
    words = [name for word in words for name in (sorted(glob.glob(word)) if "*" in word else [word])]
    if words[0] == "python":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words[1:])
            runpy.run_path(words[1], run_name="__main__")
        return
    assert words[0] == "transect", f"the page has a command that nothing runs: {words}"
    arguments = words[1:]
    if arguments[0] == "train":
        if "--resume" in arguments:
            arguments[arguments.index("--steps") + 1] = "3"
        else:
            model = (f"model={tiny}",) if arguments[1].startswith("recipes/") else ()
            arguments += [part for setting in (*FAST, *model) for part in ("--set", setting)]
    done = run_here(*arguments)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr}"
    assert done.stdout


def _serve(words: list[str]) -> subprocess.Popen[str]:
    words[words.index("--port") + 1] = "0"
    command = [sys.executable, "-m", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _ask(server: subprocess.Popen[str], words: list[str]) -> None:
    assert server.stdout is not None
    ready = server.stdout.readline()
    url = ready.split(" ready on ")[1].split()[0]
    path = words[1].split("8321", 1)[1]
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # curl's own with -d, unless -H says another
    if "-H" in words:
        headers = dict([words[words.index("-H") + 1].split(": ", 1)])
    answer = httpx.post(url + path, content=words[words.index("-d") + 1], headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"
