"""A tiny model, tiny data and a configuration for training tests."""

import json

import torch
from tiny_llm import save_tiny_llm

from transect.train.config import TrainConfig
from transect.train.data.batches import Batch

TEXT = "".join(f"{i} times {j} is {i * j}. The cat sat on mat {i + j}.\n" for i in range(40) for j in range(12))


def write_text(path):
    path.write_text(TEXT)
    return str(path)


def write_chats(path, count=40):
    with path.open("w") as file:
        for i in range(count):
            messages = [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": f"{i} + {i % 7}?"},
                {"role": "assistant", "content": f"{i + i % 7}" + "!" * (i % 5)},
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "Yes."},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return str(path)


def tiny_run(tmp_path, **changes):
    """A ``TrainConfig`` over a tiny model in ``tmp_path/model`` and text in ``tmp_path/text.txt``.

    The first lines of the text are in ``tmp_path/few.txt``.
    """
    model, text = tmp_path / "model", tmp_path / "text.txt"
    if not model.exists():
        model.mkdir()
        save_tiny_llm(model)
    if not text.exists():
        write_text(text)
        (tmp_path / "few.txt").write_text(TEXT[:2000])
    values = {
        "model": str(model),
        "run_dir": str(tmp_path / "run"),
        "steps": 6,
        "device": "cpu",
        "data": {"train": [str(text)], "seq_len": 64, "micro_batch": 256},
        "optimizer": {"learning_rate": 1e-3},
    }
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) and key in values else value
    return TrainConfig.from_dict(values)


def packed_batch(device):
    """Documents of 5, 1 and 21 tokens below 64; a fifth of the labels are masked."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (27,), generator=generator)
    bounds = torch.tensor([0, 5, 6, 27], dtype=torch.int32)
    labels = torch.where(torch.rand(27, generator=generator) < 0.2, -100, tokens.roll(-1))
    positions = torch.cat([torch.arange(5), torch.arange(1), torch.arange(21)])
    made = Batch(tokens, labels, positions, bounds, int((labels >= 0).sum()), 21)
    return made.to(torch.device(device))
