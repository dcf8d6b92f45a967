"""A byte-level BPE tokenizer written to be read, as the reference for the real one: no cache, no cleverness."""

from __future__ import annotations

from itertools import pairwise

import regex


def byte_alphabet() -> list[str]:
    """The character that stands for each byte, built step by step as GPT-2's description goes."""
    alphabet: list[str] = []
    spare = 256
    for byte in range(256):
        keeps_itself = ord("!") <= byte <= ord("~") or ord("¡") <= byte <= ord("¬") or ord("®") <= byte <= ord("ÿ")
        if keeps_itself:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(spare))
            spare += 1
    return alphabet


class ReferenceBPE:
    """Cut text by the patterns in turn, spell each piece in the byte alphabet (bytes without a token are left out), and
    merge the pair of the best rank until no pair has one."""

    def __init__(self, tokens: list[str], merges: list[str], patterns: list[str], specials: dict[str, int]) -> None:
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.patterns = [regex.compile(pattern) for pattern in patterns]
        self.specials = specials
        self.alphabet = byte_alphabet()

    def representable(self, text: str) -> str:
        """What is left of a text without the bytes that have no token."""
        known = bytes(byte for byte in text.encode() if self.alphabet[byte] in self.ids)
        return known.decode(errors="replace")

    def pieces(self, text: str) -> list[str]:
        parts = [text]
        for pattern in self.patterns:
            cut: list[str] = []
            for part in parts:
                end = 0
                for match in pattern.finditer(part):
                    cut += [part[end : match.start()], match.group()]
                    end = match.end()
                cut.append(part[end:])
            parts = [part for part in cut if part]
        return parts

    def merge(self, symbols: list[str]) -> list[str]:
        while True:
            ranked = [(self.ranks[pair], place) for place, pair in enumerate(pairwise(symbols)) if pair in self.ranks]
            if not ranked:
                return symbols
            _, place = min(ranked)
            symbols = [*symbols[:place], symbols[place] + symbols[place + 1], *symbols[place + 2 :]]

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        if parse_special and self.specials:
            longest_first = sorted(self.specials, key=len, reverse=True)
            parts = regex.split("(" + "|".join(map(regex.escape, longest_first)) + ")", text)
        else:
            parts = [text]
        ids: list[int] = []
        for part in parts:
            if parse_special and part in self.specials:
                ids.append(self.specials[part])
                continue
            for piece in self.pieces(part):
                spelled = [self.alphabet[byte] for byte in piece.encode()]
                ids += [self.ids[symbol] for symbol in self.merge([char for char in spelled if char in self.ids])]
        return ids
