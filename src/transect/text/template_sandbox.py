"""The sandbox of chat templates: Jinja's immutable sandbox, with bounds on the growth of a template's values.

A template has no endless loop of its own; what makes it run for ever, or fill the memory, is doubling: nested loops,
recursion, repetition, joins and concatenations, lists in lists, squares. So each rendering has a budget of steps, which
loops, calls and ``range`` draw on, and everything that makes a long text or a large number out of short ones says
before how long it will be. What is left (comparing lists that hold each other many times, say) only a process that can
be ended bounds: ``template_worker.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import do_batch, do_center, do_format, do_indent, do_join, do_replace, do_slice
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 32 * 1024 * 1024
"""Most characters of output; far more than the longest context."""

MAX_STEPS = 5_000_000
"""Most steps of one rendering: iterations of loops and numbers of ``range``; a call counts as CALL steps, and the start
of a loop as LOOP."""
CALL, LOOP = 50, 20

MAX_REPEATED = 1_000_000
"""Largest length of results of ``*``, ``%`` or a power, and of lists."""

MAX_BITS = 65_536
"""Most bits of whole numbers from a product or a power."""

MAX_VALUES = 1_000_000
"""Most values in output or JSON; a value counts once per occurrence."""

MAX_INDENT = 64
"""Largest indent of JSON."""

_BUDGET = "budget of this rendering"
"""Name of the budget among a template's variables; no template can write it."""

_NUMBER = re.compile("[0-9]+")
_NESTED_FIELD = re.compile(r"\{[^}]*\{")


class TemplateRefused(Exception):
    """The template called ``raise_exception``."""


class TemplateLimit(Exception):
    """The template went over one of the bounds of this module."""


class RenderingBudget:
    """The budget of steps of one rendering."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def take(self, steps: int = 1) -> None:
        """Use up steps. Raises TemplateLimit when none are left."""
        self._left -= steps
        if self._left < 0:
            raise TemplateLimit(f"it takes more than {MAX_STEPS} steps")

    def range(self, *bounds: int) -> range:
        """Return a ``range``, whose numbers count as steps."""
        numbers = range(*bounds)
        self.take(len(numbers))
        return numbers


def variables_of_rendering() -> dict[str, Any]:
    """Return the variables that every rendering adds to the template's."""
    budget = RenderingBudget()
    return {_BUDGET: budget, "range": budget.range}


def compile_template(source: str) -> tuple[jinja2.Template, nodes.Template]:
    """Compile a template, ready to render; also return its syntax tree as written.

    Raises:
        jinja2.TemplateSyntaxError: it is not valid Jinja.
    """
    environment = _environment()
    code = environment.compile(_Bounded().visit(environment.parse(source)))
    template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
    return template, environment.parse(source)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with bounds on operators and methods whose results can grow."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _limit(len(left) + len(right), "a concatenation", MAX_CHARACTERS)
        elif operator == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            _limit(len(left) + len(right), "a concatenation")
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int):
                    _limit(len(value) * times, "a repetition")
            if isinstance(left, int) and isinstance(right, int):
                _limit(left.bit_length() + right.bit_length(), "a product (in bits)", MAX_BITS)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _limit(left.bit_length() * max(right, 0), "a power (in bits)", MAX_BITS)
        elif operator == "%" and isinstance(left, str):
            _limit_percent(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        budget = context.get(_BUDGET)
        if budget is not None:
            budget.take(CALL)
        # the sandbox wraps str.format, and keeps the method itself in __wrapped__
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str):
            name = getattr(function, "__name__", "")
            if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
                _limit(_largest([*args, *kwargs.values()]) * (owner.count("\t") + 1), f"str.{name}")
            elif name in ("format", "format_map"):
                _limit(_largest_number(owner), "a field width")
                if _NESTED_FIELD.search(owner):
                    _limit(_largest([*args, *kwargs.values()]), "a field width")
            elif name == "join" and args:
                args = (_limit_join(args[0], owner), *args[1:])
            elif name == "replace" and len(args) >= 2:
                _limit_replace(owner, args[0], args[1])
        return super().call(context, function, *args, **kwargs)


class _Bounded(NodeTransformer):
    """Makes loops draw on the budget, and ``a ~ b``, which Jinja compiles to a plain join, a call of ``_concat``."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_steps")  # type: ignore[arg-type]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno, environment=node.environment), "_concat")


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


@jinja2.pass_context
def _steps(context: Context, values: Any) -> Any:
    """Wrap the values of a loop so that each turn counts as a step."""
    budget = context.get(_BUDGET)
    if budget is None or isinstance(values, (range, jinja2.Undefined)):  # the numbers of a range were steps
        return values
    budget.take(LOOP)
    if hasattr(values, "__len__"):
        budget.take(len(values))
        return values

    def counted() -> Iterator[Any]:
        for value in values:
            budget.take()
            yield value

    return counted()


def _concat(values: list[Any]) -> str:
    texts = [str(_printable(value)) for value in values]
    _limit(sum(len(text) for text in texts), "a concatenation", MAX_CHARACTERS)
    return "".join(texts)


def _limit(size: int, what: str, most: int = MAX_REPEATED) -> None:
    if size > most:
        raise TemplateLimit(f"{what} of {size} is more than the {most} allowed")


def _printable(value: Any) -> Any:
    """Return ``value`` after checking its size, with each part counted as often as it is written."""
    if isinstance(value, (list, tuple, Mapping)):
        _limit_values(value)
    return value


def _limit_values(value: Any) -> None:
    left, characters = MAX_VALUES, MAX_CHARACTERS
    waiting = [iter((value,))]
    while waiting:
        for each in waiting[-1]:
            left -= 1
            if isinstance(each, str):
                characters -= len(each)
            if left < 0 or characters < 0:
                raise TemplateLimit(f"it writes a value of more than {MAX_VALUES} parts or {MAX_CHARACTERS} characters")
            if isinstance(each, Mapping):
                waiting.append(iter([part for item in each.items() for part in item]))
                break
            if isinstance(each, (list, tuple)):
                waiting.append(iter(each))
                break
        else:
            waiting.pop()


def _limit_join(values: Iterable[Any], between: Any) -> list[Any]:
    listed = list(values)
    size = sum(len(each) if isinstance(each, str) else 1 for each in listed)
    _limit(size + len(str(between)) * len(listed), "a join", MAX_CHARACTERS)
    return [_printable(each) for each in listed]


def _limit_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _limit(len(text) + text.count(old) * max(len(new) - len(old), 0), "a replacement", MAX_CHARACTERS)


def _limit_percent(pattern: str, values: Any) -> None:
    """Limit the field widths of ``pattern % values``: those in the pattern, and with ``*`` those among the values."""
    _limit(_largest_number(pattern), "a field width")
    if "*" in pattern:
        _limit(_largest(values if isinstance(values, tuple) else (values,)), "a field width")


def _largest_number(text: str) -> int:
    return max((int(number[:20]) for number in _NUMBER.findall(text)), default=0)


def _largest(values: Iterable[Any]) -> int:
    return max((value for value in values if isinstance(value, int)), default=0)


def _limited_center(value: str, width: int = 80) -> str:
    _limit(width, "the width of center")
    return do_center(value, width)


def _limited_indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    size = width if isinstance(width, int) else len(width)
    _limit(size, "the width of indent")
    _limit(size * (str(text).count("\n") + 1), "an indented text", MAX_CHARACTERS)
    return do_indent(text, width, first, blank)


def _limited_format(pattern: str, *args: Any, **kwargs: Any) -> str:
    _limit_percent(str(pattern), args)
    return do_format(pattern, *args, **kwargs)


@jinja2.pass_eval_context
def _limited_join(eval_context: EvalContext, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    return do_join(eval_context, _limit_join(value, d) if attribute is None else value, d, attribute)


@jinja2.pass_eval_context
def _limited_replace(eval_context: EvalContext, text: str, old: str, new: str, count: int | None = None) -> str:
    _limit_replace(str(text), old, new)
    return do_replace(eval_context, text, old, new, count)


def _limited_batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> Iterator[list[Any]]:
    _limit(linecount, "the length of a batch")
    return do_batch(value, linecount, fill_with)


def _limited_slice(value: Any, slices: int, fill_with: Any = None) -> Iterator[list[Any]]:
    _limit(slices, "the number of slices")
    return do_slice(value, slices, fill_with)


def _limited_string(value: Any) -> str:
    return value if isinstance(value, str) else str(_printable(value))


class _GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[LoopControlExtension, _GenerationBlock],
        cache_size=0,
        finalize=_printable,
    )
    environment.filters.update(
        tojson=_tojson,
        _concat=_concat,
        _steps=_steps,
        center=_limited_center,
        indent=_limited_indent,
        format=_limited_format,
        join=_limited_join,
        replace=_limited_replace,
        batch=_limited_batch,
        slice=_limited_slice,
        string=_limited_string,
    )
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write plain JSON: Jinja's own filter escapes for HTML, which no model was trained on."""
    _limit(indent if isinstance(indent, int) else 0, "the indent of tojson", MAX_INDENT)
    _limit_values(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
