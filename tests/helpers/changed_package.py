"""A copy of the package with the change that a page shows, and one process in which its commands run one by one.

Most of a short command is the import of torch and of the package. The process imports them once.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns
from subprocess import CompletedProcess

ROOT = Path(__file__).parents[2]
LOOP = """
import contextlib, gc, io, json, os, sys, traceback
from transect.cli import main
requests, answers = sys.stdin, os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.stdin = io.StringIO()
for line in requests:
    program, sys.argv = json.loads(line)
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


class ChangedPackage:
    """``folder/src`` is the copy, and ``folder`` the directory that commands run in; ``environment`` finds the copy."""

    def __init__(self, folder: Path, page: str) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
        # Compiled modules are copied with their sources; others with a number at the end are just being written.
        copytree(ROOT / "src", folder / "src", ignore=ignore_patterns("*.pyc.*"))
        (change,) = re.findall(r"```diff\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        assert change.count("diff --git") == 1 and "new file" in change
        subprocess.run(["git", "apply", "-"], input=change, text=True, cwd=folder, check=True)
        self._process: subprocess.Popen[str] | None = None

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def transect(self, *arguments: object, code: int = 0) -> CompletedProcess[str]:
        """Run ``transect ARGUMENTS``, which must end with this exit code."""
        return self._ask("", ["transect", *map(str, arguments)], code)

    def python(self, program: str, *arguments: str) -> CompletedProcess[str]:
        """Run a program, which must not fail."""
        return self._ask(program, ["program", *arguments], 0)

    def answer(self, model: str, prompt: str, tokens: int) -> str:
        """Return greedy text after the prompt."""
        return self.python(ANSWER, model, prompt, str(tokens)).stdout

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _ask(self, program: str, words: list[str], code: int) -> CompletedProcess[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", LOOP], cwd=self.folder, env=self.environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        assert self._process.stdin and self._process.stdout
        print(json.dumps([program, words]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process ended in {words}"
        done = CompletedProcess(words, *json.loads(answer))
        assert done.returncode == code, done.stdout + done.stderr
        return done
