"""What an engine on a GPU is made of."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from transect.checkpoints.resolve import resolve
from transect.costs.storage import Storage
from transect.engine.config import EngineConfig
from transect.engine.executors.gpu import setup
from transect.engine.executors.gpu.build import build_gpu
from transect.engine.executors.gpu.load import check_triton_cache
from transect.engine.scheduling.batch import Draw, ScheduledBatch, ScheduledRow
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.hardware.targets import PROCESSOR
from transect.ops import opset
from transect.ops.opset import OpSet, resolve_ops
from transect.spec.shapes import PRESETS


@pytest.mark.parametrize(
    ("capability", "hip", "deterministic", "dependent_launch", "streams", "told"),
    [
        ((9, 0), None, False, True, True, True),
        ((9, 0), None, True, True, False, True),
        ((9, 0), None, False, False, False, False),
        ((8, 0), None, False, True, True, False),
        ((8, 9), None, True, True, False, False),
        ((9, 4), "6.3", False, True, False, False),  # an MI300X, whose number means something else
    ],
)
def test_launches_are_dependent_on_hopper_and_norms_in_products_unless_batches_may_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    hip: str | None,
    deterministic: bool,
    dependent_launch: bool,
    streams: bool,
    told: bool,
) -> None:
    def write(*, dependent_launch: bool) -> bool:
        return dependent_launch

    def of_the_cpu(device: Any, backends: Any, *, batch_invariant: bool) -> OpSet:
        assert batch_invariant == deterministic
        return replace(resolve_ops("cpu"), kv_cache_write=write)

    monkeypatch.setattr(setup, "resolve_ops", of_the_cpu)
    own = replace(PROCESSOR, name="gfx942") if hip else replace(PROCESSOR, name="a GPU", capability=capability)
    monkeypatch.setattr("transect.hardware.device.own_target", lambda device: own)
    ops = setup.gpu_ops(torch.device("cuda", 0), deterministic=deterministic, dependent_launch=dependent_launch)
    assert (ops.stream_products is not None) == streams
    assert ops.kv_cache_write() == told


def test_where_triton_can_keep_nothing_it_is_said_before_the_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert triton.knobs.cache.dir == str(tmp_path / "file" / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="set TRITON_CACHE_DIR"):
        build_gpu(EngineConfig(model="x"), None, torch.device("cuda", 0))  # type: ignore[arg-type]


def test_a_triton_cache_that_may_only_be_read_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    check_triton_cache()
    assert caplog.text.count("set TRITON_CACHE_DIR") == 1


def test_torch_has_no_graphs_nor_padding_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its paged attention asks the device for lengths, which a capture does not allow, and every token has a row."""
    monkeypatch.setattr(opset, "_target", lambda device: "sm_75")
    config = EngineConfig(model="x")
    ops = resolve_ops("cpu", ("triton", "torch"))
    assert setup.by_torch(ops)
    assert setup.without_graphs(config, ops).cuda_graphs == "off"
    assert caplog.text.count("without CUDA graphs") == 1 and "triton does not run on sm_75" in caplog.text
    kernels = replace(ops, chosen=(("paged_attention", "triton"),))
    assert setup.without_graphs(config, kernels) == config
    own = replace(PROCESSOR, name="sm_75", capability=(7, 5))
    monkeypatch.setattr("transect.hardware.device.own_target", lambda device: own)
    model, device = PRESETS["qwen3-0.6b"], torch.device("cuda", 0)
    tricks = [setup.runner_tricks(config, model, torch.bfloat16, device, o) for o in (ops, kernels)]
    assert [each["pad_tokens"] for each in tricks] == [1, None]
    assert [each["copy_kernels"] for each in tricks] == [False, True]


@pytest.mark.parametrize(
    ("capability", "hip", "dtype", "deterministic", "fine"),
    [
        ((9, 0), None, torch.bfloat16, False, True),
        ((9, 0), None, torch.bfloat16, True, True),
        ((9, 0), None, torch.float32, False, False),
        ((8, 0), None, torch.bfloat16, False, False),
        ((9, 0), "6.3", torch.bfloat16, False, False),  # an MI250X
    ],
)
def test_batches_have_fine_sizes_where_products_take_any(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    hip: str | None,
    dtype: torch.dtype,
    deterministic: bool,
    fine: bool,
) -> None:
    own = replace(PROCESSOR, name="gfx90a") if hip else replace(PROCESSOR, name="a GPU", capability=capability)
    monkeypatch.setattr("transect.hardware.device.own_target", lambda device: own)
    config = EngineConfig(model="x", deterministic=deterministic)
    device = torch.device("cuda", 0)
    tricks = setup.runner_tricks(config, PRESETS["qwen3-0.6b"], dtype, device, resolve_ops("cpu"))
    assert tricks["fine_rows"] == fine


def test_steps_of_large_models_are_filled_up_where_that_is_asked_for() -> None:
    half = Storage(linear=16, embed=16, head=16, norm=16, activation=16, kv=16)

    def tokens(model: str, **settings: Any) -> int | None:
        return setup.fill_tokens(EngineConfig(model=model, **settings), PRESETS[model], half)

    assert tokens("llama-3.1-8b", mixed_step_limit="fill") == tokens("qwen3-8b", mixed_step_limit="fill") == 256
    assert tokens("llama-3.1-8b", mixed_step_limit="fill", max_num_seqs=300) == 512
    assert tokens("llama-3.1-8b", mixed_step_limit="fill", max_num_seqs=16) == 256
    assert tokens("qwen3-0.6b", mixed_step_limit="fill") is None
    for settings in (
        {},
        {"mixed_step_limit": "full"},
        {"mixed_step_limit": "1024tokens"},
        {"mixed_step_limit": "fill", "batching": "static"},
        {"mixed_step_limit": "fill", "max_num_seqs": 64, "max_num_batched_tokens": 256},
    ):
        assert tokens("llama-3.1-8b", **settings) is None


SHAPE = {"model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
         "rms_norm_eps": 1e-6}  # fmt: skip


def allocate(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    """From now on torch says that so many bytes are given out, and from the second time on 2 MiB more."""
    asked: list[None] = []

    def memory_allocated(*device: torch.device) -> int:
        asked.append(None)
        return before if len(asked) == 1 else before + (2 << 20)

    monkeypatch.setattr(torch.cuda, "memory_allocated", memory_allocated)


@pytest.fixture
def made_up_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The processor in the place of a GPU of 64 MiB, of which torch allocates 2 for the model; the largest step takes 3
    more."""
    pytest.importorskip("triton")
    for name, answer in (
        ("init", None),
        ("mem_get_info", (60 << 20, 64 << 20)),
        ("max_memory_allocated", 5 << 20),
        ("reset_peak_memory_stats", None),
        ("get_device_capability", (8, 9)),
        ("get_device_name", "a GPU"),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *device, answer=answer: answer)
    allocate(monkeypatch, 0)
    monkeypatch.setattr(setup, "gpu_ops", lambda *device, **settings: resolve_ops("cpu"))
    return torch.device("cpu")


def test_the_start_sets_up_loads_measures_sizes_and_captures(made_up_gpu: torch.device, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    config = EngineConfig(model=str(tmp_path), load_format="dummy", dtype="float32", max_num_seqs=3, max_model_len=64)
    source = resolve(config.model, load_format="dummy")
    made = build_gpu(config, source, made_up_gpu)
    assert made.size.max_model_len == 64 and made.size.num_blocks == 3 * 64 // config.block_size
    assert made.fill_tokens is None and made.description == "torch's operators on a GPU in float32, CUDA graphs off"
    *account, times = made.report
    assert account[0].split("GiB")[1].strip() == "other programs and the CUDA context"
    parts = [part.rsplit(" ", 2)[0] for part in times.removeprefix("start-up: ").split(", ")]
    assert parts == ["CUDA", "weights", "kernels from the cache", "dry run", "KV cache"]
    draw = Draw(0, 0, 0, SamplingParams(temperature=0.0), (1, 2, 3), [])
    row = ScheduledRow(0, 0, 3, (1, 2, 3), [], [0], (draw,))
    assert len(made.runner.submit(ScheduledBatch(0, (row,))).result().tokens) == 1


def test_what_another_engine_of_the_process_holds_is_counted_once(
    made_up_gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    config = EngineConfig(model=str(tmp_path), load_format="dummy", dtype="float32", max_num_seqs=3, max_model_len=64)
    source = resolve(config.model, load_format="dummy")
    alone = build_gpu(config, source, made_up_gpu)
    allocate(monkeypatch, 24 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (36 << 20, 64 << 20))
    beside = build_gpu(config, source, made_up_gpu)
    assert beside.size == alone.size and beside.report[1:3] == alone.report[1:3]
    assert "rotary table" in beside.report[2] and beside.report[0] != alone.report[0]


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(made_up_gpu: torch.device, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"hidden_size": 4096, "intermediate_size": 8192}))
    config = EngineConfig(model=str(tmp_path), load_format="dummy", dtype="float32")
    source = resolve(config.model, load_format="dummy")
    with pytest.raises(ValueError, match="take a smaller model or dtype='bfloat16'"):
        build_gpu(config, source, made_up_gpu)
