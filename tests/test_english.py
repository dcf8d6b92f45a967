"""Check the rules of plain English that a program can check: in code, pages and help texts, with their lengths.

``python tests/test_english.py [PATH ...]`` prints the texts that break one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from transect.cli import _application

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "transect"
BENCHMARKS = ROOT / "benchmarks"
DESCRIPTIONS = BENCHMARKS / "server" / "client_programs"
"""Programs whose docstrings describe tools to a model."""

OPENER = re.compile(r"(What|Whether|How|Who|Whoever)\b")
NONE = re.compile(r"\bNone: ")
PICTURE = re.compile(
    r"\b(one (behind|below) the other|goes on|go on|so many|nobody|whoever|anew|is told|lies there|stands there|"
    r"what (it|they|attention) says?)\b",
    re.IGNORECASE,
)

ENTRY = re.compile(r"^\s+[\w, ]+: (what|whether|how|who|whoever)\b", re.MULTILINE)
"""Description of an argument or attribute that opens as no attribute's should."""

NOT_A = re.compile(r"(?<!here )\b(is|are) no (?!longer|more|room|such|\w+er\b)", re.IGNORECASE)
"""A noun that is denied in the German way: "is no file" is "is not a file"."""

NOUN = re.compile(
    r"(The|Then|A|An|Its|All|Every|Everything|Each|One|Two|Three|See|Where|When|For|From|In|On|At|By|As|To|With|Without|"
    r"No|None|True|False|Why|Which|Those|That|This|These|If|There|It|They)\b|[^A-Z]|\w+ of\b|"
    r"\w+(s|ing|ly|ness|ion)[ .,:]"
)
"""Opener of a function's docstring that is no verb: a pronoun, code, "Size of", or a noun or verb by its ending."""

VERB = re.compile(
    r"(Access|Address|Apply|Bring|Compress|Condition|Cross|Express|Focus|Guess|Miss|Multiply|Partition|Pass|Position|Process|"
    r"Reply|Suppress)\b"
)
"""Verbs with the endings of nouns."""

RESULTS = re.compile(r"<!-- results: .*?<!-- end -->", re.DOTALL)
"""Tables that come from results."""
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


def faults(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield line, rule and text of what breaks a rule in a file."""
    for line, text, documents in texts(tree):
        if documents and OPENER.match(text):
            yield line, "opener", text
        if documents and NONE.search(text):
            yield line, "None:", text
        if documents and ENTRY.search(text):
            yield line, "entry", text
        if PICTURE.search(text):
            yield line, "picture", text
        if NOT_A.search(" ".join(text.split())):
            yield line, "is no", text


def parsed(path: Path) -> ast.AST:
    """Parse a file."""
    return ast.parse(path.read_text())


def nouns(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and docstring of each function whose docstring opens without a verb; properties may."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            is_property = any("property" in ast.unparse(each) for each in node.decorator_list)
            if not is_property and NOUN.match(text) and not VERB.match(text):
                yield node.lineno, text


def test_no_text_breaks_a_rule_and_docstrings_of_functions_open_with_a_verb() -> None:
    """One test, because most of its time is the parser's."""
    broken, without_verb = [], {}
    for path in [*SOURCE.rglob("*.py"), *BENCHMARKS.rglob("*.py")]:
        tree, name = parsed(path), path.relative_to(ROOT)
        if path.is_relative_to(SOURCE):
            broken += [f"{name}:{line}: {rule}" for line, rule, _ in faults(tree)]
        if path.parent != DESCRIPTIONS:
            without_verb |= {f"{name}:{line}": text[:60] for line, text in nouns(tree)}
    assert not broken, "python tests/test_english.py prints the texts; write them as CONTRIBUTING.md says"
    assert not without_verb, "begin with a verb: Return the ..., Build a ..., Check that ..."


def test_openers_without_a_verb_are_seen(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    openers = ["Size of it.", "``x`` in bytes.", "(a, b).", "Returns it.", "Its gradients.", "Tokens, in order."]
    verbs = ["Return it.", "Process it.", "Sum x."]
    for place, text in enumerate(openers + verbs):
        program.write_text(f'def f():\n    """{text}"""\n\n\n@property\ndef g():\n    """{text}"""\n')
        assert [line for line, _ in nouns(parsed(program))] == ([1] if place < len(openers) else []), text


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
        '    raise ValueError(f"{function} is no file")\n'
    )
    found = [(line, rule) for line, rule, _ in faults(parsed(program))]
    assert sorted(found) == [
        (1, "opener"),
        (3, "None:"),
        (4, "opener"),
        (6, "entry"),
        (6, "picture"),
        (11, "picture"),
        (12, "is no"),
    ]


def words(page: str) -> int:
    """Count the words of a page, with tables and code, without HTML comments."""
    return len(re.findall(r"\S*\w\S*", re.sub(r"<!--.*?-->", "", page)))


def test_the_readme_is_short() -> None:
    assert words((ROOT / "README.md").read_text()) <= README_WORDS


def test_long_pages_say_that_they_are_for_looking_things_up() -> None:
    """A page to read from the top has at most ``PAGE_WORDS`` words without its generated tables."""
    pages = {page: RESULTS.sub("", page.read_text()) for page in (ROOT / "docs").rglob("*.md")}
    unmarked = {
        str(page.relative_to(ROOT)): words(text)
        for page, text in pages.items()
        if words(text) > PAGE_WORDS and REFERENCE not in "\n".join(text.splitlines()[:4])
    }
    assert not unmarked, "split the page, or begin it with a line that starts with *Reference"


HEADING = re.compile(r"#+ (What|Whether|How|Who|Whose|Whoever|Where|When|Which|Why)\b")
ITEM = re.compile(r"\s*([*-]|\d+\.) (\*\*)?(What|Whether|How|Who|Whose|Whoever)\b")
HEADER_CELL = re.compile(r"\|\s*(what|whether|how|who|whose)\b", re.IGNORECASE)
GENERATED = re.compile(r"<!-- results: .*?<!-- end -->|^```.*?^```", re.DOTALL | re.MULTILINE)
"""Blocks of a page that come from results, and code."""
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")])


def page_faults(page: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, rule and text of prose that breaks a rule: openers of headings, items and tables, and pictures."""
    prose = GENERATED.sub(lambda block: "\n" * block[0].count("\n"), page)
    lines = prose.splitlines()
    for number, line in enumerate(lines, 1):
        is_header = line.startswith("|") and number < len(lines) and lines[number].startswith("|--")
        if HEADING.match(line):
            yield number, "heading", line
        if ITEM.match(line) or (is_header and HEADER_CELL.search(line)):
            yield number, "opener", line
        if PICTURE.search(line):
            yield number, "picture", line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_keep_the_rules(page: Path) -> None:
    assert not list(page_faults(page.read_text()))


def test_the_checker_of_pages_sees_each_fault() -> None:
    page = (
        "# How it runs\n\n* What it does\n\n| what | size |\n|---|---|\n| how | 1 |\n\nIt goes on.\n"
        "```\n# What a comment may say\n```\n<!-- results: x -->\nnobody\n<!-- end -->\n"
    )
    assert [(line, rule) for line, rule, _ in page_faults(page)] == [
        (1, "heading"),
        (3, "opener"),
        (5, "opener"),
        (9, "picture"),
    ]


HELP_CHARACTERS, SUMMARY_CHARACTERS = 140, 160
"""Longest help text of an option, and longest first paragraph of a command's."""


def help_texts(command: Any, name: str) -> Iterator[tuple[str, str, int]]:
    """Yield name, text and longest permitted length of the help of a command, of its options and of its children."""
    yield name, " ".join((command.help or "").split("\n\n")[0].split()), SUMMARY_CHARACTERS
    for option in command.params:
        yield f"{name} {option.opts[0]}", getattr(option, "help", None) or "", HELP_CHARACTERS
    for child, each in getattr(command, "commands", {}).items():
        yield from help_texts(each, f"{name} {child}")


def test_help_texts_are_short_and_plain() -> None:
    program = typer.main.get_command(_application())
    context = program.make_context("transect", [], resilient_parsing=True)
    every = (program.get_command(context, name) for name in program.list_commands(context))
    found = [text for command in every for text in help_texts(command, command.name)]
    assert len(found) > 400
    faults = [
        (name, text) for name, text, most in found if len(text) > most or OPENER.match(text) or PICTURE.search(text)
    ]
    assert not faults
    assert not [name for name, text, most in found if not text and most == SUMMARY_CHARACTERS]


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]] or [SOURCE]
    files = (file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py"))))
    for file in files:
        tree = parsed(file)
        for line, rule, text in faults(tree):
            print(f"{file}:{line}: {rule}: {' '.join(text.split())[:110]}")
        for line, text in nouns(tree):
            print(f"{file}:{line}: noun: {' '.join(text.split())[:110]}")
    for page in PAGES:
        for line, rule, text in page_faults(page.read_text()):
            print(f"{page}:{line}: {rule}: {text[:110]}")


if __name__ == "__main__":
    main()
