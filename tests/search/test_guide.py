"""The guide's search method, added in one file to a copy of the package; and pages that list methods."""

import re

import pytest
from changed_package import ROOT
from tiny_llm import save_tiny_llm

from transect.search.methods.registry import search_methods
from transect.spec.settings import settings_of

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
def package(changed_packages):
    """A copy of the package with the change that the guide shows, and a model."""
    made = changed_packages("docs/extend/search-method.md")
    (made / "model").mkdir()
    save_tiny_llm(made / "model")
    return made


def test_one_file_adds_a_method(package):
    assert package.python(SEARCH).stdout.splitlines() == [
        "search.enough must be a whole number of at least 1, not 0",
        "shorter",
    ]


def test_the_page_lists_all_methods_with_their_settings():
    page = (ROOT / "docs/serve/search.md").read_text()
    rows = {row[0]: row for row in re.findall(r"^\| `(\w+)` \| .* \| (.*) \| (.*) \|$", page, re.MULTILINE)}
    for name, method in search_methods().items():
        settings = {each.name for each in settings_of(method.options)} - {"n"}
        assert set(re.findall(r"`(\w+)`", rows[name][1])) == settings
        assert set(re.findall(r"`(\w+)-`", rows[name][2])) == set(method.prefixes)
