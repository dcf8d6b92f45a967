"""The folder that a student works in: the page, the program with its hole, a test, and hints one by one."""

from __future__ import annotations

from pathlib import Path

from .record import Rung
from .registry import unlocks
from .texts import with_hole

TEST = '''"""Grades {file} in this folder: `python test.py`, or `transect learn check {name} --dir .`"""

import subprocess
import sys
from pathlib import Path

command = [sys.executable, "-m", "transect", "learn", "check", "{name}", "--dir", str(Path(__file__).parent)]
sys.exit(subprocess.run(command).returncode)
'''


def write(rung: Rung, folder: Path, *, solution: bool = False, force: bool = False) -> list[Path]:
    """Write the files of a rung. Returns them.

    Args:
        solution: the shipped solution instead of the program with the hole.
        force: overwrite an existing program.

    Raises:
        ValueError: the program is there already, and would be lost.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / rung.file
    if program.exists() and not force:
        raise ValueError(f"{program} is there already: choose another folder, or --force to write over it")
    program.write_text(rung.solution if solution else with_hole(rung.solution, rung.holes))
    texts = {"README.md": page(rung), "test.py": TEST.format(file=rung.file, name=rung.called)}
    texts |= {f"hints/{number}.txt": f"{hint}\n" for number, hint in enumerate(rung.hints, start=1)}
    for name, text in texts.items():
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        target.write_text(text)
    return [program, *(folder / name for name in texts)]


def page(rung: Rung) -> str:
    """Write the page as Markdown: what to read, what to write, and how it is graded."""
    holes = ", ".join(f"`{name}`" for name in rung.holes) or "the marked part"
    task = f"Write {holes} in `{rung.file}`." if rung.kind != "dialogue" else f"Answer each question in `{rung.file}`."
    lines = [
        f"# {rung.title}",
        "",
        rung.page,
        "",
        "## Your turn",
        "",
        f"{task} Then grade it, as often as you like:",
        "",
        "```",
        f"transect learn check {rung.called} --dir .",
        "```",
        "",
        f"It is tried on: {'; '.join(case.name for case in rung.cases)}. Stuck? Open `hints/1.txt`, and the next one "
        f"only if that does not help. `transect learn show {rung.called}` has the shipped solution, for when "
        f"yours is right.",
    ]
    if following := unlocks(rung.name):
        lines += ["", f"Unlocks: {', '.join(following)}."]
    return "\n".join(lines) + "\n"


def program(rung: Rung, folder: Path) -> Path:
    """Find the student's program in a folder.

    Raises:
        ValueError: it is not there.
    """
    path = folder / rung.file
    if not path.is_file():
        raise ValueError(f"{path} is not there: `transect learn start {rung.called} --dir {folder}` writes it")
    return path
