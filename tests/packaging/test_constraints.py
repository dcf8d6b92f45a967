"""What constraints.txt pins, as far as the packages that are installed here tell; `make resolve` asks the index."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OLDEST = "3.11.0"


def test_each_takes_the_oldest_python_that_this_package_takes():
    """A pin for 3.11.5 or newer cannot be installed with the Python of Debian 12, which is 3.11.2."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert OLDEST in SpecifierSet(project["requires-python"]) and "3.10.99" not in SpecifierSet(
        project["requires-python"]
    )
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    here = {canonicalize_name(found.name): found for found in importlib.metadata.distributions()}
    asked, seen = {}, 0
    for name, version in pins.items():
        found = here.get(canonicalize_name(name))
        if found is None or found.version.partition("+")[0] != version:
            continue
        seen += 1
        needs = found.metadata.get("Requires-Python")  # of importlib_metadata, a missing one is an error, if imported
        if needs and not SpecifierSet(needs).contains(OLDEST):
            asked[f"{name}=={version}"] = needs
    if not seen:
        pytest.skip("nothing that constraints.txt pins is installed")
    assert not asked, f"pin versions that take Python {OLDEST}"
