"""A model's tokenizer under the names, and with the defaults, of transformers.

``LLM.get_tokenizer()`` gives it. Underneath is ``Tokenizer``; what this class does not have, that has (``token_bytes``,
``special_ids``, ...). Two things differ from transformers: decoding is exact on bytes, and what a chat message says is
never taken for a special token (``inert.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .chat_template import ChatTemplate
from .inert import chat_tokens
from .number_text import NumberText
from .protocols import ChatTemplateLike
from .template_worker import TemplateApart
from .tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class HFTokenizer:
    """Encodes, decodes and renders chats.

    Args:
        tokenizer: of the model.
        template: of the model, if it has one.
    """

    def __init__(self, tokenizer: Tokenizer | NumberText, template: ChatTemplateLike | None) -> None:
        self.tokenizer = tokenizer
        self._template = template

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # before __init__, as copying and unpickling ask
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return self.tokenizer.vocab_size

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, **options: Any
    ) -> dict[str, list[Any]]:
        """Return ``input_ids`` and ``attention_mask`` of a text, or of each of several.

        Raises:
            ValueError: the text cannot be encoded, or an option asks for padding, truncation or tensors.
        """
        _refuse(options)
        many = [text] if isinstance(text, str) else list(text)
        ids: list[Any] = [self.encode(each, add_special_tokens) for each in many]
        masks: list[Any] = [[1] * len(each) for each in ids]
        single = isinstance(text, str)
        return {"input_ids": ids[0] if single else ids, "attention_mask": masks[0] if single else masks}

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Encode a text; spellings of special tokens become those tokens unless ``parse_special`` is off.

        Raises:
            ValueError: the text is not valid Unicode, or the model has no tokenizer.
        """
        return self.tokenizer.encode(text, add_special_tokens, parse_special)

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids.

        Raises:
            ValueError: an id is negative.
        """
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self.tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each of several sequences."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def apply_chat_template(
        self,
        conversation: Messages | Sequence[Messages],
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """Render a conversation, or each of several, as the model sees it.

        Args:
            conversation: messages ``{"role": ..., "content": ...}``.
            tools: given to the template.
            chat_template: a Jinja template in place of the model's.
            add_generation_prompt: end with what opens the assistant's turn.
            tokenize: token ids; False gives the text.
            variables: further variables of the template.

        Raises:
            ValueError: there is no template, or it does not like the messages.
        """
        for name in ("padding", "truncation", "max_length", "return_tensors", "return_dict"):
            _refuse({name: variables.pop(name, None)})
        template = self._template
        if chat_template is not None:
            marks = template or TemplateApart(ChatTemplate("", self.bos_token or "", self.eos_token or ""))
            template = marks.with_source(chat_template)
        if template is None:
            raise ValueError("this model has no chat template: give one as chat_template, or render messages yourself")
        if tools is not None:
            variables["tools"] = list(tools)
        several = bool(conversation) and not isinstance(conversation[0], Mapping)
        results: list[Any] = []
        for messages in conversation if several else [conversation]:
            if tokenize:
                results.append(chat_tokens(template, self.tokenizer, messages, add_generation_prompt, **variables)[1])
            else:
                results.append(template.render(messages, add_generation_prompt, **variables))  # type: ignore[arg-type]
        return results if several else results[0]

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> Any:
        """Return the text of a token, or of each of several."""
        return self.tokenizer.token_text(ids) if isinstance(ids, int) else [self.tokenizer.token_text(i) for i in ids]

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """Return the id of a token by its spelling in the vocabulary, or of each of several; None if there is none."""
        find = self.tokenizer.token_id
        return find(tokens) if isinstance(tokens, str) else [find(token) for token in tokens]

    @property
    def chat_template(self) -> str | None:
        """The model's Jinja template."""
        return None if self._template is None else self._template.source

    @property
    def eos_token_id(self) -> int | None:
        """The first of the tokens that end an answer."""
        return self.tokenizer.eos_token_ids[0] if self.tokenizer.eos_token_ids else None

    @property
    def bos_token(self) -> str | None:
        """Spelling of the token that begins a text."""
        return self._spelling(self.tokenizer.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """Spelling of the first of the tokens that end an answer."""
        return self._spelling(self.eos_token_id)

    @property
    def all_special_ids(self) -> list[int]:
        """Tokens that are not text."""
        return sorted(self.tokenizer.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """Spellings of tokens that are not text."""
        return list(self.tokenizer.special_texts)

    def _spelling(self, token: int | None) -> str | None:
        return None if token is None else self.tokenizer.token_text(token)


def _refuse(options: Mapping[str, Any]) -> None:
    """Refuse options that would change the result and are not supported: padding, truncation, tensors."""
    for name, value in options.items():
        if value not in (None, False):
            raise ValueError(f"{name}={value!r} is not possible here: the tokenizer gives plain lists of token ids")
