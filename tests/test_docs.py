"""What the pages say is true: commands and programs run, links lead somewhere, numbers are recorded."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from commands import UNLIKE_HERE, run_here, script_here
from effort import proving, quick_first
from pages import CHAPTERS

from transect.cli import _application

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LEVELS = sorted(file.parent for file in (ROOT / "src" / "transect").rglob("*/__init__.py"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LONG = (
    'transect generate smollm2-135m "What is 3 + 4?" --chat --search majority --n 8 --budget 400 --max-tokens 24',
    "transect eval smollm2-135m --text docs/measure/eval.md --window 256",
    "transect inspect softmax --target sm_90",
    "transect inspect vector_add --target sm_120",
    *(
        f"transect plan serving llama-3.2-1b --gpu l4 --rate {rate} --tp 1 --quantization bf16 "
        "--output-tokens uniform:10-20 --requests 50"
        for rate in (4, 8)
    ),
    "transect plan training llama-3.1-8b --gpus 8 --gpu h100-80gb",
    "transect bench ops kv_cache_write --device cpu",
    "transect bench latency --batch 1 --batch 4 --prompt-tokens 32 --new-tokens 8 --runs 1",
    "transect bench latency --batch 1 --batch 4 --prompt-tokens 64 --new-tokens 16 --runs 1",
    'transect generate smollm2-135m "The three primary colours are" --max-tokens 24',
)
"""Commands that take seconds, of kinds that run in other tests or pages: they run with ``--prove``."""
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def _blocks(language: str) -> list[tuple[str, str]]:
    return [
        (str(page.relative_to(ROOT)), text)
        for page in PAGES
        for kind, text in FENCE.findall(page.read_text())
        if kind == language
    ]


@cache
def _commands() -> list[tuple[str, str]]:
    return [
        (page, line)
        for page, text in _blocks("bash")
        for line in text.splitlines()
        if line.startswith("transect ") and page not in CHAPTERS  # `make` targets are what CI itself is made of
    ]


@pytest.mark.parametrize(
    ("page", "command"), quick_first(_commands(), [each for each in _commands() if each[1] not in LONG])
)
def test_commands_in_the_pages_run(smollm2, page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process where that is the same; with ``--prove`` all in processes of their own."""
    arguments = shlex.split(command, comments=True)[1:]
    plain = not set(command) & set("*|<>&$~") and arguments[0] != UNLIKE_HERE
    if plain and not proving():
        monkeypatch.chdir(ROOT)
        done = run_here(*arguments)
    else:
        shell = f"{sys.executable} -m {command}"
        done = subprocess.run(shell, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{page}: {command}\n{done.stderr}"
    assert done.stdout.strip()


def test_commands_that_the_pages_only_show_would_be_understood() -> None:
    """Those in fences that are not run: the command is there, and takes these options."""
    shown = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
    lines = [
        (page.name, line.strip())
        for page in PAGES
        for text in shown.findall(page.read_text())
        for line in text.replace("\\\n", " ").splitlines()
        if line.strip().startswith("transect ")
    ]
    program = typer.main.get_command(_application())
    misunderstood = [(page, line, reason) for page, line in lines if (reason := refusal_of(program, line))]
    assert len(lines) > 50 and not misunderstood


def refusal_of(command: Any, line: str) -> str:
    """Why the command line would be refused before it runs; empty: it would not be."""
    words = shlex.split(line, comments=True)[1:]
    context = command.make_context("transect", [], resilient_parsing=True)
    while words and hasattr(command, "get_command"):
        command = command.get_command(context, words.pop(0))
        if command is None:
            return "there is no such command"
    try:
        command.make_context("transect", words)
    except Exception as error:  # whatever the parser raises
        return "" if type(error).__name__ == "Exit" else f"{type(error).__name__}: {getattr(error, 'message', error)}"
    return ""


@pytest.mark.parametrize(("page", "program"), _blocks("python"))
def test_programs_in_the_pages_run(smollm2, tmp_path: Path, capsys, page: str, program: str) -> None:
    """In this process; with ``--prove`` each in one of its own."""
    file = tmp_path / "program.py"
    file.write_text(program)
    if not proving():
        runpy.run_path(str(file), run_name="__main__")
        assert capsys.readouterr().out.strip()
        return
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, f"{page}:\n{done.stderr}"
    assert done.stdout.strip()


@pytest.mark.prove
def test_the_program_of_four_ranks_runs(tmp_path: Path) -> None:
    """Its file is imported by its name on the other ranks."""
    (program,) = (text for page, text in _blocks("py") if text.startswith("# mine.py"))
    (tmp_path / "mine.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[[1.0] * 3, [1.0] * 3, [5.0] * 3, [5.0] * 3]}\n"


def test_the_pages_have_what_is_tested_here() -> None:
    assert len(_commands()) >= 2
    assert {*LONG} <= {command for _, command in _commands()}
    assert _blocks("python")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    missing = [link for link in LINK.findall(FENCE.sub("", page.read_text())) if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|h|cpp|cu))`", page.read_text())
    places = (ROOT / "src" / "transect", ROOT)
    missing = [n for n in named if not any((place / n).exists() or any(place.glob(f"ops/**/{n}")) for place in places)]
    assert not missing


def test_the_architecture_lists_the_levels_of_the_import_contract() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    page = (ROOT / "docs" / "understand" / "architecture.md").read_text()
    rows = re.findall(r"^\| [a-z ]+ \| `([a-z]+)/` \|", page.partition("\n## ")[0], re.MULTILINE)
    assert [f"transect.{folder}" for folder in rows] == contract["layers"]


def test_source_files_that_docstrings_name_exist() -> None:
    """A path begins in the file's own folder, in a folder above it, or in ``benchmarks/``."""
    source, missing = ROOT / "src" / "transect", []
    for file in (file for file in source.rglob("*") if file.suffix in (".py", ".h", ".cpp", ".cu", ".cuh")):
        folders = [folder for folder in file.parents if folder.is_relative_to(source)]
        for name in re.findall(r"``([a-z][a-z0-9_/]*\.(?:py|cpp|cuh?|h))``", file.read_text()):
            if not any((folder / name).exists() for folder in folders) and not (
                name.startswith("benchmarks/") and (ROOT / name).exists()
            ):
                missing.append(f"{file.relative_to(source)}: {name}")
    assert not missing


@pytest.mark.parametrize("folder", LEVELS, ids=lambda folder: "/".join(folder.parts[folder.parts.index("transect") :]))
def test_the_map_of_a_level_names_all_of_its_files(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    names = re.findall(r"``([\w/*.]+)``", text)
    files = [file.name for file in folder.iterdir() if file.suffix in (".py", ".cuh") and file.name != "__init__.py"]
    missing = [file for file in files if not any(fnmatch(file, name) or Path(file).stem == name for name in names)]
    assert not missing
    assert all(any(folder.rglob(name)) for name in names if Path(name).suffix in (".py", ".cuh"))


def test_the_map_of_the_benchmarks_names_all_of_them() -> None:
    folder = ROOT / "benchmarks"
    names = re.findall(r"`([\w/]+\.(?:py|sh))", (folder / "README.md").read_text())
    programs = [file for file in folder.rglob("*") if file.suffix in (".py", ".sh") and file.name != "_paths.py"]
    files = {str(file.relative_to(folder)) for file in programs if file.parent.name != "client_programs"}
    assert set(names) - {"_paths.py"} == files


def test_quoted_results_are_the_recorded_ones() -> None:
    done = script_here(ROOT / "benchmarks" / "render.py", "--check")
    assert done.returncode == 0, done.stderr


def test_the_site_builds_with_every_link_leading_somewhere(tmp_path: Path) -> None:
    """Build the site in a copy, as ``zensical build --strict`` does; a broken link or anchor is an error."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "build" / "site" / "index.html").is_file()


def test_the_site_lists_every_page() -> None:
    """A page that the navigation omits cannot be found; the site builder does not report it."""
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("nav:")[2])
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(pages)


def test_docstrings_are_sentences() -> None:
    """No docstring begins with "Of" or "As": it has a subject."""
    begins = re.compile(r'^[ \t]*r?"""(?:Of|As)\b', re.MULTILINE)
    texts = {file: file.read_text() for file in (ROOT / "src").rglob("*.py")}
    found = [
        f"{file}:{text[: m.end()].count(chr(10)) + 1}" for file, text in texts.items() for m in begins.finditer(text)
    ]
    assert not found


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "extend").glob("*.md")), ids=lambda page: page.stem)
def test_what_a_guide_changes_is_there(page) -> None:
    """The changes that a guide shows can be applied to the sources as they are."""
    for change in re.findall(r"```diff\n(.*?)```", page.read_text(), re.DOTALL):
        command = ["git", "apply", "--check", "-"]
        done = subprocess.run(command, input=change, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stderr}make the change again, and put `git diff -U1` into {page.name}"
