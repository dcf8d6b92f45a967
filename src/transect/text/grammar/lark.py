"""Pieces of grammars in the Lark syntax that llguidance reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANY_TEXT = r"/(?s:.*)/"
"""A terminal: any text without special tokens."""


@dataclass(frozen=True, slots=True)
class Lead:
    """Beginning of an answer before its form: thoughts.

    Attributes:
        rules: Lark rules that define ``lead``.
        begins: a terminal of all texts that begin as a lead does, where the lead may be missing; other text must not.
    """

    rules: str
    begins: str = ""


def literal(text: str, special_ids: Mapping[str, int] | None = None) -> str:
    """Return an expression for exactly this text. Tokens of ``special_ids`` (by their spelling) in it are those tokens.

    Text and special tokens are different things to a grammar, even if they are spelled alike.
    """
    names = [name for name in (special_ids or {}) if name and name in text]
    if not names:
        return json.dumps(text, ensure_ascii=False) if text else ""
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    parts = re.split(f"({pattern})", text)
    return " ".join(f"<[{special_ids[p]}]>" if p in names else json.dumps(p, ensure_ascii=False) for p in parts if p)  # type: ignore[index]


def schema(value: Any) -> str:
    """Return an expression for JSON of a schema."""
    return f"%json {json.dumps(value, ensure_ascii=False)}"


def regex(pattern: str) -> str:
    """Return a terminal for a regular expression: its slashes are escaped as Lark requires, and line breaks written
    out."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)
    return "/" + escaped.replace("\n", r"\n").replace("\r", r"\r") + "/"


def escaped(text: str) -> str:
    """Escape text for a regular expression between slashes."""
    return re.sub(r"([][\\.+*?(){}|^$/-])", r"\\\1", text)


def until(rule: str, end: str) -> list[str]:
    """Return the rules that define ``rule``: any text, and then ``end``, an expression of ``literal``."""
    lazy = "" if end.startswith("<[") else "[lazy]"
    return [f"{rule}{lazy}: {rule.upper()} {end}", f"{rule.upper()}: {ANY_TEXT}"]
