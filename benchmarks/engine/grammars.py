"""llguidance beside xgrammar: which of them keeps answers to a grammar here.

Each case runs in a process of its own, with a limit of processor time and of memory, because both libraries can be made
to hang:

* ordinary grammars: processor time to compile, and time to make the mask of each token of a random answer;
* hostile grammars: how long until they are refused or ready, and how much memory that takes;
* the cases of JSON-Schema-Test-Suite (draft 2020-12, ``--suite DIR``, the folder with ``type.json``): a valid instance
  must be accepted, an invalid one must not, and a schema that a library cannot keep to should be refused.

The vocabulary is that of SmolLM2, filled up to 151,936 tokens with pairs of its tokens.

    python benchmarks/engine/grammars.py [--suite DIR] [--out benchmarks/results/cpu/grammars.json]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import _paths  # noqa: F401
from benchmarks import record

VOCAB = 151_936
TIME_LIMIT_S, MEMORY_LIMIT = 20, 6 * 2**30
ANSWER_TOKENS = 400

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 8},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}


def _nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def _json(schema: Any) -> tuple[str, str]:
    return "json", json.dumps(schema)


ORDINARY: dict[str, Callable[[], tuple[str, str]]] = {
    "person": lambda: _json(PERSON),
    "any JSON object": lambda: _json({"type": "object"}),
    "100 properties": lambda: _json(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(100)}, "required": ["p0", "p99"]}
    ),
    "regex of a date": lambda: ("regex", "[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "a paragraph": lambda: ("regex", r"[^\n]{1,2000}"),
}
HOSTILE: dict[str, Callable[[], tuple[str, str]]] = {
    "10,000 levels deep": lambda: ("json", _nested(10_000)),
    "100 levels deep": lambda: ("json", _nested(100)),
    "10 MB of enum": lambda: _json({"enum": [f"x{i:010}" for i in range(700_000)]}),
    "50,000 properties": lambda: _json({"type": "object", "properties": {f"p{i}": {} for i in range(50_000)}}),
    "2^10 alternatives by allOf": lambda: _json(
        {"allOf": [{"anyOf": [{"properties": {f"{c}{i}": {"const": 0}}} for c in "pq"]} for i in range(10)]}
    ),
    "patterns that meet in 2^24 states": lambda: _json(
        {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{k}}}"} for k in range(8, 24)]}
    ),
    "regex of 2^25 states": lambda: ("regex", "(.|\n)*a(.|\n){25}"),
    "regex that repeats repeats": lambda: ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "regex of a million letters": lambda: ("regex", "a" * 1_000_000),
    "array of 100,000 arrays of 100,000": lambda: _json(
        {
            "items": {"items": {"type": "integer"}, "type": "array", "maxItems": 10**5},
            "type": "array",
            "minItems": 10**5,
        }
    ),
}


def vocabulary() -> tuple[list[bytes], set[int], int]:
    """Return the bytes of VOCAB tokens, the special ones, and the one that ends an answer."""
    from transect.checkpoints.pull import pull
    from transect.formats.gguf_file import GGUFFile
    from transect.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(GGUFFile.open(pull("smollm2-135m")).metadata)
    tokens = [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]
    words = [token for token in tokens[1000:12_000] if 3 <= len(token) <= 8]
    known = set(tokens)
    pairs = (a + b for a, b in itertools.product(words, words) if a + b not in known)
    tokens += itertools.islice(pairs, VOCAB - len(tokens))
    return tokens, set(tokenizer.special_ids), tokenizer.eos_token_ids[0]


class Library(Protocol):
    """One of the two. ``compile`` raises what the library raises; ``end`` is the token that ends an answer."""

    end: int

    def compile(self, kind: str, text: str) -> None: ...
    def begin(self) -> None: ...
    def mask(self) -> np.ndarray: ...
    def accept(self, token: int) -> bool: ...
    def may_end(self) -> bool: ...
    def accepts(self, text: str) -> bool: ...


class LLGuidance:
    """Limits as in ``transect.text.grammar``, but for those of the process."""

    def __init__(self) -> None:
        import llguidance

        tokens, special, end = vocabulary()
        self.end = end
        longest_first = {token: index for index, token in enumerate(tokens)}

        class Words:
            is_tokenizer_wrapper = True
            eos_token_id, bos_token_id = end, None
            special_token_ids = sorted(special)

            def __call__(self, data: bytes | str) -> list[int]:
                data = data.encode() if isinstance(data, str) else data
                found = []
                while data:
                    size = next(n for n in range(min(len(data), 16), 0, -1) if data[:n] in longest_first)
                    found.append(longest_first[data[:size]])
                    data = data[size:]
                return found

        self._words = Words()
        self._words.tokens = tokens  # type: ignore[attr-defined]
        self._library = llguidance
        self._tokenizer = llguidance.LLTokenizer(self._words, n_vocab=VOCAB, eos_token=end)
        self._mask = np.zeros((VOCAB + 31) // 32, np.int32)

    def compile(self, kind: str, text: str) -> None:
        matcher = self._library.LLMatcher
        grammar = matcher.grammar_from_regex(text) if kind == "regex" else matcher.grammar_from_json_schema(text)
        limits = self._library.LLParserLimits(verbose_errors=False)
        self._compiled = matcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if self._compiled.is_error():
            raise ValueError(self._compiled.get_error())

    def begin(self) -> None:
        self._matcher = self._compiled.deep_copy()

    def mask(self) -> np.ndarray:
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        return self._mask

    def accept(self, token: int) -> bool:
        return self._matcher.consume_token(token)

    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    def accepts(self, text: str) -> bool:
        self.begin()
        return self._matcher.consume_tokens(self._words(text.encode())) and self.may_end()


class XGrammar:
    """One thread, no cache: a server has other work for its threads, and no grammar comes twice here."""

    def __init__(self) -> None:
        import torch
        import xgrammar

        tokens, _, self.end = vocabulary()
        self._library = xgrammar
        info = xgrammar.TokenizerInfo(tokens, vocab_size=VOCAB, stop_token_ids=[self.end])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = torch.zeros((1, (VOCAB + 31) // 32), dtype=torch.int32)

    def compile(self, kind: str, text: str) -> None:
        self._compiled = getattr(self._compiler, "compile_regex" if kind == "regex" else "compile_json_schema")(text)

    def begin(self) -> None:
        self._matcher = self._library.GrammarMatcher(self._compiled, terminate_without_stop_token=False)

    def mask(self) -> np.ndarray:
        self._matcher.fill_next_token_bitmask(self._mask)
        return self._mask[0].numpy()

    def accept(self, token: int) -> bool:
        return self._matcher.accept_token(token)

    def may_end(self) -> bool:
        word, bit = divmod(self.end, 32)
        return not self._matcher.is_terminated() and bool(self.mask()[word] >> bit & 1)

    def accepts(self, text: str) -> bool:
        self.begin()
        return self._matcher.accept_string(text) and self.may_end()


LIBRARIES: dict[str, Callable[[], Library]] = {"llguidance": LLGuidance, "xgrammar": XGrammar}


def answer(library: Library, seed: int) -> Iterator[dict[str, float]]:
    """Yield the seconds for the mask and for the token of each step of a random answer."""
    rng = random.Random(seed)
    library.begin()
    for _ in range(ANSWER_TOKENS):
        began = time.perf_counter()
        mask = library.mask()
        made = time.perf_counter()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed):
            return
        token = int(allowed[rng.randrange(len(allowed))])
        chosen = time.perf_counter()
        going = library.accept(token)
        yield {"mask": made - began, "accept": time.perf_counter() - chosen}
        if not going or token == library.end or (library.may_end() and rng.random() < 0.05):
            return


def case(library: Library, kind: str, text: str, seeds: int) -> dict[str, Any]:
    """Measure one grammar: its result and its costs."""
    before, began = record.peak_memory_bytes(), time.process_time()
    result: dict[str, Any] = {"bytes": len(text)}
    try:
        library.compile(kind, text)
    except Exception as error:
        result["refused"] = str(error).split("\n")[0][:160]
    result["compile_s"] = time.process_time() - began
    if "refused" not in result:
        costs = [cost for seed in range(seeds) for cost in answer(library, seed)]
        for name in ("mask", "accept"):
            taken = sorted(cost[name] for cost in costs)
            result[f"{name}_us"] = {
                "median": taken[len(taken) // 2] * 1e6,
                "p99": taken[int(len(taken) * 0.99)] * 1e6,
                "max": taken[-1] * 1e6,
                "tokens": len(taken),
            }
    result["memory_bytes"] = record.peak_memory_bytes() - before
    return result


def suite(library: Library, folder: Path) -> dict[str, Any]:
    """Count the results over JSON-Schema-Test-Suite; a schema that the library refuses is not a mistake, but not
    covered."""
    counts = dict.fromkeys(("schemas", "refused", "valid", "valid_rejected", "invalid", "invalid_accepted"), 0)
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text()):
            counts["schemas"] += 1
            try:
                library.compile("json", json.dumps(group["schema"]))
            except Exception:
                counts["refused"] += 1
                continue
            for test in group["tests"]:
                accepted = library.accepts(json.dumps(test["data"], ensure_ascii=False))
                counts["valid" if test["valid"] else "invalid"] += 1
                counts["valid_rejected"] += test["valid"] and not accepted
                counts["invalid_accepted"] += accepted and not test["valid"]
    return counts


def in_process(library: str, what: str, *more: str) -> dict[str, Any]:
    """Run one case where it can be ended."""
    command = [sys.executable, __file__, "--case", library, what, *more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == -signal.SIGXCPU:
        return {"ended": f"not done after {TIME_LIMIT_S} s of processor time"}
    if done.returncode:
        return {"ended": f"exit code {done.returncode}: {(done.stderr.strip() or 'no message').splitlines()[-1][:160]}"}
    return json.loads(done.stdout.splitlines()[-1])


def run_case(library: str, what: str, folder: str | None) -> None:
    """Run one case in its own process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    began = time.process_time()
    made = LIBRARIES[library]()
    start = time.process_time() - began
    spent = int(time.process_time()) + (10 * TIME_LIMIT_S if what == "suite" else TIME_LIMIT_S)
    resource.setrlimit(resource.RLIMIT_CPU, (spent, spent + 5))  # ends the process, whatever it is doing
    if what == "suite":
        result = suite(made, Path(folder or ""))
    else:
        result = case(made, *(ORDINARY | HOSTILE)[what](), seeds=8 if what in ORDINARY else 1)
        result["start_s"] = start
    print(json.dumps(result))


def table(result: dict[str, Any]) -> str:
    """Format the table of the page on structured output."""
    libraries = result["libraries"]
    names = [f"{name} {found['version']}" for name, found in libraries.items()]
    lines = [f"| grammar | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for case_name in (*ORDINARY, *HOSTILE):
        cells = [_cell(found["cases"][case_name]) for found in libraries.values()]
        lines.append(f"| {case_name} | {' | '.join(cells)} |")
    for title, part, whole in (
        ("schemas of the suite that are refused", "refused", "schemas"),
        ("valid instances that are rejected", "valid_rejected", "valid"),
        ("invalid instances that are accepted", "invalid_accepted", "invalid"),
    ):
        counts = [found["suite"] for found in libraries.values()]
        lines.append(f"| {title} | {' | '.join(f'{count[part]} of {count[whole]}' for count in counts)} |")
    machine = result["environment"]
    lines.append(
        f"\n`{result['command']}`: processor time to compile, then the median time of a mask, with "
        f"{result['vocabulary']} tokens, on an {machine['processor']}, Python {machine['python']}, commit "
        f"{record.cited(machine['commit'])}.\n"
    )
    return "\n".join(lines)


def _cell(found: dict[str, Any]) -> str:
    if "ended" in found:
        return "not done in time" if "not done" in found["ended"] else "it crashes"
    time_s = found["compile_s"]
    spent = f"{time_s:.1f} s" if time_s >= 0.1 else f"{max(1, round(1e3 * time_s))} ms"
    if "refused" in found:
        return f"refused after {spent}"
    mask = found["mask_us"]["median"]
    shown = f"{mask:.0f} µs" if mask < 1e4 else f"{mask / 1e3:.0f} ms" if mask < 1e6 else f"{mask / 1e6:.1f} s"
    return f"{spent}; {shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "grammars.json")
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        run_case(options.case[0], options.case[1], options.case[2] if len(options.case) > 2 else None)
        return
    results: dict[str, Any] = {}
    for library in LIBRARIES:
        found = results[library] = {"version": importlib.metadata.version(library), "cases": {}}
        for name in (*ORDINARY, *HOSTILE):
            found["cases"][name] = in_process(library, name)
            print(library, name, json.dumps(found["cases"][name]), flush=True)
        if options.suite:
            found["suite"] = in_process(library, "suite", str(options.suite))
            print(library, "suite", found["suite"], flush=True)
    result = {
        "command": "python benchmarks/engine/grammars.py --suite DIR",
        "environment": record.environment(),
        "vocabulary": VOCAB,
        "limits": {"seconds": TIME_LIMIT_S, "bytes": MEMORY_LIMIT},
        "libraries": results,
    }
    record.write(options.out, result)


if __name__ == "__main__":
    main()
