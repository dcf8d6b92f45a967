"""Chat messages to the one string that a model was trained on, by the Jinja template that comes with the model.

A template is a program from a file, so it runs in Jinja's immutable sandbox with bounds on the numbers that let a small
template make a huge text or run for ever: ``range``, repetition, concatenation, powers, field widths, and the output.
Bounded is not proved harmless: serve templates that you trust, and do not take them from requests.

What templates may use is what transformers gives them: ``messages``, ``add_generation_prompt``, ``bos_token``,
``eos_token``, any keyword argument (``tools``, ``documents``, ``enable_thinking`` ...), ``raise_exception(message)``,
``strftime_now(format)``, ``tojson``, ``{% break %}``, ``{% continue %}`` and ``{% generation %}`` blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import do_center, do_format, do_indent
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .chat_messages import normal_messages
from .gguf_vocab import gguf_chat_template
from .hf_settings import read_hf_settings

if TYPE_CHECKING:
    from ..models.resolve import ModelSource

MAX_CHARACTERS = 32 * 1024 * 1024
"""Output at the most; far over the longest context."""

MAX_LOOP_STEPS = 1_000_000
"""Numbers that all calls of ``range`` may give in one rendering."""

MAX_REPEATED = 1_000_000
"""Length at the most of what ``*``, ``%`` or a power makes."""

_NUMBER = re.compile("[0-9]+")
_NESTED_FIELD = re.compile(r"\{[^}]*\{")


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja text.
        bos, eos: the text of the model's special tokens, which templates write out.

    Raises:
        ValueError: the source is not valid Jinja; the message says where.
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        self.source = source
        self._bos, self._eos = bos, eos
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._wants_parts = _reads_parts(tree)
            code = environment.compile(_BoundedConcat().visit(tree))
            self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template is not valid Jinja (line {error.lineno}: {error.message}): correct it, or use "
                "completions, which need none"
            ) from error
        except Exception as error:
            raise ValueError(f"the chat template cannot be compiled ({_describe(error)}): correct it") from error

    @classmethod
    def from_source(cls, source: ModelSource) -> ChatTemplate | None:
        """The template that a resolved model brings; None when it brings none.

        Raises:
            ValueError: it cannot be read or is not valid Jinja.
        """
        if source.kind == "shape" and not (source.path / "tokenizer.json").is_file():
            return None
        return cls.from_gguf(source.gguf.metadata) if source.kind == "gguf" else cls.from_hf(source.path)

    @classmethod
    def from_hf(cls, directory: Path) -> ChatTemplate | None:
        """The template of a directory in Hugging Face layout; None when it has none. Raises as ``from_source``."""
        settings = read_hf_settings(directory)
        template = settings.chat_template
        return None if template is None else cls(template, settings.bos_token or "", settings.eos_token or "")

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> ChatTemplate | None:
        """The template in the metadata of a GGUF file; None when it has none. Raises as ``from_source``."""
        template, bos, eos = gguf_chat_template(metadata)
        return None if template is None else cls(template, bos, eos)

    def with_source(self, source: str) -> ChatTemplate:
        """Another template with the same special tokens.

        Raises:
            ValueError: it is not valid Jinja.
        """
        return ChatTemplate(source, self._bos, self._eos)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The text to encode with ``parse_special=True`` and ``add_special_tokens=False``.

        Args:
            messages: each with a ``role`` and a ``content``: a string, None, or a list of
                ``{"type": "text", "text": ...}`` parts. Other keys (``tool_calls``, ``name``) go to the template.
            add_generation_prompt: end with what opens the assistant's turn.
            kwargs: further variables of the template, such as ``tools``.

        Raises:
            ValueError: the messages are malformed, the template refuses them (its own words are quoted), fails, or
                produces too much.
        """
        variables = {
            "bos_token": self._bos,
            "eos_token": self._eos,
            **kwargs,
            "messages": normal_messages(messages, as_parts=self._wants_parts),
            "add_generation_prompt": add_generation_prompt,
            "range": _LimitedRange(),
        }
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise _TemplateLimit(f"its output is longer than {MAX_CHARACTERS} characters")
                pieces.append(piece)
        except _Refused as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        except _TemplateLimit as error:
            raise ValueError(f"the chat template asks for too much: {error}; correct the template") from error
        except Exception as error:  # a template can raise anything
            raise ValueError(
                f"the chat template fails on these messages ({_describe(error)}): check roles and contents against "
                "what the model's template supports"
            ) from error
        return "".join(pieces)


class _Refused(Exception):
    """The template called ``raise_exception``."""


class _TemplateLimit(Exception):
    """The template went over one of the bounds of this module."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with an eye on the operators that make much out of little."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            _limit(len(left) + len(right), "a concatenation", MAX_CHARACTERS)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int):
                    _limit(len(value) * times, "a repetition")
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _limit(left.bit_length() * max(right, 0), "a power")
        elif operator == "%" and isinstance(left, str):
            _limit_percent(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        # the sandbox wraps str.format, and keeps the method itself in __wrapped__
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str):
            name = getattr(function, "__name__", "")
            if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
                _limit(_largest(args), f"str.{name}")
            elif name in ("format", "format_map"):
                _limit(_largest_number(owner), "a field width")
                if _NESTED_FIELD.search(owner):
                    _limit(_largest([*args, *kwargs.values()]), "a field width")
        return super().call(context, function, *args, **kwargs)


class _BoundedConcat(NodeTransformer):
    """Makes ``a ~ b``, which Jinja compiles to a plain join, a call of ``_concat``."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        values = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(values, "_concat", [], [], None, None, lineno=node.lineno, environment=node.environment)


def _concat(values: list[Any]) -> str:
    texts = [str(value) for value in values]
    _limit(sum(len(text) for text in texts), "a concatenation", MAX_CHARACTERS)
    return "".join(texts)


def _limit(size: int, what: str, most: int = MAX_REPEATED) -> None:
    if size > most:
        raise _TemplateLimit(f"{what} of {size} is more than the {most} allowed")


def _limit_percent(pattern: str, values: Any) -> None:
    """Of ``pattern % values``: the widths written out, and with ``*`` those among the values."""
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
    _limit(width if isinstance(width, int) else len(width), "the width of indent")
    return do_indent(text, width, first, blank)


def _limited_format(pattern: str, *args: Any, **kwargs: Any) -> str:
    _limit_percent(str(pattern), args)
    return do_format(pattern, *args, **kwargs)


class _LimitedRange:
    """``range`` for one rendering; all its calls share one budget, so that nested loops end."""

    def __init__(self) -> None:
        self._left = MAX_LOOP_STEPS

    def __call__(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._left -= len(numbers)
        if self._left < 0:
            raise _TemplateLimit(f"it loops over more than {MAX_LOOP_STEPS} numbers")
        return numbers


class _GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationBlock], cache_size=0
    )
    environment.filters["tojson"] = _tojson
    environment.filters["_concat"] = _concat
    environment.filters.update(center=_limited_center, indent=_limited_indent, format=_limited_format)
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
    """Plain JSON: Jinja's own filter escapes for HTML, which no model was trained on."""
    _limit(indent or 0, "the indent of tojson")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether the template only knows content as a list of parts: it loops over a ``content`` and never asks whether
    something is a string."""
    if any(test.name == "string" for test in tree.find_all(nodes.Test)):
        return False
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return bool(node.arg.value == "content")
    return False
