"""Values of untrusted files: each is checked when it is read, and errors name the field.

``Fields`` reads the keys of a config.json, of a tokenizer's settings or of a GGUF file's metadata. ``read_json_object``
reads the file: what is not JSON object, is nested beyond reason or holds NaN is an error that names the file.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

LARGEST_INTEGER = 2**31 - 1
"""Upper bound of integers; sizes and token ids are far below it."""
LARGEST_NUMBER = 1e30
"""Upper bound of numbers; products of two factors of this size are still floats."""
ADVICE = "download the model again"


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not readable as a JSON object; the message names it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except FileNotFoundError:
        raise
    except RecursionError:
        raise ValueError(f"{path} is not valid JSON (nested too deep): {ADVICE}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): {ADVICE}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, found a {type(value).__name__}: {ADVICE}")
    return value


def shown(value: Any) -> str:
    """Format a value for an error, shortened if it is long."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 76 digits"
    text = reprlib.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """Typed access to the keys of a file. A key with the value None counts as missing.

    Args:
        values: key to value.
        where: the file, for errors.
        prefix: in front of every key that is asked for.

    Every method raises ValueError for a value of another type or out of its range, and where there is none and no
    default: the message names the key.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json", prefix: str = "") -> None:
        self.values = values
        self.where = where
        self._prefix = prefix

    def has(self, key: str) -> bool:
        """Return True if the file has a value for the key."""
        return self.value(key) is not None

    def is_null(self, key: str) -> bool:
        """Return True if the file has the key without a value."""
        return self._prefix + key in self.values and not self.has(key)

    def integer(self, key: str, default: int | None = None, low: int = 0) -> int:
        """Return a whole number, at least ``low``."""
        value = self._value(key, default, "a whole number")
        if isinstance(value, bool) or not isinstance(value, int):
            if not (isinstance(value, float) and value.is_integer()):
                self._refuse(key, "a whole number", value)
            value = int(value)
        if not low <= value <= LARGEST_INTEGER:
            self._refuse(key, f"a whole number from {low} to {LARGEST_INTEGER}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._value(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self._refuse(key, "a number", value)
        if (isinstance(value, float) and not math.isfinite(value)) or abs(value) > LARGEST_NUMBER:
            self._refuse(key, f"a finite number of at most {LARGEST_NUMBER:g}", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return True or False."""
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            self._refuse(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(key, default, "a string")
        if not isinstance(value, str):
            self._refuse(key, "a string", value)
        return value

    def value(self, key: str) -> Any:
        """Return any value, or None if the file has none."""
        return self.values.get(self._prefix + key)

    def token_id(self, key: str) -> int | None:
        """Return a token id, or None if the file has none."""
        return self.integer(key) if self.has(key) else None

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return a token id or a list of them, as a tuple; () if the file has none."""
        value = self.value(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        for token in values:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= LARGEST_INTEGER:
                self._refuse(key, "a token id or a list of them", value)
        return tuple(values)

    def _value(self, key: str, default: Any, kind: str) -> Any:
        value = self.value(key)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"{self.where} has no {self._prefix + key!r}: it must be {kind}")
        return value

    def _refuse(self, key: str, kind: str, value: Any) -> NoReturn:
        raise ValueError(f"{self._prefix + key!r} in {self.where} must be {kind}, not {shown(value)}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
