"""The chat template of a run: one that renders a conversation as a continuation of its beginning.

Training packs a chat into one document, so what stands before an answer must stay as it is when the chat goes on. The
templates of models that think do not do that: they leave the thoughts out of earlier turns. ``REWRITES`` are the
conditions by which the stock templates of such families do so, and what takes their place, so that each answer is
written as the last one would be.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

from ..checkpoints.resolve import ModelSource
from ..text.chat_template import ChatTemplate
from ..text.model_text import special_marks, template_text
from ..text.number_text import NumberText
from ..text.tokenizer import Tokenizer
from .config import DataConfig

REWRITES = (
    (  # Qwen3, QwQ: only answers after the last question keep thoughts, and the last one has a place for them
        ("loop.index0 > ns.last_query_index", "true"),
        ("loop.last or (not loop.last and reasoning_content)", "true"),
    ),
    (  # DeepSeek-R1 and its distilled Qwen and Llama models
        ("content.split('</think>')[-1]", "content"),
        ("content.split('</think>')|last", "content"),
    ),
)
"""By family: what stands in a stock template, and what stands there in the template to train with."""
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
    """The template that ``config`` asks for, with its date; None where the model brings none.

    Args:
        tell: is told where the template is not the model's own.

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
    if config.chat_template == "auto" and config.turns == "together" and not continues(template):
        for family in REWRITES:
            text = template.source
            for stock, kept in family:
                text = text.replace(stock, kept)
            rewritten = template.with_source(text)
            if continues(rewritten):
                tell("the model's chat template drops thoughts of earlier turns; the run keeps those of every turn")
                return rewritten
    return template


def continues(template: ChatTemplate) -> bool:
    """Whether a conversation is rendered as a continuation of its beginning; true where the template refuses to say."""
    try:
        before = template.render(PROBE[:2], add_generation_prompt=False)
        asked = template.render(PROBE[:3], add_generation_prompt=True)
        whole = template.render(PROBE, add_generation_prompt=False)
    except ValueError:
        return True
    return asked.startswith(before) and whole.startswith(asked)
