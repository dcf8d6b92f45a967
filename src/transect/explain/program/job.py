"""Explains a job of several processes: what ``torchrun``, ``accelerate launch`` or another launcher starts.

The launcher runs as always. Each Python process below it that imports torch explains itself (``child.py``) and leaves a
file; here the files are compared: stragglers, the rank that others wait for, and exposed communication.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .child import FOLDER, SETTINGS
from .split import PARTS

LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed")
"""Modules that start other processes."""
STRAGGLES = 1.1
"""Least work of a straggler, relative to the mean of the other ranks."""
WORTH = 0.02
CUSTOMIZE = "from transect.explain.program.child import install\n\ninstall()\n"


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a job. Times are seconds of a step, or of the whole process if it has no steps."""

    name: str
    step: float
    waiting: float
    """Seconds of exposed communication."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Figures of its explanation."""

    @property
    def working(self) -> float:
        """Seconds of the step without waiting for others."""
        return self.step - self.waiting


@dataclass(frozen=True, slots=True)
class Job:
    """Processes of a job, and the exit status of its launcher."""

    ranks: list[Rank]
    status: int = 0

    @property
    def straggler(self) -> Rank | None:
        """Rank that the others wait for; None if all work equally long."""
        if len(self.ranks) < 2:
            return None
        slowest = max(self.ranks, key=lambda rank: rank.working)
        others = [rank.working for rank in self.ranks if rank is not slowest]
        return slowest if slowest.working > STRAGGLES * sum(others) / len(others) else None

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Findings about the ranks together and about each of them, best first; ``gain`` is seconds of a step."""
        found = list(self._together())
        seen: dict[tuple[str, str], dict[str, Any]] = {}
        for rank in self.ranks:
            for each in rank.figures["findings"]:
                if each["kind"] == "communication":
                    continue
                kept = seen.setdefault((each["kind"], each["title"]), {**each, "ranks": [], "gain": 0.0})
                kept["ranks"].append(rank.name)
                kept["gain"] = max(kept["gain"], each["share"] * rank.step)
        return sorted(found + list(seen.values()), key=lambda each: -each["gain"])

    def _together(self) -> Iterator[dict[str, Any]]:
        slow = self.straggler
        step = max((rank.step for rank in self.ranks), default=0.0)
        names = [rank.name for rank in self.ranks]
        if slow is not None:
            mean = sum(rank.working for rank in self.ranks) / len(self.ranks)
            gain = slow.working - mean
            heaviest = max(slow.figures["parts_s"], key=lambda part: _extra(self.ranks, slow, part))
            yield {
                "kind": "straggler",
                "title": f"the others wait for {slow.name}",
                "evidence": f"its own work takes {1e3 * slow.working:.1f} ms of a step, the mean is {1e3 * mean:.1f} "
                f"ms; most of the difference: {PARTS[heaviest]}",
                "gain": gain,
                "share": gain / step if step else 0.0,
                "advice": "give each rank as much work (lengths of sequences, samples), and see what else runs there",
                "apply": "",
                "ranks": [slow.name],
            }
        least = min((rank.waiting for rank in self.ranks), default=0.0)  # the last to arrive does not wait
        if step and least > WORTH * step:
            yield {
                "kind": "communication",
                "title": "communication that nothing hides",
                "evidence": f"each rank spends {1e3 * least:.1f} ms or more of a step on it",
                "gain": least,
                "share": least / step,
                "advice": "accumulate gradients (no_sync()), larger buckets (bucket_cap_mb), bfloat16 compression "
                "(bf16_compress_hook), or fewer and larger messages",
                "apply": "",
                "ranks": names,
            }

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON; seconds."""
        ranks = [{"name": r.name, "step_s": r.step, "waiting_s": r.waiting, **r.figures} for r in self.ranks]
        return {"status": self.status, "findings": self.findings, "ranks": ranks}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{len(self.ranks)} processes with torch" + (f"; exit status {self.status}" if self.status else "")
        yield ""
        yield "  process        step ms   own work ms   exposed communication ms"
        for rank in self.ranks:
            times = f"{1e3 * rank.step:10.1f} {1e3 * rank.working:13.1f} {1e3 * rank.waiting:16.1f}"
            yield f"  {rank.name:12} {times}{'   <- others wait for it' if rank is self.straggler else ''}"
            for child in rank.figures["facts"].get("children", ()):
                yield f"    child {child['pid']} ({child['name']}): {child['busy']:.0%} of a core"
        yield ""
        if not self.findings:
            yield "findings: none that would gain 2% or more"
        for number, each in enumerate(self.findings, 1):
            yield f"{number}. {each['title']}: {1e3 * each['gain']:.1f} ms of a step to gain ({each['share']:.0%})"
            yield f"   evidence: {each['evidence']} [{', '.join(each['ranks'])}]"
            yield f"   do: {each['advice']}"


def _extra(ranks: Sequence[Rank], slow: Rank, part: str) -> float:
    """Return the seconds of a step that a rank spends on a part beyond the mean of all."""
    if part in ("communication", "profiler"):
        return -1.0
    of = [_of_step(rank.figures, part) for rank in ranks]
    return _of_step(slow.figures, part) - sum(of) / len(of)


def _of_step(figures: dict[str, Any], part: str) -> float:
    steps = (figures["steps"] or {}).get("explained", 1)
    return float(figures["parts_s"].get(part, 0.0)) / steps


def launches(words: Sequence[str]) -> bool:
    """Return True if a command starts the processes to explain, and is not itself one of them."""
    if not words or words[0].startswith("-"):
        return False
    if not re.fullmatch(r"python[\d.]*t?", Path(words[0]).name):
        return not words[0].endswith(".py") and words[0] != "-m"
    rest = [word for word in words[1:] if word != "-u"]
    return rest[:1] == ["-m"] and rest[1:2] != [] and rest[1].startswith(LAUNCHERS)


def run_job(words: Sequence[str], *, window_s: float, preset: str = "", stacks: bool = True) -> Job:
    """Run a launcher until it ends, and compare the explanations of its processes.

    Raises:
        ValueError: there is no such command, or no process of it ran torch to its end.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(CUSTOMIZE)
        found = Path(folder, "found")
        found.mkdir()
        package = str(Path(__file__).resolve().parents[3])
        paths = [folder, package, *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = json.dumps({"window_s": window_s, "preset": preset, "stacks": stacks})
        own = {FOLDER: str(found), SETTINGS: settings, "PYTHONPATH": os.pathsep.join(paths)}
        here = Path(sys.executable).parent
        own["PATH"] = os.pathsep.join([str(here), os.environ.get("PATH", "")])  # torchrun of this environment
        try:
            process = subprocess.Popen(list(words), env=os.environ | own)
        except OSError as error:
            raise ValueError(
                f"{words[0]} cannot be started ({error.strerror}): give python SCRIPT, torchrun or accelerate launch"
            ) from None
        try:
            status = process.wait()
        except KeyboardInterrupt:
            status = process.wait()  # it got Ctrl-C as well, and its processes explain what ran until then
        ranks = [_rank(json.loads(path.read_text())) for path in sorted(found.glob("*.json"))]
    if not ranks:
        raise ValueError(f"no process of `{' '.join(words)}` ran torch to its end (exit status {status})")
    return Job(sorted(ranks, key=lambda rank: (len(rank.name), rank.name)), status)


def _rank(figures: dict[str, Any]) -> Rank:
    own = sum(seconds for part, seconds in figures["parts_s"].items() if part != "profiler")
    steps = (figures["steps"] or {}).get("explained", 1)
    return Rank(figures["name"], own / steps, _of_step(figures, "communication"), figures)
