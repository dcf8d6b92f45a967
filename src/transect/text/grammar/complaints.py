"""Error messages about grammars in this project's words: the library's are about its internals."""

from __future__ import annotations

import re

_KNOWN = (
    (r"Unimplemented keys: (\[[^]]*\])", "the schema uses keywords that cannot be kept to ({}): leave them out"),
    ("oneOf constraints",
     "oneOf is kept to only where its alternatives exclude each other (by a const, say): use anyOf"),
    ("recursion limit", "it is nested too deeply: put its inner parts into $defs"),
    (r"too (?:big|large|many|complex)|toocomplex|\bitems; max|\bfuel\b|size limit|lexer states|limit exceeded",
     "it is too large or too complex: make it simpler"),
    (r"regex parse error: .*error: ([a-z][^|]{0,100}?)(?: \d+ \||\)? *$)", "a regular expression cannot be read: {}"),
    (r"(look-?around)", "a regular expression uses {}, which cannot be kept to"),
    (r"(backreference)", "a regular expression uses a {}, which cannot be kept to"),
    (r"invalid regex|regex parse error", "a regular expression cannot be read: correct it"),
    (r"unknown name: \"([^\"]{1,60})\"|Rule '([^']{1,60})' not found", "it uses the rule {}, which it does not define"),
    (r"Invalid type: (\S{1,60})", "the schema has the type {}, which JSON does not have"),
    (r"Pointer '([^']{1,100})' does not exist", "the schema refers to {}, which it does not have"),
    (r"Unsatisfiable|empty language|no match", "no answer can satisfy it"),
    (r"Expected (\w[\w ]*) for '([^']{1,60})'", "the schema must have a value of type {} for {}"),
    (r"left.?recurs", "its rules call themselves in a way that cannot be kept to"),
    (r"(?:^| )(\d+)\(\d+\):", "line {} cannot be read"),
)  # fmt: skip


def explain(error: str) -> str:
    """Translate an error message of llguidance to one sentence.

    Args:
        error: its text.
    """
    line = " ".join(error.split())[:2000]
    for pattern, words in _KNOWN:
        found = re.search(pattern, line, re.IGNORECASE)
        if found:
            return words.format(*(part.strip() for part in found.groups() if part is not None))
    return "it cannot be compiled: look for a mistake in it, or make it simpler"
