"""Real packages of other people's clients against a real server: what is recorded, and (``--prove``) again.

``benchmarks/server/clients.py`` installs each into an environment of its own; nothing of that is in this one.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.server import clients

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"


NAMES = [*json.loads((FOLDER / "results" / "cpu" / "clients.json").read_text())["clients"]]


@pytest.fixture(scope="module")
def url(smollm2):
    with clients.server("--max-model-len", "2048", "--max-num-seqs", "16") as url:
        yield url


@pytest.mark.prove  # installs the client, where it is not installed yet
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", NAMES)
def test_every_feature_of_a_client(url, name):
    try:
        clients.installed(name)
    except clients.Unavailable as error:
        pytest.skip(f"{name} cannot be had here: {error}")
    found = clients.run(name, url)["features"]
    assert found and not {each: what["said"] for each, what in found.items() if what["outcome"] == "fails"}


def test_what_is_recorded_is_of_every_client():
    assert set(NAMES) == set(clients.CLIENTS)
    programs = {path.name for path in clients.PROGRAMS.iterdir() if path.suffix in (".py", ".mjs")}
    assert programs == {client.program for client in clients.CLIENTS.values()} | {"outcomes.py", "outcomes.mjs"}


def test_the_table_says_what_was_found():
    what = {"chat": {"outcome": "works"}, "tools": {"outcome": "fails"}, "embeddings": {"outcome": "skipped"}}
    found = {"package": "x", "release": "1.2", "node": True, "features": what}
    head, _, row = clients.table({"clients": {"x": found}}).splitlines()
    cells = dict(zip(head.split(" | "), row.split(" | "), strict=True))
    assert cells["| client"] == "| x (Node)" and cells["version"] == "1.2"
    assert (cells["chat"], cells["tools"], cells["embeddings"]) == ("yes", "**no**", "not tried")
    assert cells["responses"] == ""


def test_a_program_says_what_became_of_each_feature(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from outcomes import Skip, check, check_weather, feature, main, MODEL, URL\n"
        '@feature(\'good\')\ndef good():\n    check_weather(\'{"city": "Rome", "days": 2}\')\n    return MODEL + URL\n'
        "@feature('bad')\ndef bad():\n    check_weather({'city': 'Rome', 'days': 2, 'more': 1})\n"
        "@feature('not here')\ndef elsewhere():\n    raise Skip('no route')\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, program, "http://x/", "m"],
        env={"PYTHONPATH": str(clients.PROGRAMS)},
        capture_output=True,
        text=True,
        check=True,
    )
    good, bad, absent = map(json.loads, done.stdout.splitlines())
    assert (good["outcome"], good["said"]) == ("works", "mhttp://x")
    assert bad["outcome"] == "fails" and "more" in bad["said"]
    assert (absent["outcome"], absent["said"]) == ("skipped", "no route")


def test_a_client_that_cannot_be_had_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path))
    monkeypatch.setattr(clients.shutil, "which", lambda name: None)
    with pytest.raises(clients.Unavailable, match="npm"):
        clients.installed("openai-node")
