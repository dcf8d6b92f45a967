"""``transect tune MODEL``: what it measures, shows and keeps, with times that are made up."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from transect.cli import main, tune_model
from transect.hardware.device import own_target
from transect.ops.linear.few_rows import choices, search
from transect.ops.linear.few_rows.choices import Choice

SIZES = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder with a model's sizes, on a GPU that pretends: at 48 rows another kernel than cuBLAS wins."""
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path))
    for name, value in {
        "is_available": True, "current_device": 0, "get_device_name": "A GPU", "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(multi_processor_count=132, major=9, minor=0),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)

    def measured(
        product: search.Product, rows: list[int], multiply: Any, timer: Any, race: Any, *device: Any
    ) -> Iterator[search.ProductTimes]:
        for count in rows:
            before, tiling = Choice("cublas"), search.hopper_tilings(48, 4096, 4096, False)[0]
            best, seconds = (tiling, 8e-6) if count == 48 else (before, 1e-5)
            finals = [search.Final(before, 9e-6, 1e-5), search.Final(tiling, 9e-6, 8e-6)]
            yield search.ProductTimes(product, count, before, 1e-5, best, seconds, 7, finals if race else ())

    monkeypatch.setattr(search, "search", measured)
    monkeypatch.setattr(search, "multiplier", lambda: None)
    caches = (choices.choices, choices.chosen, own_target)
    for cached in caches:
        cached.cache_clear()
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    yield tmp_path
    for cached in caches:
        cached.cache_clear()


def tune(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["tune", *arguments])
    assert stop.value.code == 0


def test_shows_and_keeps(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune(str(model), "--rows", "16,48", "--load", "--json", str(model / "found.json"))
    said = capsys.readouterr().out
    assert "qkv, 64 by 128,  48 rows:    10.0 us (cublas) ->     8.0 us, by hopper: 1.25 times as fast; 7 tried" in said
    assert (
        "gate_up, 64 by 256, with the gate,  16 rows:    10.0 us (cublas) ->    10.0 us; 7 tried, 2 under load" in said
    )
    assert "products of a step of 48 rows: 0.13 -> 0.10 ms (25.0% gained)" in said  # 3 layers of 4, and the head
    kept = json.loads((model / "tuned" / "small_matmul" / "a_gpu.json").read_text())["choices"]
    assert kept["48x128x64"]["by"] == "hopper" and kept["16x128x64"] == {"by": "cublas"}
    written = json.loads((model / "found.json").read_text())["products"]
    assert len(written) == 10 and written[1]["finals"][1]["seconds"] == 8e-6
    assert written[1]["finals"][1]["trial_seconds"] == 9e-6


def test_begins_nothing_after_the_limit(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter(range(100))
    monkeypatch.setattr(tune_model, "time", SimpleNamespace(monotonic=lambda: float(next(times))))
    tune(str(model), "--rows", "16,48", "--seconds", "4", "--no-keep")
    said = capsys.readouterr().out
    assert "7 tried\n" in said and "under load" not in said
    assert "no time was left for o with 48 rows: --seconds" in said and "for head with 16, 48 rows" in said
    assert "products of a step" not in said  # of no number of rows all were measured
    assert not (model / "tuned").exists()
