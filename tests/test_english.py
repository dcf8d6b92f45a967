"""Check the rules of plain English that a program can check, and the lengths of pages.

``ALLOWED`` is a ratchet: texts of a folder that break a rule, as counted when the rule came in. Counts may only fall,
and a folder without an entry has none. ``python tests/test_english.py [PATH ...]`` prints all such texts.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "transect"

OPENER = re.compile(r"(What|Whether|How|Who|Whoever)\b")
NONE = re.compile(r"\bNone: ")
PICTURE = re.compile(
    r"\b(one (behind|below) the other|goes on|go on|so many|nobody|whoever|anew|is told|lies there|stands there|"
    r"what (it|they|attention) says?)\b",
    re.IGNORECASE,
)

ENTRY = re.compile(r"^\s+[\w, ]+: (what|whether|how|who|whoever)\b", re.MULTILINE)
"""Description of an argument or attribute that opens as no attribute's should."""

ALLOWED: dict[str, int] = {}
"""Texts that break a rule, by folder below ``src/transect``."""

NOUN = re.compile(r"(The|A|An|Its|All|Every|Each|One|See|Where|For|From|In) ")
"""First word of a function's docstring that is no verb."""

ALLOWED_NOUNS: dict[str, int] = {
    "bench": 13,
    "checkpoints": 19,
    "cli": 29,
    "costs": 3,
    "costs/memory": 6,
    "engine": 14,
    "engine/executors": 12,
    "engine/executors/gpu": 44,
    "engine/frontends": 29,
    "engine/scheduling": 31,
    "engine/scheduling/drafters": 6,
    "engine/scheduling/policies": 10,
    "explain": 2,
    "explain/backward": 3,
    "explain/engine": 7,
    "formats": 1,
    "hardware": 3,
    "models": 18,
    "models/streaming": 3,
    "models/weights": 11,
    "ops": 1,
    "ops/activation": 4,
    "ops/attention/packed": 12,
    "ops/attention/paged": 17,
    "ops/comm": 2,
    "ops/cpu": 5,
    "ops/first": 11,
    "ops/lang": 8,
    "ops/linear": 3,
    "ops/linear/few_rows": 3,
    "ops/linear/many_rows": 1,
    "ops/linear/packed/eight_bit": 4,
    "ops/linear/packed/gguf": 2,
    "ops/linear/packed/int4": 4,
    "ops/loss": 2,
    "ops/moe": 11,
    "ops/norm": 3,
    "ops/optim": 5,
    "ops/position": 3,
    "ops/sampling": 16,
    "ops/tools": 20,
    "parallel": 30,
    "parallel/offload": 17,
    "plan": 3,
    "server": 24,
    "server/anthropic": 9,
    "server/http": 24,
    "server/openai": 20,
    "server/operations": 17,
    "server/retrieval": 1,
    "spec": 20,
    "spec/families": 27,
    "spec/layouts": 14,
    "spec/numbers": 13,
    "text": 14,
    "text/grammar": 12,
    "text/tools": 18,
    "train/adapters": 7,
    "train/config": 5,
    "train/data": 52,
    "train/evaluation": 6,
    "train/export": 7,
    "train/loop": 25,
    "train/loop/strategies": 19,
    "train/model": 22,
    "train/objectives": 29,
    "train/optim": 29,
}
"""Functions whose docstrings open without a verb, by folder; counts may only fall."""

README_WORDS = 1000
PAGE_WORDS = 2000
REFERENCE = "*Reference"
"""Mark of a page that is for looking things up, and may be long."""


def texts(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Yield line and text of each docstring, note on an attribute, help text and message.

    The last part is True if the text documents something, and therefore has a rule for its first word.
    """
    for node in ast.walk(tree):
        if isinstance(getattr(node, "body", None), list):
            for item in node.body:
                value = item.value if isinstance(item, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield item.lineno, value.value.strip(), True
        if isinstance(node, ast.keyword) and node.arg == "help":
            yield from ((line, text, True) for line, text in _strings(node.value))
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from ((line, text, False) for line, text in _strings(node.exc))


def _strings(node: ast.AST) -> Iterator[tuple[int, str]]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.lineno, inner.value.strip()


def faults(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, rule and text of what breaks a rule in a file."""
    for line, text, documents in texts(ast.parse(path.read_text())):
        if documents and OPENER.match(text):
            yield line, "opener", text
        if documents and NONE.search(text):
            yield line, "None:", text
        if documents and ENTRY.search(text):
            yield line, "entry", text
        if PICTURE.search(text):
            yield line, "picture", text


def _folder(path: Path) -> str:
    return str(path.parent.relative_to(SOURCE))


def test_no_folder_breaks_more_rules_than_before() -> None:
    counts = Counter(_folder(path) for path in SOURCE.rglob("*.py") for _ in faults(path))
    more = {folder: count for folder, count in counts.items() if count > ALLOWED.get(folder, 0)}
    assert not more, "python tests/test_english.py prints the texts; write them as CONTRIBUTING.md says"


def test_the_ratchet_names_folders_that_exist_and_break_rules() -> None:
    counts = Counter(_folder(path) for path in SOURCE.rglob("*.py") for _ in faults(path))
    assert all(counts[folder] for folder in ALLOWED), "a folder without faults needs no entry: remove it"


def nouns(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and docstring of each function whose docstring opens without a verb; properties may."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            is_property = any("property" in ast.unparse(each) for each in node.decorator_list)
            if not is_property and NOUN.match(text):
                yield node.lineno, text


def test_docstrings_of_functions_open_with_a_verb_more_often_than_before() -> None:
    counts = Counter(_folder(path) for path in SOURCE.rglob("*.py") for _ in nouns(path))
    more = {folder: count for folder, count in counts.items() if count > ALLOWED_NOUNS.get(folder, 0)}
    assert not more, "begin with a verb: Return the ..., Build a ..., Check that ..."


def test_the_checker_sees_each_fault(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        '"""Whether it runs."""\n'
        "size = 1\n"
        '"""Bytes; None: unlimited."""\n'
        'option(help="How many.")\n'
        "def function():\n"
        '    """Return the tensors one behind the other.\n\n    Args:\n        size: how many.\n    """\n'
        '    raise ValueError(f"{function}: nobody reads that")\n'
    )
    found = [(line, rule) for line, rule, _ in faults(program)]
    assert sorted(found) == [
        (1, "opener"),
        (3, "None:"),
        (4, "opener"),
        (6, "entry"),
        (6, "picture"),
        (11, "picture"),
    ]


def words(page: str) -> int:
    """Count the words of a page, with tables and code, without HTML comments."""
    return len(re.findall(r"\S*\w\S*", re.sub(r"<!--.*?-->", "", page)))


def test_the_readme_is_short() -> None:
    assert words((ROOT / "README.md").read_text()) <= README_WORDS


def test_long_pages_say_that_they_are_for_looking_things_up() -> None:
    """A page to read from the top has at most ``PAGE_WORDS`` words without its generated tables."""
    pages = {page: page.read_text() for page in (ROOT / "docs").rglob("*.md")}
    unmarked = {
        str(page.relative_to(ROOT)): words(text)
        for page, text in pages.items()
        if words(text) > PAGE_WORDS and REFERENCE not in "\n".join(text.splitlines()[:4])
    }
    assert not unmarked, "split the page, or begin it with a line that starts with *Reference"


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]] or [SOURCE]
    files = (file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py"))))
    for file in files:
        for line, rule, text in faults(file):
            print(f"{file}:{line}: {rule}: {' '.join(text.split())[:110]}")
        for line, text in nouns(file):
            print(f"{file}:{line}: noun: {' '.join(text.split())[:110]}")


if __name__ == "__main__":
    main()
