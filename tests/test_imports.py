"""Imports between files go one way: whoever reads a file can begin with what it imports."""

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import transect

SOURCES = Path(transect.__file__).parent
IMPORT = re.compile(r"^[ \t]*from (\.+|transect\.)([\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)


def imported(text: str, own: tuple[str, ...], files: set[str]) -> set[str]:
    """The files of the package that one imports from, wherever in it; a folder's ``__init__.py`` hands on."""
    found = set()
    for dots, base, names in IMPORT.findall(text):
        above = own[: -len(dots)] if dots.startswith(".") else ("transect",)
        whole = ".".join((*above, *filter(None, [base])))
        parts = {f"{whole}.{name.split(' as ')[0].strip()}" for name in names.strip("()").split(",")}
        found |= parts if parts & files else {whole}
    return (found & files) - {".".join(own)}


def test_what_the_package_offers_is_there_for_programs_readers_and_type_checkers() -> None:
    assert (SOURCES / "py.typed").is_file()
    assert set(transect.__all__) <= set(dir(transect)) and all(hasattr(transect, name) for name in transect.__all__)
    seen = IMPORT.findall((SOURCES / "__init__.py").read_text())
    typed = {name.strip() for _, _, names in seen for name in names.split(",")}
    assert typed == set(transect.__all__)


def test_no_files_import_each_other() -> None:
    paths = [path for path in SOURCES.rglob("*.py") if path.name != "__init__.py"]
    places = {path: ("transect", *path.relative_to(SOURCES).with_suffix("").parts) for path in paths}
    files = {".".join(place) for place in places.values()}
    graph = {".".join(place): imported(path.read_text(), place, files) for path, place in places.items()}
    assert sum(map(len, graph.values())) > 2 * len(paths)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"these files import each other in a circle: {' -> '.join(error.args[1])}") from None
