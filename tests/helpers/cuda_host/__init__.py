"""CUDA C++ sources on a processor: the asm of a source becomes calls, and ``g++`` compiles it beside ``machine.h``.

``library("gguf_row")`` has the launchers of ``gguf_row.cu``. They take addresses of tensors on the CPU and run all
threads of a launch, one at a time, in an order that a seed draws. So index arithmetic, barriers and rings of the source
that GPUs get are tested where there is none; what orders memory on a GPU, and how quick it is, are not.

=================== ================================================================================
``machine.h``       threads, what they wait for, shared memory, copies that land late
``ptx.h``           the instructions that sources write as asm
``cuda_runtime.h``  CUDA's names; so ``cuda.h``, ``cuda_bf16.h`` and ``cuda_fp16.h``
``numbers.h``       float16, bfloat16, e4m3
=================== ================================================================================
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import torch

from transect.hardware.cache import cache_folder
from transect.ops.lang.cuda_build import SOURCES, source

HEADERS = Path(__file__).parent
INSTRUCTIONS = (HEADERS / "ptx.h").read_text()
OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")
FIXED = re.compile(r"(?<!extern )__shared__ (?:alignas\(\d+\) )?([^;\[]+?) (\w+)((?:\[[^\]]*\])+);")
DYNAMIC = re.compile(r"extern __shared__ (?:alignas\(\d+\) )?unsigned char (\w+)\[\];")
LAUNCH_FAILURE = 719
"""cudaErrorLaunchFailure."""
STATEMENT = re.compile(r"\basm(?: volatile)?\(")


INCLUDED = re.compile(r'^#include "([\w./]+\.cuh)"$', re.MULTILINE)
LITERAL = re.compile(r'"(?:\\.|[^"\\])*"')


def _fields(text: str, first: int, between: str) -> tuple[list[str], int]:
    """What the letter ``between`` parts, from ``first`` on up to the closing bracket that nothing opened; that place.
    Letters in brackets and in strings part nothing."""
    found: list[str] = []
    depth, at, own = 0, first, ""
    while True:
        letter = text[at]
        if letter == '"':
            literal = LITERAL.match(text, at)
            assert literal is not None
            own, at = own + literal[0], literal.end()
            continue
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return [*found, own.strip()], at
        if depth == 0 and letter == between:
            found, own = [*found, own.strip()], ""
        else:
            own += letter
        at += 1


def _strings(text: str) -> str:
    """What the string literals in ``text`` say together."""
    return "".join(literal[1:-1] for literal in LITERAL.findall(text)).replace("\\n", "\n")


def _operands(text: str) -> list[str]:
    """``"r"(a), "=f"(b)`` -> a, b."""
    return [
        re.sub(r'^"[^"]*"\((.*)\)$', r"\1", each, flags=re.DOTALL) for each in _fields(text + ")", 0, ",")[0] if each
    ]


def calls(template: str, operands: list[str]) -> str:
    """The lines of an asm statement as C++: instructions are calls of ``ptx``, registers variables, labels labels. An
    instruction that ``ptx.h`` does not have fails when it is run."""
    kinds = {"pred": "bool", "u16": "uint16_t", "b16": "uint16_t", "b32": "uint32_t", "b64": "uint64_t"}
    done = []
    for line in re.split(r"[;\n]", template.strip().removeprefix("{").removesuffix("}")):
        line = line.strip()
        if not line:
            continue
        if declared := re.fullmatch(r"\.reg \.(\w+) (.*)", line):
            done.append(f"{kinds[declared[1]]} {declared[2]};")
        elif line.endswith(":"):
            done.append(line)
        elif jump := re.fullmatch(r"@!(\w+) bra (\w+)", line):
            done.append(f"if (!{jump[1]}) goto {jump[2]};")
        else:
            name, _, rest = line.partition(" ")
            values = re.findall(r"%\d+|\b\w+\b", rest)
            values = [f"({operands[int(v[1:])]})" if v[0] == "%" else v for v in values if v != "_"]
            call = re.sub("[.:]", "_", name)
            known = re.search(rf"\b{call}[(,]", INSTRUCTIONS)
            done.append(f"ptx::{call}({', '.join(values)});" if known else f'machine::fail("{name} is not known");')
    return "{ " + " ".join(done) + " }"


def translated(text: str) -> str:
    """A source, once it is preprocessed, without asm and without CUDA's ways to name shared memory."""
    done, at = [], 0
    while found := STATEMENT.search(text, at):
        fields, end = _fields(text, found.end(), ":")
        operands = [each for field in fields[1:3] for each in _operands(field)]
        done += [text[at : found.start()], calls(_strings(fields[0]), operands)]
        at = end + 2
    text = DYNAMIC.sub(r"unsigned char* \1 = machine::dynamic();", "".join([*done, text[at:]]))
    number = itertools.count()
    return FIXED.sub(lambda m: f"auto& {m[2]} = machine::fixed<{m[1]}{m[3]}, {next(number)}>();", text)


def _run(command: list[str], text: str) -> str:
    """What a compiler prints that is given ``text``."""
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return done.stdout


@cache
def library(name: str, instead: tuple[str, str] | None = None, *options: str) -> ctypes.CDLL:
    """``NAME.cu`` on this processor, kept in the user's cache; skips the test where there is no ``g++``. ``instead``: a
    piece of the source, or of headers beside it, and what stands there instead. ``options``: of the preprocessor."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    main = source(f"{name}.cu")
    text = main.read_text()
    folders = [HEADERS, main.parent]
    if instead is not None:
        for place in INCLUDED.findall(text):
            header = main.parent / place
            if instead[0] not in text and instead[0] in header.read_text():
                text = text.replace(f'#include "{place}"', header.read_text())
                folders.append(header.parent)
        assert text.count(instead[0]) == 1, instead[0]
        text = text.replace(*instead)
    included = [path.read_text() for folder in (SOURCES, HEADERS) for path in sorted(folder.rglob("*.*h"))]
    key = hashlib.sha256(repr((text, included, Path(__file__).read_text(), options)).encode()).hexdigest()[:16]
    kept = cache_folder() / "cuda_host" / f"{name}-{key}.so"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        # What the preprocessor leaves has macros in asm written out.
        includes = [f"-I{folder}" for folder in folders]
        text = translated(_run([compiler, OPTIONS[0], *options, *includes, "-E", "-P", "-x", "c++", "-"], text))
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            built = Path(folder) / "built.so"
            _run([compiler, *OPTIONS, "-x", "c++", "-", "-o", str(built)], text)
            built.replace(kept)
    return ctypes.CDLL(str(kept))


class Launcher:
    """A launcher of ``NAME.cu`` on this processor, called as what ``cuda.bind`` gives.

    Raises (when called):
        AssertionError: a thread did what a GPU does not do; the message says what.
    """

    def __init__(
        self, name: str, symbol: str, signature: str, instead: tuple[str, str] | None = None, *options: str
    ) -> None:
        self._library = library(name, instead, *options)
        self._library.transect_said.restype = ctypes.c_char_p
        self._library.transect_forget()  # all sources share what an earlier test let them read
        self._function = getattr(self._library, symbol)
        kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_longlong, "f": ctypes.c_float}
        self._function.argtypes = [kinds[letter] for letter in signature]

    def __call__(self, *arguments: int | float) -> int:
        code = int(self._function(*arguments))
        assert code != LAUNCH_FAILURE, self._library.transect_said().decode()
        return code

    def draw(self, seed: int) -> None:
        """The order of threads in the launches that follow."""
        self._library.transect_draw(ctypes.c_uint64(seed))

    def late(self, places: Iterable[torch.Tensor], old: Iterable[torch.Tensor]) -> None:
        """From now on the kernel before each launch writes ``places``: until a thread has waited for that kernel, its
        own copies find ``old`` there."""
        self._library.transect_forget()
        for place, before in zip(places, old, strict=True):
            addresses = ctypes.c_void_p(place.data_ptr()), ctypes.c_void_p(before.data_ptr())
            self._library.transect_late(*addresses, ctypes.c_uint64(place.nbytes))

    def reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """All memory that copies and cached reads may touch from now on."""
        self._library.transect_forget()
        for tensor in tensors:
            self._library.transect_allow(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_uint64(tensor.nbytes))
