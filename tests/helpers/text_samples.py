"""Strings from many scripts, and strings that are merely awkward: the same ones in every run."""

from __future__ import annotations

import random
import unicodedata

SCRIPTS: dict[str, list[tuple[int, int]]] = {
    "latin": [(0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F)],
    "cyrillic": [(0x400, 0x4FF)],
    "greek": [(0x391, 0x3A1), (0x3A3, 0x3C9)],
    "arabic": [(0x621, 0x64A), (0x64B, 0x652), (0x660, 0x669)],
    "hebrew": [(0x5D0, 0x5EA), (0x5B0, 0x5BD)],
    "devanagari": [(0x904, 0x939), (0x93E, 0x94D), (0x966, 0x96F)],
    "thai": [(0xE01, 0xE3A), (0xE40, 0xE4E), (0xE50, 0xE59)],
    "kana": [(0x3041, 0x3096), (0x30A1, 0x30FA), (0x3001, 0x3003)],
    "han": [(0x4E00, 0x9FA5), (0x20000, 0x20100)],
    "hangul": [(0xAC00, 0xD7A3), (0x1100, 0x1112)],
    "digits": [(0x30, 0x39), (0xB2, 0xB3), (0xBC, 0xBE), (0x2160, 0x2188), (0xFF10, 0xFF19)],
    "punctuation": [(0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E), (0x2010, 0x2027), (0xA1, 0xBF)],
    "emoji": [(0x1F300, 0x1F64F), (0x1F680, 0x1F6C5), (0x2600, 0x26FF)],
    "symbols": [(0x2190, 0x22FF), (0x1D400, 0x1D7CB), (0x20A0, 0x20BF)],
    "combining": [(0x61, 0x7A), (0x300, 0x36F), (0x20D0, 0x20DC)],
    "control": [(0x01, 0x1B), (0x7F, 0x9F)],
}

HANDMADE = [
    "",
    " ",
    "   ",
    "\n",
    "\n\n\n",
    " \n \n  x",
    "\t\tif x:\r\n\t\t\treturn 1\r\n",
    "trailing   ",
    "   leading",
    "a\u00a0b\u2003c\u3000d\u1680e",
    "👨‍👩‍👧‍👦 👩🏽‍🚀 🏳️‍🌈 🇩🇪🇯🇵 1️⃣",
    "e\u0301 n\u0303 ậ ạ\u0302 Å Å",
    "\u200eLTR \u200fRTL \u202eoverride\u202c \u2066isolate\u2069 \ufeffBOM",
    "שלום עולם, مرحبا بالعالم 123 ١٢٣",
    "नमस्ते दुनिया क्षत्रिय",
    "สวัสดีชาวโลก ๑๒๓",
    "你好，世界！こんにちは、ｶﾅ。안녕하세요 각",
    "Здравствуй, мир! Γειά σου Κόσμε",
    "I'm you're we'll they'd it's I've DON'T WE'LL 'tis rock'n'roll O'Neill ’s",
    "3.14159 1,000,000 0x1F 1e-9 2024-11-21T03:49:00Z ½ ² Ⅻ",
    "def f(x: int) -> str:\n    return f'{x!r}'  # ok\n\n\nclass A:\n\tpass\n",
    "SELECT * FROM t WHERE a<>'b' AND c>=1; -- done",
    '{"key": [1, 2.5, null, "\\u00e9\\n"]}',
    "https://example.org/a?b=c&d=%20#frag user@example.org",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "=" * 80 + "\n" + "-" * 33 + " " * 41 + "#",
    "\x00nul\x07bell\x1b[31mred\x1b[0m\x7f\u0085next",
    "\ufffd replacement \ufffe \uffff noncharacters \U0010ffff",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_end|><|im_end|> <|im_end |> <|im_end|",
    "Ġ Ċ ▁ <0x0A> ġ č",
]

_GAPS = [
    "",
    "",
    " ",
    " ",
    " ",
    "  ",
    "\n",
    "\n\n",
    " \n",
    "\t",
    "\r\n",
    "\u00a0",
    "'s ",
    "'LL ",
    ", ",
    ". ",
    "-",
    "/",
    "1",
    "42 ",
]


def assigned(draw: random.Random, low: int, high: int) -> str:
    """A character of this range that has a meaning: on those given one lately, regex engines of two ages disagree."""
    while unicodedata.category(char := chr(draw.randint(low, high))) == "Cn":
        pass
    return char


def samples(count: int, seed: int = 0) -> list[str]:
    """``HANDMADE`` and then random texts, most in one script, some in several; ``count`` in all."""
    draw = random.Random(seed)
    names = list(SCRIPTS)
    texts = list(HANDMADE)
    while len(texts) < count:
        scripts = [draw.choice(names)] if draw.random() < 0.6 else draw.sample(names, 3)
        text = ""
        for _ in range(draw.randint(1, 7)):
            ranges = SCRIPTS[draw.choice(scripts)]
            for _ in range(draw.randint(1, 7)):
                low, high = draw.choice(ranges)
                text += assigned(draw, low, high)
            text += draw.choice(_GAPS)
        texts.append(text)
    return texts[:count]
