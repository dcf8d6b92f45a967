"""The tokenizer and the chat template that data is prepared with."""

import pytest
from tiny_llm import save_tiny_llm

from transect.checkpoints.resolve import resolve
from transect.text.chat_template import ChatTemplate
from transect.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny model's folder, its tokenizer and its template."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(folder)
    source = resolve(str(folder))
    return folder, Tokenizer.from_source(source), ChatTemplate.from_source(source)


@pytest.fixture(scope="session")
def tools(tiny):
    """The tokenizer and the template."""
    return tiny[1:]
