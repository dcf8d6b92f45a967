"""Redaction: what the built-in rules find and leave, the operator's own rules, long texts and slow rules."""

import itertools
import random
import re

import pytest

from transect.server.capture.redaction import OVERLAP, WINDOW, Redaction, SlowRule, rules_in, windows

SECRETS = {
    "email": ["ann@example.com", "first.last+tag@mail.example.co.uk", "x_y@sub-domain.example.org"],
    "phone": [
        "+49 170 1234567",
        "+1 (415) 555-2671",
        "415-555-2671",
        "(415) 555-2671",
        "0049 30 123456",
        "030/1234567",
    ],
    "card": ["4111 1111 1111 1111", "5500-0000-0000-0004", "340000000000009"],
    "iban": ["DE89 3704 0044 0532 0130 00", "GB82WEST12345698765432"],
    "key": [
        "sk-proj-abcdefghijklmnop1234",
        "sk-ant-api03-abcdefghijklmnopqrst",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "AKIAIOSFODNN7EXAMPLE",
        "hf_abcdefghijklmnopqrstuvwx",
        "xoxb-123456789012-abcdefghij",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabcd\n-----END RSA PRIVATE KEY-----",
    ],
}


@pytest.mark.parametrize(("rule", "secret"), [(rule, each) for rule, found in SECRETS.items() for each in found])
def test_secrets_are_replaced_wherever_they_stand(rule, secret):
    redact = Redaction().text
    for before, after in (("", ""), ("It is ", "."), ("(", ")"), ("Mine: ", ", yours?"), ("\n", "\n")):
        assert redact(before + secret + after) == f"{before}[{rule}]{after}"


@pytest.mark.parametrize(
    "text",
    [
        "Order 4111 1111 1111 1112 arrived.",  # no valid check digit
        "On 2026-11-28 at 12:30:45, version 1.2.3.4 of 2024-01-01",
        "SELECT a FROM b WHERE c = 1234567 AND d = 3.14159265358979",
        "0000000000000000 and 1111111111111111 are masks",
        "me @ work, sk-8 boards, the key is under the mat, 192.168.1.100:8080",
        "x = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]; y = 1e-10; z = 0.001 - 0.002",
    ],
)
def test_other_texts_stay(text):
    assert Redaction().text(text) == text


def test_headers_and_settings():
    redact = Redaction().text
    assert redact("Authorization: Bearer abcdef0123456789abcd") == "Authorization: Bearer [key]"
    assert redact("password=hunter22 next") == "password=[key] next"


def test_structures_keep_their_keys_and_numbers():
    value = {"a@example.com": ["ann@example.com", 3, None, {"deep": ("x ann@example.com",)}], "n": 1.5}
    assert Redaction().value(value) == {"a@example.com": ["[email]", 3, None, {"deep": ["x [email]"]}], "n": 1.5}


def test_secrets_in_long_texts_are_found_at_every_offset():
    draw = random.Random(0)
    redact = Redaction().text
    for _ in range(30):
        filler = ["word", "number 17", "x" * draw.randrange(1, 3 * WINDOW), "line\n"]
        parts = [draw.choice(filler) for _ in range(draw.randrange(1, 60))]
        parts.insert(draw.randrange(len(parts) + 1), "ann@example.com")
        text = " ".join(parts)
        assert redact(text) == text.replace("ann@example.com", "[email]")


def test_windows_cover_every_match_of_the_overlap():
    draw = random.Random(1)
    for _ in range(50):
        text = "".join(draw.choice("ab \n") * draw.randrange(1, 3000) for _ in range(30))
        found = list(windows(text))
        assert found[0][0] == 0 and found[-1][1] == len(text)
        for (_, end), (start, _) in itertools.pairwise(found):
            assert end - start >= OVERLAP


def test_an_operator_adds_rules_and_turns_others_off(tmp_path):
    path = tmp_path / "rules"
    path.write_text("# ours\nticket=TCK-\\d+\n\nphone=\n")
    counts = {}
    redaction = Redaction(rules_in(path), lambda name, count: counts.update({name: count}))
    assert redaction.text("TCK-12 and TCK-13: call +49 170 1234567") == "[ticket] and [ticket]: call +49 170 1234567"
    assert counts == {"ticket": 2}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ticket", "line 1: write NAME=REGEX"),
        ("a=b\nTicket=x", "line 2: write NAME=REGEX"),
        ("a=(", "not a regular expression"),
        ("a=x*", "matches the empty text"),
        ("mail=", "no built-in rule 'mail'"),
    ],
)
def test_bad_rules_are_named(tmp_path, text, problem):
    path = tmp_path / "rules"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(problem)):
        rules_in(path)
    with pytest.raises(ValueError, match="cannot be read"):
        rules_in(tmp_path / "none")


def test_a_slow_rule_is_refused_when_it_is_met():
    times = iter(range(1000))
    redaction = Redaction(clock=lambda: float(next(times)))
    with pytest.raises(SlowRule, match="takes too long"):
        redaction.text("any text with @ and 1 =")
