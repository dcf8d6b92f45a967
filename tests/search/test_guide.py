"""The guide's search method, added in one file to a copy of the package; and pages that list methods."""

import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from tiny_llm import save_tiny_llm

from transect.search.methods.registry import search_methods
from transect.spec.settings import settings_of

ROOT = Path(__file__).parents[2]
SEARCH = """
from transect import LLM, SamplingParams, Search
llm = LLM("model", device="cpu", threads=1)
params = SamplingParams(max_tokens=40, seed=1)
(found,) = llm.search("Hello", Search("shorter", n=6, enough=2), params)
states = [branch.state for branch in found.tree.branches]
lengths = [len(branch.tokens) for branch in found.tree.branches if branch.state == "ended"]
assert states.count("ended") >= 2 and len(found.branch.tokens) == min(lengths), (states, lengths)
try:
    Search("shorter", enough=0)
except ValueError as error:
    print(error)
from transect.search.methods.registry import prefixed
print(prefixed("short-m")[0].name)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of the package with the change that the guide shows, and a model."""
    folder = tmp_path_factory.mktemp("package")
    copytree(ROOT / "src", folder / "src", ignore=ignore_patterns("__pycache__"))
    (change,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/extend/search-method.md").read_text(), re.DOTALL)
    assert change.count("diff --git") == 1 and "new file" in change
    subprocess.run(["git", "apply", "-"], input=change, text=True, cwd=folder, check=True)
    (folder / "model").mkdir()
    save_tiny_llm(folder / "model")
    return folder


def test_one_file_adds_a_method(package):
    done = subprocess.run(
        [sys.executable, "-c", SEARCH], cwd=package, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(package / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["search.enough must be a whole number of at least 1, not 0", "shorter"]


def test_the_page_lists_all_methods_with_their_settings():
    page = (ROOT / "docs/serve/search.md").read_text()
    rows = {row[0]: row for row in re.findall(r"^\| `(\w+)` \| .* \| (.*) \| (.*) \|$", page, re.MULTILINE)}
    for name, method in search_methods().items():
        settings = {each.name for each in settings_of(method.options)} - {"n"}
        assert set(re.findall(r"`(\w+)`", rows[name][1])) == settings
        assert set(re.findall(r"`(\w+)-`", rows[name][2])) == set(method.prefixes)
