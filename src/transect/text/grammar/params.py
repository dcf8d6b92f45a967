"""Define requests for the form of an answer, with the names of vLLM's ``StructuredOutputsParams``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MAX_GRAMMAR_BYTES = 2**20
"""Most bytes of a schema or grammar as text. The compiler has limits of its own; this one bounds the time of
reading."""
MAX_REGEX_BYTES = 2**15
MAX_CHOICES = 10_000
CACHE_BYTES = 128 * 2**20
"""Default of the memory of compiled grammars that an engine keeps."""

OBJECT_BYTES = 2**16
"""Estimate of the memory of a schema that is an object."""
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Form of an answer: exactly one of the first six fields is set.

    Attributes:
        json: a JSON Schema (draft 2020-12), as an object or as text.
        regex: a regular expression that the whole answer matches. The syntax is that of Rust's ``regex`` crate.
        choice: the answer is one of these strings.
        grammar: a context-free grammar: Lark, or EBNF as in llama.cpp's GBNF (``root ::= ...``).
        json_object: True: any JSON object.
        structural_tag: free text in which a tag, once begun, is kept to: ``{"structures": [{"begin": "<f>", "schema":
            {...}, "end": "</f>"}], "triggers": ["<f"]}``.
        disable_any_whitespace: JSON without spaces and line breaks.
        disable_additional_properties: objects of the schema have no properties but those that it names.
        whitespace_pattern: a regular expression of the white space between parts of JSON; None for at most a space, or
            a line break with its indentation, so that a model cannot write blanks for ever.
        lenient: leave parts of a schema that a grammar cannot enforce to the model, instead of refusing the schema.
        lark: a grammar that this project has written itself; it may speak of one of the first six as ``@answer``.
        lead: Lark rules that define ``lead``, which the answer begins with, before the form that is asked for; ours
            too.
        field: the name to call all this in complaints.

    Raises:
        ValueError: none or several are given, or one is not what it must be; the message begins with ``field``.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    lenient: bool = False
    lark: str | None = None
    lead: str | None = None
    field: str = "structured_outputs"

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:
            given.append("json")
        if len(given) != 1 and (given or self.lark is None):
            found = " and ".join(given) or "none"
            raise ValueError(f"{self.field} must have exactly one of {', '.join(KINDS)}; {found} is given")
        for name, limit in (
            ("regex", MAX_REGEX_BYTES),
            ("grammar", MAX_GRAMMAR_BYTES),
            ("lark", 4 * MAX_GRAMMAR_BYTES),
        ):
            self._check_text(name, limit)
        self._check_text("whitespace_pattern", 1000)
        if isinstance(self.json, str):
            self._check_text("json", MAX_GRAMMAR_BYTES)
        elif not isinstance(self.json, (dict, bool, type(None))):
            raise ValueError(f"{self.field} json must be a JSON Schema, got {type(self.json).__name__}")
        if not isinstance(self.structural_tag, (str, dict, type(None))):
            raise ValueError(f"{self.field} structural_tag must be an object, got {type(self.structural_tag).__name__}")
        self._check_choice()

    def _check_text(self, name: str, limit: int) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, str):
            raise ValueError(f"{self.field} {name} must be text, got {type(value).__name__}")
        if len(value) > limit:
            raise ValueError(f"{self.field} {name} has {len(value)} characters; at most {limit} are allowed")

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        if not isinstance(self.choice, (list, tuple)) or not all(isinstance(each, str) for each in self.choice):
            raise ValueError(f"{self.field} choice must be a list of strings")
        if not 0 < len(self.choice) <= MAX_CHOICES:
            raise ValueError(f"{self.field} choice must have 1 to {MAX_CHOICES} strings, got {len(self.choice)}")
        if not all(self.choice):
            raise ValueError(f"{self.field} choice must not hold an empty string")
        if sum(map(len, self.choice)) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"{self.field} choice is longer than {MAX_GRAMMAR_BYTES} characters in all")

    @property
    def nbytes(self) -> int:
        """Estimate of the memory that the request holds."""
        texts = (self.regex, self.grammar, self.lark, self.lead, self.json)
        known = sum(len(text) for text in texts if isinstance(text, str)) + sum(map(len, self.choice or ()))
        return known + OBJECT_BYTES * (isinstance(self.json, dict) + isinstance(self.structural_tag, dict))

    def schema(self) -> Any:
        """Return ``json`` as an object.

        Raises:
            ValueError: it is text that is not JSON, or holds what JSON cannot.
        """
        try:
            return json.loads(self.json) if isinstance(self.json, str) else json.loads(json.dumps(self.json))
        except RecursionError:
            raise ValueError(
                f"{self.field} json is nested too deeply: a schema may be some hundred levels deep"
            ) from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.field} json is not a JSON Schema: {error}") from None

    @classmethod
    def of(cls, value: Any) -> StructuredOutputsParams:
        """Build the parameters from an object with fields of this class, as in requests and messages.

        Raises:
            ValueError: something else, or an unknown field.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"structured_outputs must be an object, got {type(value).__name__}")
        known = {each.name for each in fields(cls)}
        unknown = sorted(set(map(str, value)) - known)
        if unknown:
            raise ValueError(f"structured_outputs has no field {unknown[0][:60]!r}; it has {', '.join(sorted(known))}")
        return cls(**value)
