"""Layouts of several axes at once, on four ranks: the command itself, beside one rank."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_llm import save_tiny_llm
from training_runs import write_text

STEPS = 50


def losses(tmp_path, name, **parallel):
    """The losses of a run of the command in a process of its own."""
    file, folder = tmp_path / f"{name}.toml", tmp_path / name
    lines = [f'model = "{tmp_path / "model"}"', f'run_dir = "{folder}"', f"steps = {STEPS}", "accumulate = 4"]
    lines += ['device = "cpu"', "threads = 1", "log_to = []", "[data]", f'train = ["{tmp_path / "text.txt"}"]']
    lines += ["seq_len = 32", "micro_batch = 66", "[optimizer]", "learning_rate = 1e-3", "[parallel]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in parallel.items()]
    file.write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "transect", "train", str(file)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "gradient_norm" in row]


@pytest.mark.prove
def test_fifty_steps_of_every_combination_are_those_of_one_rank(tmp_path):
    (tmp_path / "model").mkdir()
    save_tiny_llm(tmp_path / "model", num_hidden_layers=4, tie_word_embeddings=True)
    write_text(tmp_path / "text.txt")
    one = losses(tmp_path, "one")
    assert len(one) == STEPS
    for name, parallel in {
        "tensor x data": {"tensor": 2, "data": 2, "zero": 2},
        "sequence x data": {"tensor": 2, "sequence": True, "data": 2, "zero": 1},
        "tensor x zero 3": {"tensor": 2, "sequence": True, "data": 2, "zero": 3},
        "pipeline x data": {"pipeline": 2, "data": 2, "schedule": "interleaved", "zero": 1},
        "tensor x pipeline": {"tensor": 2, "sequence": True, "pipeline": 2},
        "context x tensor": {"context": 2, "tensor": 2, "sequence": True},
        "context x pipeline": {"context": 2, "pipeline": 2},
        "context x data": {"context": 2, "data": 2, "zero": 3},
    }.items():
        assert losses(tmp_path, name, **parallel) == pytest.approx(one, abs=1e-5), name
