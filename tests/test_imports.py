"""Imports between files go one way, and programs import no kernels that they do not run."""

import json
import re
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tiny_llm import save_tiny_llm
from training_runs import tiny_run

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


SHARED_NAMES = {"Case", "TokenizerLike", "Turn"}
"""Public names that two classes have: records of two axes, two interfaces, and a claim and a message."""


def test_one_name_is_one_thing() -> None:
    found = defaultdict(list)
    for path in SOURCES.rglob("*.py"):
        if "rungs" in path.parts:  # programs of students, in the words of what they rebuild
            continue
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(), re.MULTILINE):
            found[name].append(str(path.relative_to(SOURCES)))
    shared = {name: paths for name, paths in found.items() if len(paths) > 1 and name not in SHARED_NAMES}
    assert not shared, "name these classes apart"


def test_a_file_fits_in_one_sitting() -> None:
    """Files of kernels may be longer."""
    lines = {path: len(path.read_text().splitlines()) for path in SOURCES.rglob("*.py") if "ops" not in path.parts}
    assert not {str(path): count for path, count in lines.items() if count > 500}


KERNELS = re.compile(
    r"ops\..*(hopper|gluon|triton|few_rows|many_rows|packed\.|grouped_blocks|grouped_scaled8|peer_memory|all_reduce"
    r"|packed.backward|flash_attention|paged\.(decode|prefill|tile|dispatch)|chain|matmul_ladder|stream_products)"
    r"|executors\.gpu\.(?!options|compilers)\w|models\.fused_stack|merged_layers|merged_products"
    r"|parallel\.(peer_|ring_kernels|shared_sums|spread_logits)"
)
"""Modules that only GPUs run, or only models in other number formats."""
OPERATOR = re.compile(r"ops\.attention\.packed(\.attention)?$|ops\.linear\.packed$")
"""The operator itself, with its reference, and folders."""


def modules_of(program: str, *arguments: str) -> list[str]:
    """Our modules that a program has imported when it ends."""
    shown = "\nimport sys\nprint(*sorted(n for n in sys.modules if n.split('.')[0] == 'transect'), sep='\\n')"
    command = [sys.executable, "-c", program + shown, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("transect")]


def kernels_among(modules: list[str]) -> list[str]:
    return [name for name in modules if KERNELS.search(name) and not OPERATOR.search(name)]


def test_the_package_alone_imports_nothing() -> None:
    assert modules_of("import transect") == ["transect", "transect.version"]


def test_help_imports_few_modules_and_no_torch() -> None:
    program = (
        "import contextlib, io\nfrom transect.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n    main(['--help'])\n"
        "import sys; assert 'torch' not in sys.modules"
    )
    assert len(modules_of(program)) <= 8


def test_an_engine_on_a_cpu_imports_no_kernel_that_it_does_not_run(tmp_path) -> None:
    save_tiny_llm(tmp_path)
    program = "import sys\nfrom transect import LLM\nLLM(sys.argv[1], device='cpu', threads=1).generate([[1, 2]])"
    found = modules_of(program, str(tmp_path))
    assert not kernels_among(found) and len(found) <= 288


def test_a_lora_run_on_a_cpu_imports_no_kernel_that_it_does_not_run(tmp_path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(tiny_run(tmp_path, task="lora", steps=1).to_dict()))
    program = (
        "import json, sys\nfrom transect.train.config import TrainConfig\n"
        "from transect.train.loop.trainer import Trainer\n"
        "Trainer(TrainConfig.from_dict(json.load(open(sys.argv[1])))).run([])"
    )
    found = modules_of(program, str(tmp_path / "run.json"))
    assert not kernels_among(found) and len(found) <= 284
