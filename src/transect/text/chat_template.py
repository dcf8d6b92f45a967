"""Chat messages to the one string that a model was trained on, by the Jinja template that comes with the model.

A template is a program from a file, so it runs in a sandbox (``template_sandbox.py``) with bounds on what lets a small
template make a huge text or run for ever. Bounded is not proved harmless: the server renders in a process that it can
end (``template_worker.py``). Serve templates that you trust, and do not take them from requests.

What templates may use is what transformers gives them: ``messages``, ``add_generation_prompt``, ``bos_token``,
``eos_token``, any keyword argument (``tools``, ``documents``, ``enable_thinking`` ...), ``raise_exception(message)``,
``strftime_now(format)``, ``tojson``, ``{% break %}``, ``{% continue %}`` and ``{% generation %}`` blocks.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import meta, nodes

from .chat_messages import Wants, normal_messages
from .gguf_vocab import gguf_chat_template, gguf_chat_variants
from .hf_settings import read_hf_settings
from .template_sandbox import MAX_CHARACTERS, TemplateLimit, TemplateRefused, compile_template, variables_of_rendering

if TYPE_CHECKING:
    from ..checkpoints.resolve import ModelSource

VARIANTS = {"tool_use": "tools", "rag": "documents"}
"""Names of further templates of a model, each with the variable that selects it."""


class ChatTemplate:
    """Compiled chat template.

    Args:
        source: the Jinja text.
        bos, eos: the text of the model's special tokens, which templates write out.
        day: the day that ``strftime_now`` prints, at midnight; None for the present.
        variants: templates for some conversations, by name: ``tool_use`` if tools are given, ``rag`` if documents are.

    Raises:
        ValueError: the source is not valid Jinja; the message says where.
    """

    def __init__(
        self,
        source: str,
        bos: str = "",
        eos: str = "",
        *,
        day: datetime.date | None = None,
        variants: Mapping[str, str] | None = None,
    ) -> None:
        self.source = source
        self._bos, self._eos, self._day = bos, eos, day
        texts = {name: text for name, text in (variants or {}).items() if name in VARIANTS}
        self._variants = {name: ChatTemplate(text, bos, eos, day=day) for name, text in texts.items()}
        try:
            self._template, tree = compile_template(source)
            self._wants = _wants(tree)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template is not valid Jinja (line {error.lineno}: {error.message}): correct it, or use "
                "completions, which need none"
            ) from error
        except Exception as error:
            raise ValueError(f"the chat template cannot be compiled ({_describe(error)}): correct it") from error

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle the source for another process, which compiles it again."""
        return _again, (self.source, self._bos, self._eos, self._day, self.variants)

    @property
    def variants(self) -> dict[str, str]:
        """The Jinja text of each variant by its name."""
        return {name: template.source for name, template in self._variants.items()}

    @property
    def sources(self) -> str:
        """Jinja text of all templates: everything that a rendering can depend on."""
        return "\0".join([self.source, *self.variants.values()])

    @property
    def tool_source(self) -> str:
        """Jinja text that renders conversations with tools."""
        return self.variants.get("tool_use", self.source)

    @classmethod
    def from_source(cls, source: ModelSource) -> ChatTemplate | None:
        """Return the template of a resolved model; None if it has none.

        Raises:
            ValueError: it cannot be read or is not valid Jinja.
        """
        if source.kind == "shape" and not (source.path / "tokenizer.json").is_file():
            return None
        folder = source.text_folder
        return cls.from_gguf(source.gguf.metadata) if folder is None else cls.from_hf(folder)

    @classmethod
    def from_hf(cls, directory: Path) -> ChatTemplate | None:
        """Return the template of a directory in Hugging Face layout; None if it has none.

        Raises as ``from_source``.
        """
        settings = read_hf_settings(directory)
        template = settings.chat_template
        if template is None:
            return None
        return cls(template, settings.bos_token or "", settings.eos_token or "", variants=settings.chat_variants)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> ChatTemplate | None:
        """Return the template in the metadata of a GGUF file; None if it has none. Raises as ``from_source``."""
        template, bos, eos = gguf_chat_template(metadata)
        return None if template is None else cls(template, bos, eos, variants=gguf_chat_variants(metadata))

    def with_source(self, source: str) -> ChatTemplate:
        """Return another template with the same special tokens and day.

        Raises:
            ValueError: it is not valid Jinja.
        """
        return ChatTemplate(source, self._bos, self._eos, day=self._day)

    def dated(self, day: datetime.date) -> ChatTemplate:
        """Return the same template with ``day`` as today's date."""
        return ChatTemplate(self.source, self._bos, self._eos, day=day, variants=self.variants)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """Return the text to encode with ``parse_special=True`` and ``add_special_tokens=False``.

        Args:
            messages: each with a ``role`` and a ``content``: a string, None, or a list of
                ``{"type": "text", "text": ...}`` parts. Other keys (``tool_calls``, ``name``) go to the template.
            add_generation_prompt: end with what opens the assistant's turn.
            kwargs: further variables of the template, such as ``tools``.

        Raises:
            ValueError: the messages are malformed, the template refuses them (its own words are quoted), fails, or
                produces too much.
        """
        for name, field in VARIANTS.items():
            if name in self._variants and kwargs.get(field):
                return self._variants[name].render(messages, add_generation_prompt, **kwargs)
        variables = {
            "bos_token": self._bos,
            "eos_token": self._eos,
            **({} if self._day is None else {"strftime_now": self._day.strftime}),
            **kwargs,
            "messages": normal_messages(messages, self._wants),
            "add_generation_prompt": add_generation_prompt,
            **variables_of_rendering(),
        }
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise TemplateLimit(f"its output is longer than {MAX_CHARACTERS} characters")
                pieces.append(piece)
        except TemplateRefused as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        except TemplateLimit as error:
            raise ValueError(f"the chat template asks for too much: {error}; correct the template") from error
        except Exception as error:  # a template can raise anything
            raise ValueError(
                f"the chat template fails on these messages ({_describe(error)}): check roles and contents against "
                "what the model's template supports"
            ) from error
        return "".join(pieces)


def _again(source: str, bos: str, eos: str, day: datetime.date | None, variants: Mapping[str, str]) -> ChatTemplate:
    return ChatTemplate(source, bos, eos, day=day, variants=variants)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _wants(tree: nodes.Template) -> Wants:
    tests = [(test.name, test.node) for test in tree.find_all(nodes.Test)]
    printed = [
        each
        for kind in (nodes.Add, nodes.Concat, nodes.Output)
        for found in tree.find_all(kind)
        for each in found.iter_child_nodes()
    ]
    return Wants(
        parts=_reads_parts(tree, {name for name, _ in tests}),
        argument_text=any(_is_part(each, "arguments") for each in printed)
        and not any(name in ("string", "mapping") and _is_part(node, "arguments") for name, node in tests),
        none=any(name == "none" and _is_part(node, "content") for name, node in tests),
        thinking=any(
            _is_part(each, "thinking") for kind in (nodes.Getattr, nodes.Getitem) for each in tree.find_all(kind)
        ),
    )


def _reads_parts(tree: nodes.Template, tests: set[str]) -> bool:
    """Return True if the template accepts content only as a list of parts: it loops over ``content`` and never tests
    for a string."""
    return "string" not in tests and any(_is_part(loop.iter, "content") for loop in tree.find_all(nodes.For))


def _is_part(node: nodes.Node, name: str) -> bool:
    """Return True if an expression reads the part with this name of another value."""
    if isinstance(node, nodes.Getattr):
        return node.attr == name
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and bool(node.arg.value == name)
