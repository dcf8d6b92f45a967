"""Short answers in texts."""

import pytest

from transect.search.extract import extract


@pytest.mark.parametrize(
    ("by", "text", "found"),
    [
        ("auto", "So 3 + 4 = 7. The answer is 7.", "7"),
        ("auto", "The answer is: **Paris**.\nIt has 2 million inhabitants.", "Paris"),
        ("auto", "it is 12 or 1,300.50", "1300.5"),
        ("auto", r"thus \boxed{\frac{1}{2}} and 7", r"\frac{1}{2}"),
        ("auto", "a\nabc\n\n", "abc"),
        ("auto", " \n", None),
        ("number", "minus -3.0 here", "-3"),
        ("number", "none", None),
        ("boxed", "none", None),
        ("boxed", r"\boxed{open", None),
        ("line", "first\n  `last` \n", "last"),
        ("choice", "A or B? I take (C).", "C"),
        ("choice", "Cat", None),
        ("text", " a \n b ", "a b"),
    ],
)
def test_extractors(by, text, found):
    assert extract(text, by) == found
