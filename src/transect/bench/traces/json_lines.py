"""Traces with a JSON object for each request: our own, and those of kvcache-ai/Mooncake.

Ours have ``arrival_s``, ``output_tokens``, and one of ``prompt_tokens`` (a length), ``prompt_token_ids`` or ``prompt``
(text); they may have ``pieces`` (``[[key, tokens], ...]``, see ``Asked``), ``answer`` and ``client``. Mooncake's have
``timestamp`` (milliseconds), ``input_length``, ``output_length`` and ``hash_ids``: one for each 512 tokens of the
prompt, the last for what is left, equal where all tokens up to there are equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..workload import lines
from .asked import Asked, Piece, from_start

HASHED = 512
"""Tokens covered by a hash of Mooncake's."""


def read_lines(path: Path) -> list[Asked]:
    """Read such a file, from its first arrival on.

    Raises:
        ValueError: a line that is not such an object; the message has its number.
    """
    found = []
    for where, line in lines(path):
        try:
            found.append(_mooncake(line) if "timestamp" in line else _own(line))
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"{where}: {error} is missing or of the wrong type: a trace has arrival_s, output_tokens and one of "
                "prompt_tokens, prompt_token_ids, prompt"
            ) from None
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return from_start(found, path)


def write_lines(asked: Iterable[Asked], path: Path) -> None:
    """Write requests as our own lines; prompts that are known are left out."""
    with path.open("w") as file:
        for each in asked:
            line: dict[str, Any] = {
                "arrival_s": round(each.at, 6),
                "prompt_tokens": each.prompt_tokens,
                "output_tokens": each.output_tokens,
            }
            if each.pieces:
                line["pieces"] = [list(piece) for piece in each.pieces]
            line |= {name: value for name in ("answer", "client") if (value := getattr(each, name))}
            file.write(json.dumps(line) + "\n")


def _own(line: dict[str, Any]) -> Asked:
    at, new = float(line["arrival_s"]), _at_least_one(line["output_tokens"])
    if "prompt" in line:
        text = str(line["prompt"])
        return Asked(at, max(1, len(text) // 4), new, prompt=text)
    if "prompt_token_ids" in line:
        ids = tuple(int(token) for token in line["prompt_token_ids"])
        return Asked(at, len(ids), new, prompt=ids)
    pieces = tuple(Piece(str(key), _at_least_one(tokens)) for key, tokens in line.get("pieces", ()))
    names = {name: str(line.get(name, "")) for name in ("answer", "client")}
    return Asked(at, _at_least_one(line["prompt_tokens"]), new, pieces, **names)


def _mooncake(line: dict[str, Any]) -> Asked:
    length = _at_least_one(line["input_length"])
    ids = line.get("hash_ids", ())
    sizes = [min(HASHED, length - HASHED * place) for place in range(len(ids))]
    pieces = tuple(Piece(str(int(each)), size) for each, size in zip(ids, sizes, strict=True) if size > 0)
    return Asked(line["timestamp"] / 1000, length, _at_least_one(line["output_length"]), pieces)


def _at_least_one(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"lengths are whole numbers from 1 on, not {value!r}")
    return value
