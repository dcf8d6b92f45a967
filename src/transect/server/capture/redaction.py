"""Replace personal data and secrets in texts by ``[name of the rule]``.

Built-in rules: ``email``, ``phone``, ``card`` (numbers with a valid check digit), ``iban``, ``key`` (tokens of known
forms, ``Bearer ...``, private keys). An operator's file adds rules, one a line, ``NAME=REGEX`` in Python's syntax;
``NAME=`` turns a built-in rule off. Rules find fixed forms. Names, addresses and secrets in free words stay.

A long text is searched in windows that overlap, so that a search never holds the interpreter for long. A match of up to
``OVERLAP`` characters is always found.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

WINDOW, OVERLAP = 8192, 2048
SLOW_S = 0.5
"""Seconds of a search in one window after which a rule is taken for unusable."""
PAUSE_S = 1e-5
"""Sleep after a search. A thread that waits for the interpreter gets it during a real sleep, not during one of 0 s."""
MOST_RULES = 64

_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]{0,6000}?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)")
BUILT_IN: Mapping[str, re.Pattern[str]] = {
    "key": re.compile(
        r"\b(?:sk|pk|rk)[-_](?:[A-Za-z]+[-_])*[A-Za-z0-9_\-]{16,}"  # OpenAI, Anthropic, Stripe
        r"|\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[\w\-]{16,}|hf_[A-Za-z0-9]{20,})"
        r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w\-]{30,}|\bxox[abprs]-[A-Za-z0-9\-]{10,}"
        r"|\beyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]{8,}"  # JSON web tokens
        r"|(?<=[Bb]earer )[\w\-.~+/]{16,}=*"
        r"|(?i:(?<=password=)|(?<=passwd=)|(?<=secret=)|(?<=api_key=)|(?<=token=))[^\s\"'&;,]{6,}"
    ),
    "email": re.compile(r"(?<![\w.+\-])[\w.+\-]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9\-]{0,62}\.)+[A-Za-z]{2,24}\b"),
    "iban": re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b"),
    "card": re.compile(r"(?<![\w.])\d(?:[ \-]?\d){12,18}(?![\w])"),
    "phone": re.compile(
        r"(?<![\w.])(?:\+|00)[1-9]\d{0,2}(?:[ \-./]?(?:\(\d{1,5}\)|\d{1,5})){2,6}(?!\w)"
        r"|(?<![\w.])(?:\(\d{3}\) ?|\d{3}[ \-.])\d{3}[ \-.]\d{4}(?!\w)"
        r"|(?<![\w.])0\d{2,4}[ \-/]\d{3,4}(?:[ \-]?\d{2,4}){1,2}(?!\w)"
    ),
}
"""Rules by name, in the order of their application."""
DIGITS = tuple("0123456789")
HINTS: Mapping[str, tuple[str, ...]] = {
    "key": (
        *("k-", "k_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "hf_", "AKIA", "ASIA", "AIza"),
        *("xox", "eyJ", "earer ", "="),
    ),
    "email": ("@",),
    "iban": DIGITS,
    "card": DIGITS,
    "phone": DIGITS,
}
"""Substrings of which each match of a built-in rule has at least one: most texts have none, and need no search."""


class SlowRule(ValueError):
    """A rule needs too long: captures must stop, because texts cannot be redacted by it."""


class Redaction:
    """The rules of a server, and the numbers of their replacements.

    Args:
        more: the operator's rules by name; None turns a built-in rule off.
        counted: called with a rule's name and the number of its replacements in a text.
        pause: called after each window; lets other threads run.
        clock: seconds.
    """

    def __init__(
        self,
        more: Mapping[str, re.Pattern[str] | None] | None = None,
        counted: Callable[[str, int], None] = lambda name, count: None,
        pause: Callable[[], None] = lambda: time.sleep(PAUSE_S),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        rules = {**BUILT_IN, **(more or {})}
        self.rules = {name: rule for name, rule in rules.items() if rule is not None}
        self._counted, self._pause, self._clock = counted, pause, clock

    def text(self, text: str) -> str:
        """Return a text with all matches replaced.

        Raises:
            SlowRule: a rule needs too long.
        """
        if "key" in self.rules and "PRIVATE KEY" in text:
            text = self._replaced(text, "key", [match.span() for match in _PRIVATE_KEY.finditer(text)])
        for name, rule in self.rules.items():
            spans: list[tuple[int, int]] = []
            hints = HINTS.get(name, ()) if rule is BUILT_IN.get(name) else ()
            for start, end in windows(text):
                if hints and all(text.find(hint, start, end) < 0 for hint in hints):
                    continue
                began = self._clock()
                found = [match.span() for match in rule.finditer(text, start, end)]
                if self._clock() - began > SLOW_S:
                    raise SlowRule(f"the rule {name!r} takes too long on a text: simplify its expression")
                spans += [span for span in found if span[0] < span[1]]
                self._pause()
            if name == "card":
                spans = [span for span in spans if _valid_card(text[slice(*span)])]
            text = self._replaced(text, name, spans)
        return text

    def value(self, value: Any) -> Any:
        """Return plain data with the texts in it redacted; keys of objects stay."""
        if isinstance(value, str):
            return self.text(value) if value else value
        if isinstance(value, dict):
            return {key: self.value(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        return value

    def _replaced(self, text: str, name: str, spans: list[tuple[int, int]]) -> str:
        pieces, at, count = [], 0, 0
        for start, end in sorted(spans):
            if start >= at:
                pieces += [text[at:start], f"[{name}]"]
                count += 1
            at = max(at, end)
        if not count:
            return text
        self._counted(name, count)
        return "".join([*pieces, text[at:]])


def windows(text: str) -> Iterator[tuple[int, int]]:
    """Yield the windows of a text, which begin after white space where there is some."""
    start = 0
    while True:
        yield start, min(start + WINDOW, len(text))
        if start + WINDOW >= len(text):
            return
        start += WINDOW - OVERLAP
        space = max(text.rfind(each, start - OVERLAP, start) for each in " \n")
        start = space + 1 if space >= 0 else start


def _valid_card(text: str) -> bool:
    """Check a card number by its check digit (Luhn, ISO/IEC 7812)."""
    digits = [int(each) for each in text if each.isdigit()]
    doubled = (sum(divmod(2 * each, 10)) for each in digits[-2::-2])
    return len(set(digits)) > 1 and (sum(digits[::-2]) + sum(doubled)) % 10 == 0


def rules_in(path: Path | str) -> dict[str, re.Pattern[str] | None]:
    """Read an operator's rules.

    Raises:
        ValueError: the file cannot be read, or a line is at fault; the message has its number.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"capture_rules {path} cannot be read ({error}): give a text file, NAME=REGEX on each line"
        ) from None
    found: dict[str, re.Pattern[str] | None] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        name, equals, pattern = line.partition("=")
        name, place = name.strip(), f"capture_rules {path}, line {number}:"
        if not equals or not re.fullmatch(r"[a-z][a-z0-9_-]{0,31}", name):
            raise ValueError(f"{place} write NAME=REGEX, with a name of small letters")
        if not pattern and name not in BUILT_IN:
            raise ValueError(f"{place} there is no built-in rule {name!r} to turn off; there are {', '.join(BUILT_IN)}")
        try:
            rule = re.compile(pattern) if pattern else None
        except re.error as error:
            raise ValueError(f"{place} {pattern!r} is not a regular expression ({error})") from None
        if rule is not None and rule.match(""):
            raise ValueError(f"{place} {pattern!r} matches the empty text: make it stricter")
        found[name] = rule
    if len(found) > MOST_RULES:
        raise ValueError(f"capture_rules {path} holds {len(found)} rules: give at most {MOST_RULES}")
    return found
