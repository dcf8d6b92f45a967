"""Text to token ids and back, whatever file the tokenizer came in.

Encoding is the work of the `tokenizers` library. Decoding is done here, on bytes, so that decoding all at once and
decoding token by token (``detokenizer.py``) are the same thing by construction.

**Special tokens in text.** A string such as ``<|im_end|>`` may be typed by any user. ``encode`` treats it as ordinary
text unless ``parse_special`` is set. A prompt given as plain text is the caller's own and is parsed
(``engine/frontends/inputs``, as in vLLM and transformers); of a chat only what the template writes is
(``inert.py``), so that no message can open or close a turn. Added tokens that are not special (``<think>`` in Qwen3,
runs of spaces) are text and always recognised.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from .gguf_vocab import read_gguf_vocabulary
from .hf_settings import HFSettings, read_hf_settings
from .inert import Mask
from .number_text import NumberText
from .token_bytes import BYTE_LEVEL, Spelling, spelling_of

if TYPE_CHECKING:
    from ..checkpoints.resolve import ModelSource

LONG = 8192
"""Characters above which a text is encoded by a call that lets other threads run."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """A tokenizer. Safe to share between threads: only caches of immutable values change.

    Attributes:
        vocab_size: the highest token id plus one. A model may have more rows than that, which stand for no text.
        bos_token_id: the token that begins a text, or None.
        eos_token_ids: tokens that end a model's answer; may be several, may be empty.
        special_ids: tokens that are not text and that decoding leaves out by default.
        special_texts: their spellings.
        drops_leading_space: this family puts a space before every text, which decoding takes off again.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        spelling: Spelling = BYTE_LEVEL,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        prefix_ids: tuple[int, ...] = (),
        suffix_ids: tuple[int, ...] = (),
    ) -> None:
        added = backend.get_added_tokens_decoder()
        self._parsing = backend
        self._plain = _without_special(backend, added)
        self._spelling = spelling
        self._added = {index: token.content for index, token in added.items()}
        self._prefix, self._suffix = list(prefix_ids), list(suffix_ids)
        self._bytes: dict[int, bytes] = {}
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.special_texts = tuple(added[index].content for index in sorted(self.special_ids))
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=False) - 1, *added]) + 1
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.drops_leading_space = spelling.leading_space

    @classmethod
    def from_source(cls, source: ModelSource) -> Tokenizer | NumberText:
        """Return the tokenizer that belongs to a resolved model; ``NumberText`` for a shape without tokenizer files.

        Raises:
            ValueError: it is missing, damaged or of a kind that is not supported.
        """
        if source.kind != "shape" and source.text_folder is not None:
            return cls.from_hf(source.text_folder)
        if source.kind == "shape":
            has_one = (source.path / "tokenizer.json").is_file()
            return cls.from_hf(source.path) if has_one else NumberText(source.config.vocab_size)
        return cls.from_gguf(source.gguf.metadata)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer from the metadata of a GGUF file.

        Raises:
            ValueError: see ``read_gguf_vocabulary``.
        """
        vocabulary = read_gguf_vocabulary(metadata)
        return cls(
            vocabulary.backend,
            vocabulary.spelling,
            bos_token_id=vocabulary.bos_token_id,
            eos_token_ids=vocabulary.eos_token_ids,
            prefix_ids=vocabulary.prefix_ids,
            suffix_ids=vocabulary.suffix_ids,
        )

    @classmethod
    def from_hf(cls, directory: str | Path) -> Tokenizer:
        """Load the tokenizer of a model directory: tokenizer.json, and if present tokenizer_config.json,
        special_tokens_map.json, generation_config.json and config.json.

        Raises:
            ValueError: a file is missing or not readable as what it should be; the message names it.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{directory} has no tokenizer.json: save it there with "
                "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(
                f"{path} is not a tokenizer that can be read ({str(error)[:200]}): download it again"
            ) from error
        backend.no_truncation()
        backend.no_padding()
        decoder, cuts = (
            None if part is None else json.loads(part.__getstate__())
            for part in (backend.decoder, backend.pre_tokenizer)
        )
        try:
            spelling = spelling_of(decoder, cuts)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        settings: HFSettings = read_hf_settings(directory)
        bos = None if settings.bos_token is None else backend.token_to_id(settings.bos_token)
        eos = None if settings.eos_token is None else backend.token_to_id(settings.eos_token)
        ends = dict.fromkeys(end for end in (eos, *settings.eos_token_ids) if end is not None)
        return cls(
            backend,
            spelling,
            bos_token_id=settings.bos_token_id if bos is None else bos,
            eos_token_ids=tuple(ends),
        )

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint, equal for tokenizers that encode alike; identifies the tokenizer of a file of token ids."""
        return hashlib.sha256(f"{self._parsing.to_str()}{self._prefix}{self._suffix}".encode()).hexdigest()[:16]

    @cached_property
    def longest_token(self) -> int:
        """Most characters of text in one token."""
        # Spellings have a character for each byte of the text, or for each of its characters.
        return max(map(len, self._parsing.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = False, parse_special: bool = False) -> list[int]:
        """Encode a text to token ids.

        A byte that the vocabulary has no token for is left out, as in llama.cpp (SmolLM2 has none for six control
        characters and for the planes of Unicode that are not in use); an "unknown" token there could be one that ends
        the text.

        Args:
            text: any valid Unicode string.
            add_special_tokens: put around it what the model expects around a text (often BOS, often nothing). False for
                a rendered chat template, which brings its own.
            parse_special: strings that spell a special token become that token; see the module's docstring.

        Raises:
            ValueError: the text holds a lone surrogate, which no UTF-8 text can.
        """
        return self._encode(self._parsing if parse_special else self._plain, text, add_special_tokens)

    def encode_chat(self, text: str, mask: Mask, add_special_tokens: bool = False) -> list[int]:
        """Encode a rendered chat: special tokens in ``text`` become tokens, spellings hidden by ``mask`` become text.

        Raises:
            ValueError: as for ``encode``.
        """
        if not mask:
            return self.encode(text, add_special_tokens, parse_special=True)
        ids = self._encode(self._guarded.backend, mask.show(self._guarded.under_aliases(text)), add_special_tokens)
        return [self._guarded.ids.get(token, token) for token in ids]

    @cached_property
    def _guarded(self) -> _Guarded:
        return _Guarded(self._parsing, {token: self._added[token] for token in self.special_ids})

    def _encode(self, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        try:
            if len(text) < LONG:
                ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                ids = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            found = _LONE_SURROGATE.search(text)
            if found is None:
                raise
            raise ValueError(
                f"the text is not valid Unicode (lone surrogate {found[0]!r} at character {found.start()}): send "
                "well-formed UTF-8"
            ) from error
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(
        self, token_ids: Iterable[int], skip_special_tokens: bool = True, *, continues_text: bool = False
    ) -> str:
        """Decode tokens to text. Bytes that are not UTF-8 become U+FFFD; ids without a token give no text.

        Args:
            token_ids: ids from 0 on.
            skip_special_tokens: leave special tokens out.
            continues_text: the tokens continue other text, so a leading space stays (see ``drops_leading_space``).

        Raises:
            ValueError: an id is negative.
        """
        skipped: frozenset[int] = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(token) for token in token_ids if token not in skipped])
        if self.drops_leading_space and not continues_text:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text (of a special token: its name); b"" for an id without a
        token.

        Raises:
            ValueError: the id is negative.
        """
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._look_up(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """Return a token's own text; a token that holds a part of a character shows U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling in the vocabulary (``<|im_end|>``, ``Ġthe``), or None."""
        found: int | None = self._parsing.token_to_id(token)
        return found

    def _look_up(self, token_id: int) -> bytes:
        if token_id < 0:
            raise ValueError(f"token ids are at least 0, got {token_id}")
        if token_id in self._added:
            return self._spelling.bytes_of(self._added[token_id], literal=True)
        token = self._parsing.id_to_token(token_id) if token_id < self.vocab_size else None
        return b"" if token is None else self._spelling.bytes_of(token)


class _Guarded:
    """A tokenizer that knows special tokens only under secret aliases: their own spellings are text to it.

    Attributes:
        ids: id of an alias to that of the special token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, specials: Mapping[int, str]) -> None:
        added = backend.get_added_tokens_decoder()
        self.backend = _without_special(backend, added)
        secret = secrets.token_hex(16)
        self._aliases = {text: f"<{secret}.{token}>" for token, text in specials.items()}
        self.backend.add_tokens(
            [
                tokenizers.AddedToken(
                    self._aliases[text],
                    lstrip=added[token].lstrip,
                    rstrip=added[token].rstrip,
                    single_word=added[token].single_word,
                    normalized=False,
                )
                for token, text in specials.items()
            ]
        )
        self.ids = {self.backend.token_to_id(self._aliases[text]): token for token, text in specials.items()}
        longest_first = sorted(self._aliases, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)))

    def under_aliases(self, text: str) -> str:
        """Replace each special token's spelling in the text by its alias."""
        return self._spelled.sub(lambda found: self._aliases[found[0]], text)


def _without_special(backend: tokenizers.Tokenizer, added: Mapping[int, tokenizers.AddedToken]) -> tokenizers.Tokenizer:
    """Return a tokenizer over the same model (shared, not copied) that reads spellings of special tokens as plain
    text."""
    plain = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(backend, part) is not None:
            setattr(plain, part, getattr(backend, part))
    plain.add_tokens([added[index] for index in sorted(added)])
    plain.encode_special_tokens = True
    return plain
