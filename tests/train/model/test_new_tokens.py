"""A tokenizer that grows, in a folder into which several processes write the same."""

from types import SimpleNamespace

import tokenizers
from tokenizers.models import WordLevel

from transect.train.model import new_tokens


def test_a_file_is_never_missing_while_it_is_written_again(tmp_path, monkeypatch):
    own, folder = tmp_path / "model", tmp_path / "run" / "tokenizer"
    own.mkdir()
    tokenizers.Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(own / "tokenizer.json"))
    source, export = SimpleNamespace(text_folder=own), new_tokens.export_tokenizer

    def write():
        return new_tokens.write_with_tokens(source, ["b", "<|c|>"], folder)

    def exported(source, directory):
        assert read().token_to_id("<|c|>") == 2
        export(source, directory)
        assert read().token_to_id("<|c|>") == 2

    def read():
        return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    assert write() == 3
    (folder / "of an earlier run").touch()
    monkeypatch.setattr(new_tokens, "export_tokenizer", exported)
    assert write() == 3
    assert [path.name for path in folder.iterdir()] == ["tokenizer.json"]
    assert [path.name for path in folder.parent.iterdir()] == ["tokenizer"]
