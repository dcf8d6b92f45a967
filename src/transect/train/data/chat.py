"""Choose the chat template of a run, one that only appends to a conversation as it grows if possible.

Training packs a chat into one document, so the text before an answer must not change when the chat grows. The
templates of reasoning models drop the thoughts of earlier turns, and Phi-3's closes every conversation with a
token. ``REWRITES`` are the conditions by which the stock templates of such families do so, and their replacements, so
that each answer is written as the last one would be. A template without a rewrite (gpt-oss ends only the last answer
with ``<|return|>``) gives a document for each answer: ``data.turns``.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable

from ...checkpoints.resolve import ModelSource
from ...text.chat_template import ChatTemplate
from ...text.model_text import special_marks, template_text
from ...text.number_text import NumberText
from ...text.tokenizer import Tokenizer
from ..config import DataConfig

THOUGHTS = "the model's chat template drops thoughts of earlier turns; the run keeps those of every turn"
CLOSING = "the model's chat template ends every conversation with a token; the run leaves it out after an answer"
REWRITES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (  # Qwen3, QwQ: only answers after the last question keep thoughts, and the last one has a place for them
        THOUGHTS,
        (
            (re.escape("loop.index0 > ns.last_query_index"), "true"),
            (re.escape("loop.last or (not loop.last and reasoning_content)"), "true"),
        ),
    ),
    (  # DeepSeek-R1 and its distilled Qwen and Llama models
        THOUGHTS,
        (
            (re.escape("content.split('</think>')[-1]"), "content"),
            (re.escape("content.split('</think>')|last"), "content"),
        ),
    ),
    (  # Phi-3, Phi-3.5, Phi-4-mini: the end-of-text token in place of the header of an answer
        CLOSING,
        ((r"\{%-?\s*else\s*-?%\}\s*\{\{-?\s*eos_token\s*-?\}\}(\s*\{%-?\s*endif\s*-?%\}\s*)$", r"\1"),),
    ),
)
"""Rewrites by family: a line for the log, and patterns of a stock template with their replacements."""
PROBE = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "<think>\ne\n</think>\n\nf"},
]


def run_template(
    source: ModelSource,
    tokenizer: Tokenizer | NumberText,
    config: DataConfig,
    tell: Callable[[str], None] = lambda said: None,
) -> ChatTemplate | None:
    """Return the template that ``config`` asks for, with its date; None if the model has none.

    Args:
        tell: receives a message if the template is not the model's own.

    Raises:
        ValueError: a template cannot be read or is not valid Jinja.
    """
    template = ChatTemplate.from_source(source)
    if config.chat_template not in ("auto", "model"):
        marks = template or ChatTemplate("", *special_marks(tokenizer))
        template = marks.with_source(template_text(config.chat_template))
    if template is None:
        return None
    if config.date:
        template = template.dated(datetime.date.fromisoformat(config.date))
    if config.chat_template == "auto" and config.turns != "apart" and not continues(template):
        for told, family in REWRITES:
            text = template.source
            for stock, kept in family:
                text = re.sub(stock, kept, text)
            rewritten = template.with_source(text)
            if continues(rewritten):
                tell(told)
                return rewritten
    return template


def continues(template: ChatTemplate) -> bool:
    """Return True if the template renders a conversation as a continuation of its beginning, or refuses the probe."""
    try:
        before = template.render(PROBE[:2], add_generation_prompt=False)
        asked = template.render(PROBE[:3], add_generation_prompt=True)
        whole = template.render(PROBE, add_generation_prompt=False)
    except ValueError:
        return True
    return asked.startswith(before) and whole.startswith(asked)
