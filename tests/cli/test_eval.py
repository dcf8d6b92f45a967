"""``transect eval``: perplexity of files as JSON and as a table, and mistakes in one line."""

import json
from types import SimpleNamespace

import pytest
import torch
from tiny_llm import save_tiny_llm

from transect.cli import main


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["eval", *map(str, arguments)])
    said = capsys.readouterr()
    return stopped.value.code, said.out, said.err


@pytest.fixture
def model(tmp_path):
    torch.set_num_threads(1)
    folder = tmp_path / "model"
    folder.mkdir()
    save_tiny_llm(folder)
    return folder


def test_texts_alone_and_together(capsys, model, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"Some words that are in file {name}. " * 12)
    files = ("--text", tmp_path / "a", "--text", tmp_path / "b")
    code, out, _ = run(capsys, model, *files, "--window", 40, "--dtype", "float32", "--no-native", "--json")
    found = json.loads(out)["text"]
    assert code == 0 and len(found) == 3
    a, b = found[str(tmp_path / "a")], found[str(tmp_path / "b")]
    assert found["all"]["tokens"] == a["tokens"] + b["tokens"]
    bits = a["bits_per_byte"] * a["bytes"] + b["bits_per_byte"] * b["bytes"]
    assert found["all"]["bits_per_byte"] == pytest.approx(bits / found["all"]["bytes"])
    code, out, _ = run(capsys, model, "--text", tmp_path / "a", "--window", 40, "--dtype", "float32", "--no-native")
    assert code == 0 and f"{a['perplexity']:.4f}" in out


def test_mistakes_are_one_line(capsys, model, tmp_path):
    capsys.readouterr()  # what saving the model says
    for arguments, message in (
        ((model,), "--text FILE, or --tasks"),
        ((model, "--text", tmp_path / "none"), "there is no file"),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2 and message in err and len(err.splitlines()) == 1


def test_formats_side_by_side(capsys, model, tmp_path):
    """A row for each format; fewer bits for the rounded ones, intervals around their perplexities, and a picture."""
    (tmp_path / "a").write_text("Some words that are in file a. " * 12)
    files = ("--text", tmp_path / "a", "--window", 40, "--dtype", "float32", "--plot", tmp_path / "p.png")
    code, out, _ = run(capsys, model, *files, "--formats", "plain,int8,fp8", "--json")
    rows = {row["format"]: row for row in json.loads(out)}
    assert code == 0 and list(rows) == ["plain", "int8", "fp8"] and (tmp_path / "p.png").stat().st_size > 1000
    for row in rows.values():
        assert row["low"] < row["perplexity"] < row["high"] and row["tokens_per_second"] > 0
    assert rows["int8"]["bits"] < rows["plain"]["bits"] and rows["fp8"]["megabytes"] < rows["plain"]["megabytes"]
    assert rows["int8"]["perplexity"] == pytest.approx(rows["plain"]["perplexity"], rel=0.1)
    code, _, err = run(capsys, model, *files, "--formats", "int3")
    assert code == 2 and "--formats knows plain, int4, fp8, int8" in err
    code, _, err = run(capsys, model, *files, "--formats", "plain", "--adapter", "a", "--quantization", "int8")
    assert code == 2 and "--adapter, --quantization has no effect with --formats" in err
    plain = ("--formats", "plain", "--kv-cache-dtype", "int8", "--no-native", "--max-model-len", 64, "--json")
    (row,) = json.loads(run(capsys, model, *files, *plain)[1])
    assert "torch" in row["kernels"] and row["perplexity"] != rows["plain"]["perplexity"]


def test_formats_that_are_written(capsys, model, tmp_path):
    """What ``transect quantize`` writes, and the same calibrated: the bits are those of the files."""
    (tmp_path / "a").write_text("Some words that are in file a. " * 12)
    (tmp_path / "b").write_text("Other words, which are in file b. " * 60)
    files = ("--text", tmp_path / "a", "--window", 40, "--dtype", "float32", "--no-native")
    more = ("--formats", "plain,gptq", "--calibrate", tmp_path / "b", "--calibrate-tokens", 1024, "--json")
    code, out, err = run(capsys, model, *files, *more)
    assert code == 0, err
    rows = {row["format"]: row for row in json.loads(out)}
    assert list(rows) == ["plain", "gptq", "gptq, calibrated"]
    assert rows["gptq"]["bits"] == rows["gptq, calibrated"]["bits"] < 32
    assert len({row["perplexity"] for row in rows.values()}) == 3
    for names, sentence in (("q8_0", "byte-level BPE"), ("int4,q3", "not 'q3'")):
        code, _, err = run(capsys, model, *files, "--formats", names)
        assert code == 2 and sentence in err
    code, _, err = run(capsys, model, *files, "--calibrate", tmp_path / "b")
    assert code == 2 and "--calibrate goes with --formats" in err
    code, _, err = run(capsys, model, *files, "--formats", "plain,fp8", "--calibrate", tmp_path / "b")
    assert code == 2 and "--calibrate changes none of plain, fp8" in err


def test_tasks_without_a_network_say_what_to_do(capsys, model, monkeypatch):
    harness = pytest.importorskip("transect.train.evaluation.harness")

    def offline(**_):
        raise ConnectionError("Couldn't reach 'some/data' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(harness, "TaskManager", lambda **_: SimpleNamespace(all_tasks=["hellaswag"]))
    monkeypatch.setattr(harness, "HarnessModel", lambda llm, name: None)
    monkeypatch.setattr(harness, "simple_evaluate", offline)
    code, _, err = run(capsys, model, "--tasks", "hellaswag", "--dtype", "float32", "--no-native")
    assert code == 2 and "the data of hellaswag cannot be read (Couldn't reach 'some/data'" in err
    assert "$HF_HOME" in err and "--include FOLDER" in err and "this should not happen" not in err
