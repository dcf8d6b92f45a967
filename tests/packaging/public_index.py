"""Asks the public package index whether the constraints resolve there. `make resolve` runs it, and CI once.

Nothing is installed, and wheels' metadata alone is read: pip would download wheels of gigabytes for the same answer,
so uv asks, with no configuration but what a machine needs to reach the index at all. Nearly all of the time is waiting
for answers, so several processes ask. The file is not named ``test_``: the test suite itself needs no network.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / ".ci"))

from download_size import REST, TORCH  # noqa: E402

PYTHONS = ("3.11", "3.12", "3.13")
"""To uv 3.11 is 3.11.0. Debian 12 has 3.11.2, and a package may ask for a later one."""
GROUPS = {"run": [], "test": ["test", "lint"]}
SOURCE_ONLY = {"rouge-score", "sqlitedict", "word2number"}
"""Small packages of lm-eval that have no wheel; all others must have one."""
TRITON_OF_TORCH = {"2.11.0": "3.6", "2.13.0": "3.7", "": "3.9"}
"""What each torch must bring, ``""`` being the newest that there is."""


def default_index() -> str:
    """The public index, or the place where this network keeps it."""
    named = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL") or os.environ.get("PIP_INDEX_URL")
    if not named:
        asked = subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
        )
        named = asked.stdout.strip() if asked.returncode == 0 else ""
    return named or "https://pypi.org/simple"


@pytest.fixture(scope="module")
def uv(tmp_path_factory):
    """Resolves requirements of a file, or of this package; its packages by name, as a lock file has them."""
    program = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert program, "uv is missing: it is one of the test dependencies"
    index = default_index()
    host = urlsplit(index)
    proxied = any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    try:
        if not proxied:
            socket.create_connection((host.hostname, host.port or 443), timeout=10).close()
    except OSError as error:
        pytest.skip(f"no network: {host.hostname} cannot be reached ({error})")
    home = tmp_path_factory.mktemp("home")
    several = "PYTEST_XDIST_WORKER" in os.environ  # processes, which share what the index has said
    cache = tmp_path_factory.getbasetemp().parent / "uv" if several else home / "cache"
    kept = re.compile(r"(?i)(SSL_CERT_(FILE|DIR)|\w+_PROXY|PATH)")
    environment = {name: value for name, value in os.environ.items() if kept.fullmatch(name)}
    environment |= {"HOME": str(home), "UV_CACHE_DIR": str(cache), "UV_DEFAULT_INDEX": index}
    if "SSL_CERT_FILE" not in environment and os.environ.get("PIP_CERT"):
        environment["SSL_CERT_FILE"] = os.environ["PIP_CERT"]

    @functools.cache
    def resolve(source, *options, python="3.12", platform="x86_64-manylinux_2_31"):
        lock = home / "pylock.toml"
        lock.unlink(missing_ok=True)
        command = [program, "pip", "compile", str(source), "--no-config", "--quiet"]
        command += ["--python-version", python, "--python-platform", platform, *options]
        done = subprocess.run(
            [*command, "--format", "pylock.toml", "--output-file", str(lock)],
            capture_output=True, text=True, env=environment, cwd=home,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return {package["name"]: package for package in tomllib.loads(lock.read_text())["packages"]}

    return resolve


def constrained() -> dict[str, str]:
    pins = (line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    return {canonicalize_name(name): version for name, version in pins}


def resolved(uv, group, python, machine):
    extras = [word for name in GROUPS[group] for word in ("--extra", name)]
    constraints = str(ROOT / "constraints.txt")
    platform = f"{machine}-manylinux_2_31"  # glibc of 2020, which llguidance's wheels need
    return uv(ROOT / "pyproject.toml", *extras, "--constraint", constraints, python=python, platform=platform)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("python", PYTHONS)
def test_the_constraints_resolve(uv, group, python):
    found = resolved(uv, group, python, "x86_64")
    pins = constrained()
    assert {"torch", "triton"} <= found.keys()
    # torch itself pins the CUDA libraries; everything else is pinned here.
    free = [name for name in found if name not in pins and not name.startswith(("nvidia-", "cuda-"))]
    assert free == [], "add to constraints.txt: " + ", ".join(f"{name}=={found[name]['version']}" for name in free)
    assert all(found[name]["version"] == pins[name] for name in found if name in pins)
    assert {name for name, package in found.items() if "wheels" not in package} <= SOURCE_ONLY


@pytest.mark.parametrize("torch", TRITON_OF_TORCH)
def test_each_torch_brings_the_triton_that_is_supported(uv, torch, tmp_path):
    """Without the constraints, as somebody has it who installs this package beside the torch that they use."""
    requirements = tmp_path / "requirements.in"
    requirements.write_text(f"torch=={torch}\n" if torch else "torch\n")
    found = uv(ROOT / "pyproject.toml", str(requirements), "--extra", "gpu")
    assert found["triton"]["version"].startswith(TRITON_OF_TORCH[torch]), (
        f"torch {found['torch']['version']} brings triton {found['triton']['version']}: run the kernels' tests with "
        "it (`make test-triton TRITON=...`), see ops/lang/gluon_language.py, and name it here"
    )


@pytest.mark.parametrize("group, machine", [("run", "x86_64"), ("run", "aarch64"), ("test", "x86_64")])
def test_the_size_that_make_announces_is_that_of_the_wheels(uv, group, machine):
    found = resolved(uv, group, "3.12", machine)
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(31, 4, -1)]
    platforms += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}"]
    tags = [*cpython_tags((3, 12), platforms=platforms), *compatible_tags((3, 12), platforms=platforms)]

    def size(package):
        ranked = []
        if "wheels" not in package:
            return package["sdist"]["size"]
        for wheel in package["wheels"]:
            fits = parse_wheel_filename(unquote(wheel["url"].rpartition("/")[2]))[3] & set(tags)
            ranked += [(min(map(tags.index, fits)), wheel["size"])] if fits else []
        return min(ranked)[1]

    total = sum(map(size, found.values())) / 1e9
    cuda = {n for n in found if n.startswith(("nvidia-", "cuda-"))} | {"torch", "triton"}
    lean = total - sum(size(found[name]) for name in cuda) / 1e9
    print(f"{group} {machine}: {total:.2f} GB, {lean:.2f} GB without torch")
    assert abs(total - lean - TORCH[machine]) < 0.1, "change .ci/download_size.py"
    assert abs(lean - REST[group]) < 0.02, "change .ci/download_size.py"
