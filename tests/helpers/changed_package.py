"""A copy of the package with the changes that pages show, and one process in which its commands run one by one.

Most of a short command is the import of torch and of the package. The process imports them once, for all guides: each
adds one file, which no other's needs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, ignore_patterns
from subprocess import CompletedProcess

from effort import proving

ROOT = Path(__file__).parents[2]
LOOP = """
import contextlib, gc, io, json, os, sys, traceback
gc.set_threshold(100_000, 50, 50)  # what is imported stays
from transect.cli import main
requests, answers = sys.stdin, os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.stdin = io.StringIO()
for line in requests:
    folder, program, sys.argv = json.loads(line)
    os.chdir(folder)
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            if program:
                exec(compile(program, "program", "exec"), {"__name__": "__main__"})
            else:
                main()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        except Exception:
            traceback.print_exc()
            code = 1
    gc.collect()
    gc.freeze()  # each search for garbage would go through all that has been imported
    print(json.dumps([code, out.getvalue(), errors.getvalue()]), file=answers, flush=True)
"""


ANSWER = """
import sys
from transect import LLM, SamplingParams
model, prompt, tokens = sys.argv[1:]
llm = LLM(model, device="cpu", threads=1, dtype="float32")
params = SamplingParams(max_tokens=int(tokens), temperature=0.0)
print(llm.generate(prompt, params)[0].outputs[0].text)
"""


PAGES = [f"docs/extend/{name}.md" for name in ("gpu-preset", "layout", "model", "number-format", "objective", "policy",
                                               "search-method")]  # fmt: skip
"""Guides whose change is one new file."""


def change_of(page: str) -> str:
    """Return the change that a page shows: one new file."""
    (change,) = re.findall(r"```diff\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert change.count("diff --git") == 1 and "new file" in change
    return change


class ChangedSource:
    """A copy of the package, ``folder/src``, with the changes of pages, and the process; ``environment`` finds it."""

    def __init__(self, folder: Path, pages: list[str]) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
        # Compiled modules are copied with their sources; others with a number at the end are just being written.
        copytree(ROOT / "src", folder / "src", ignore=ignore_patterns("*.pyc.*"))
        for page in pages:
            subprocess.run(["git", "apply", "-"], input=change_of(page), text=True, cwd=folder, check=True)
        self._process: subprocess.Popen[str] | None = None

    def ask(self, folder: Path, program: str, words: list[str], code: int) -> CompletedProcess[str]:
        """Run a program, or a command if it is empty, in a folder; it must end with this exit code."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", LOOP], cwd=self.folder, env=self.environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        assert self._process.stdin and self._process.stdout
        print(json.dumps([str(folder), program, words]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process ended in {words}"
        done = CompletedProcess(words, *json.loads(answer))
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


class ChangedPackage:
    """A changed source, and a folder of one guide's own, which is the directory that commands run in."""

    def __init__(self, source: ChangedSource, folder: Path) -> None:
        self._source, self.folder = source, folder
        self.environment = source.environment

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def transect(self, *arguments: object, code: int = 0) -> CompletedProcess[str]:
        """Run ``transect ARGUMENTS``, which must end with this exit code."""
        return self._source.ask(self.folder, "", ["transect", *map(str, arguments)], code)

    def python(self, program: str, *arguments: str) -> CompletedProcess[str]:
        """Run a program, which must not fail."""
        return self._source.ask(self.folder, program, ["program", *arguments], 0)

    def answer(self, model: str, prompt: str, tokens: int) -> str:
        """Return greedy text after the prompt."""
        return self.python(ANSWER, model, prompt, str(tokens)).stdout


class ChangedPackages:
    """Packages by page. They share a source with the changes of all pages; with ``--prove`` each page has one alone."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self._make_folder = make_folder
        self._sources: dict[str, ChangedSource] = {}

    def __call__(self, page: str) -> ChangedPackage:
        assert page in PAGES
        key, pages = (page, [page]) if proving() else ("", PAGES)
        if key not in self._sources:
            self._sources[key] = ChangedSource(self._make_folder("source"), pages)
        return ChangedPackage(self._sources[key], self._make_folder("package"))

    def close(self) -> None:
        """End the processes."""
        for source in self._sources.values():
            source.close()
