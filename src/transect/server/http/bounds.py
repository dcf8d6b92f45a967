"""Bound the size of a request, with types that are checked without a Python object for each fault.

A body of a few megabytes can hold millions of values, and work on each of them would block the event loop for all
clients. So values are counted before they are parsed, lists are checked up to their first fault, and a prompt of token
ids is checked as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, FailFast, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from .errors import MAX_NAME, ApiError

T = TypeVar("T")


class _FirstFault(FailFast):
    """A ``FailFast`` that is hashable, as members of a union of types must be."""

    __hash__ = object.__hash__


Listed = Annotated[list[T], _FirstFault()]
"""A list that is checked up to its first fault."""

MAX_CONTAINERS = 2**17
MAX_COMMAS = 2**20
MAX_STRINGS = 2**17
MAX_MESSAGES = 10_000
MAX_TEMPLATE_ARGUMENTS = 1_000
MAX_DEPTH = 400
"""Deepest nesting of lists and objects; a schema uses two levels for each level of its objects."""
_DIGITS = bytes(ord("0") if chr(byte).isascii() and chr(byte).isdigit() else ord(" ") for byte in range(256))
TOO_DEEP = ApiError(
    400,
    f"the JSON of the body is nested too deeply: send at most {MAX_DEPTH} levels of lists and objects",
    code="nested_too_deeply",
)
TOO_MANY = "the body holds more than {} {}: send fewer values in one request"
PROMPT_FORMS = "must be a string, a list of strings, a list of token ids or a list of lists of token ids"


def may_have_long_numbers(body: bytes) -> bool:
    """Return True if ``body`` has 19 digits in a row: whole numbers that exceed 64 bits have as many. Python's other
    work waits meanwhile; a regular expression takes eight times as long."""
    return b"0" * 19 in body.translate(_DIGITS)


def check_values(body: bytes) -> None:
    """Refuse a body with too many values to parse without blocking other clients. Characters in strings count too.

    Raises:
        ApiError: 413.
    """
    if len(body) <= MAX_CONTAINERS:
        return
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        raise ApiError(413, TOO_MANY.format(MAX_CONTAINERS, "lists and objects"), code="request_too_large")
    if body.count(b",") > MAX_COMMAS:
        raise ApiError(413, TOO_MANY.format(MAX_COMMAS, "commas"), code="request_too_large")
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_STRINGS:
        raise ApiError(413, TOO_MANY.format(MAX_STRINGS, "strings and names"), code="request_too_large")


def check_depth(value: Any) -> None:
    """Refuse lists and objects that are nested more than MAX_DEPTH levels deep.

    Raises:
        ApiError: 400.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _inside(each) if isinstance(inner, (dict, list))]
        if not level:
            return
    raise TOO_DEEP


def check_numbers(value: Any) -> None:
    """Refuse whole numbers beyond 64 bits, which neither the engine's messages nor grammars can hold.

    Raises:
        ApiError: 400 that names the field.
    """
    left: list[tuple[str, Any]] = [("", value)]
    while left:
        field, each = left.pop()
        if isinstance(each, int) and not -(2**63) <= each < 2**64:
            message = "holds a whole number of more than 64 bits: give one from -2**63 to 2**64 - 1"
            raise ApiError(400, f"{field or 'the body'} {message}", param=field or None, code="invalid_value")
        if isinstance(each, dict):
            left += [(field or str(name)[:MAX_NAME], inner) for name, inner in each.items()]
        elif isinstance(each, list):
            left += [(field, inner) for inner in each]


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def at_most(count: int) -> BeforeValidator:
    """Refuse a list or an object with more than ``count`` entries, before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > count:
            context = {"found": len(value), "most": count}
            raise PydanticCustomError("shape", "holds {found} entries: give at most {most}", context)
        return value

    return BeforeValidator(check)


def _count_parts(value: Any) -> Any:
    """Refuse more than MAX_MESSAGES messages, their parts and their calls together."""
    if isinstance(value, list):
        inner = [each.get(name) for each in value if isinstance(each, dict) for name in ("content", "tool_calls")]
        found = len(value) + sum(len(each) for each in inner if isinstance(each, list))
        if found > MAX_MESSAGES:
            context = {"found": found, "most": MAX_MESSAGES}
            raise PydanticCustomError("shape", "hold {found} messages, parts and calls: give at most {most}", context)
    return value


FewParts = BeforeValidator(_count_parts)
"""Validator for a list of messages."""


def _check_prompt(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Check a prompt as a whole; ``handler`` would check each value, four ways at once."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds <= {str} or _are_ids(value, kinds):
            return value
        if kinds == {list} and all(_are_ids(each, set(map(type, each))) for each in value):
            return value
    raise PydanticCustomError("shape", PROMPT_FORMS)


def _are_ids(values: Sequence[Any], kinds: set[type]) -> bool:
    return kinds <= {int} and (not values or (min(values) >= 0 and max(values) < 2**31))


AnyPrompt = WrapValidator(_check_prompt)
"""Validator for a union of the forms that a prompt may have."""
