"""The wheel that is built from these sources: what is in it, and what its metadata says."""

import ast
import email
import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
RELATIVE_LINK = re.compile(r"!?\[[^\]]*\]\((?!\w+:|#)[^)]+\)")


def load(path):
    """A module that belongs to no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    return Path(path)


@pytest.fixture(scope="session")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_it_holds_all_sources_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    kinds = {".py", ".typed", ".h", ".cpp", ".cu", ".cuh", ".json", ".js", ".css", ".toml", ".html", ".svg", ".woff2"}
    package = ROOT / "src"
    sources = {str(path.relative_to(package)) for path in package.rglob("*") if path.suffix in kinds}
    assert {name for name in names if ".dist-info/" not in name} == sources
    for needed in ("ops/cpu/native.cpp", "ops/cpu/linear.cpp", "ops/cpu/linear.h"):
        assert f"transect/{needed}" in names
    suffixes = {Path(name).suffix for name in sources}
    assert suffixes == kinds
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_licence_and_the_pythons(metadata):
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License"] is None
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert not [line for line in metadata.get_all("Classifier") if line.startswith("License ::")]
    pythons = {line.rpartition(" ")[2] for line in metadata.get_all("Classifier") if "Python :: 3." in line}
    assert pythons == {"3.11", "3.12", "3.13"}


def test_what_runs_needs_nothing_that_only_tests_need(metadata):
    needed = {re.match(r"[\w-]+", line)[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert "torch" in needed and not needed & {"pytest", "transformers", "ruff", "triton", "matplotlib"}


def test_the_readme_works_on_a_package_index(metadata):
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert "make demo" in text
    assert RELATIVE_LINK.findall(text) == []


def test_links_of_the_readme_lead_to_the_published_sources():
    rewrite = load(ROOT / "hatch_build.py").readme_for_index
    text = "[a](docs/a.md#b) ![p](docs/p.png) [web](https://x.org) [here](#there) [docs/c.md](docs/c.md)"
    assert rewrite(text, "https://x.org/t") == (
        "[a](https://x.org/t/blob/main/docs/a.md#b) ![p](https://x.org/t/raw/main/docs/p.png) [web](https://x.org) "
        "[here](#there) [docs/c.md](https://x.org/t/blob/main/docs/c.md)"
    )
    for unknown in ("", "https://x.org/OWNER/t"):
        assert rewrite(text, unknown) == "a (docs/a.md)  [web](https://x.org) [here](#there) docs/c.md"
    readme = (ROOT / "README.md").read_text()
    assert RELATIVE_LINK.findall(readme) and not RELATIVE_LINK.findall(rewrite(readme, "https://x.org"))


def test_it_runs_from_where_it_was_unpacked(wheel, tmp_path):
    """Without the checkout on the path: the command starts, and C++ sources and tables are found."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = (
        "import transect, pathlib, transect.cli\n"
        "from transect.ops.cpu.build import SOURCES\n"
        "assert (SOURCES / 'native.cpp').is_file()\n"
        "print(pathlib.Path(transect.__file__).parent)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": "."}
    )
    assert done.returncode == 0, done.stderr
    assert Path(tmp_path, done.stdout.strip()).resolve() == (tmp_path / "transect").resolve()


def test_every_source_is_python_3_11():
    """A newer Python parses what 3.11 cannot; ``feature_version`` refuses the newer grammar that it knows of."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        ast.parse(path.read_text(), filename=str(path), feature_version=(3, 11))
