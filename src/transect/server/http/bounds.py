"""Bound the size of a request, with types that are checked without a Python object for each fault.

A body of a few megabytes can hold millions of values, and work on each of them would block the event loop for all
clients. So values are counted before they are parsed, lists are checked up to their first fault, and a prompt of token
ids is checked as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, FailFast, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from .errors import ApiError

T = TypeVar("T")


class _FirstFault(FailFast):
    """``FailFast`` that a union of types can hold: those must be hashable."""

    __hash__ = object.__hash__


Listed = Annotated[list[T], _FirstFault()]
"""A list that is checked up to its first fault."""

MAX_CONTAINERS = 2**17
MAX_COMMAS = 2**20
MAX_MESSAGES = 10_000
MAX_TEMPLATE_ARGUMENTS = 1_000
TOO_MANY = "the body holds more than {} {}: send fewer values in one request"
PROMPT_FORMS = "must be a string, a list of strings, a list of token ids or a list of lists of token ids"


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


def at_most(count: int) -> BeforeValidator:
    """Refuse a list or an object with more than ``count`` entries, before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > count:
            context = {"found": len(value), "most": count}
            raise PydanticCustomError("shape", "holds {found} entries: give at most {most}", context)
        return value

    return BeforeValidator(check)


def _count_parts(value: Any) -> Any:
    """Refuse more than MAX_MESSAGES messages and parts of messages together."""
    if isinstance(value, list):
        contents = [each.get("content") for each in value if isinstance(each, dict)]
        found = len(value) + sum(len(each) for each in contents if isinstance(each, list))
        if found > MAX_MESSAGES:
            context = {"found": found, "most": MAX_MESSAGES}
            raise PydanticCustomError("shape", "hold {found} messages and parts: give at most {most}", context)
    return value


FewParts = BeforeValidator(_count_parts)
"""For a list of messages."""


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
"""For a union of the forms that a prompt may have."""
