"""``suffix`` of /v1/completions: a model with tokens for it writes what is missing."""

from types import SimpleNamespace

import pytest

from transect.text.fill_in import FORMS, gap_of
from transect.text.number_text import NumberText

SPECIAL = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")


@pytest.fixture
def filling(engine):
    """Tokens 257 to 260: those for gaps, and the beginning of another file. 261: BOS."""
    plain = type(engine.tokenizer)

    class Filling(plain):
        vocab_size = 262

        def encode(self, text, add_special_tokens=False, parse_special=False):
            found = [257 + SPECIAL.index(text)] if parse_special and text in SPECIAL else list(text.encode())
            return [261, *found] if add_special_tokens else found

    engine.tokenizer, engine.vocab_size = Filling(), 262
    return engine


async def test_a_gap_is_filled_in(client, filling):
    asked = {"prompt": "ab", "suffix": "yz", "max_tokens": 4, "stop_token_ids": [7], "return_token_ids": True}

    async def prompts(**change):
        answer = await client.post("/v1/completions", json=asked | change)
        assert answer.status_code == 200, answer.text
        return [choice["prompt_token_ids"] for choice in answer.json()["choices"]]

    assert await prompts() == [[261, 257, *b"ab", 258, *b"yz", 259]]
    assert filling.seen[0][1].stop_token_ids == (7, 260)
    several = await prompts(prompt=["", "b"], add_special_tokens=False)
    assert several == [[257, 258, *b"yz", 259], [257, *b"b", 258, *b"yz", 259]]
    assert await prompts(suffix="", add_special_tokens=False) == [[*b"ab"]]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"prompt": [1, 2]}, "prompt", "must be a string or a list of strings"),
        ({"echo": True}, "echo", "cannot be combined"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "cannot be combined"),
        ({"prompt": "x" * 150, "suffix": "y" * 150}, "prompt", "maximum context length is 200"),
        ({"suffix": "y" * 300}, "suffix", "maximum context length is 200"),
        ({"suffix": 5}, "suffix", "string"),
        ({"stop_token_ids": list(range(128))}, "stop_token_ids", "at most 128"),
    ],
)
async def test_what_does_not_go_with_a_suffix(client, filling, change, param, words):
    answer = await client.post("/v1/completions", json={"prompt": "a", "suffix": "b"} | change)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"] and not filling.seen


def test_models_without_such_tokens_fill_in_nothing(engine):
    assert gap_of(engine.tokenizer, add_special=True) is None
    assert gap_of(NumberText(10), add_special=True) is None
    unknown = SimpleNamespace(encode=lambda text, add_special_tokens=False, parse_special=False: [3])
    assert gap_of(unknown, add_special=True) is None
    assert len({form.prefix for form in FORMS}) == len(FORMS)
