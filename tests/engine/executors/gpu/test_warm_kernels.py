"""Which steps are run to compile kernels, and that each can be run on padding alone."""

import contextlib
import dataclasses
import gc
from pathlib import Path

import pytest
import torch
from effort import quick_first

from transect.engine.executors.gpu import warm_kernels
from transect.engine.executors.gpu.measure import trial_runner
from transect.engine.executors.gpu.step_sizes import FEWEST_ROWS, ragged_rows, row_bucket, row_buckets, token_bucket
from transect.engine.executors.gpu.warm_kernels import KernelWork, run, tasks
from transect.models.decoder import Decoder
from transect.ops.lang.jit import next_power_of_2
from transect.ops.opset import resolve_ops
from transect.spec.model import ModelConfig

TINY = ModelConfig(
    architecture="llama",
    vocab_size=61,
    dim=32,
    n_layers=1,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    ffn_dim=48,
    max_position=256,
)


def work(seqs, tokens, length, whole_prompts=None):
    return KernelWork(
        config=TINY,
        dtype=torch.float32,
        block_size=16,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        deterministic=False,
        dependent_launch=False,
        fused_operators=True,
        whole_prompts=whole_prompts,
    )


LIMITS = [(256, 8192, 2048), (20, 1024, 256), (3, 48, 64), (1, 16, 32), (300, 300, 100)]


@pytest.mark.parametrize("limits", LIMITS)
def test_every_size_is_run_and_none_is_past_the_limits(limits):
    seqs, tokens, length = limits
    found = tasks(work(*limits))
    assert [task.rows for task in found if task.tokens_each == 1 and not task.draws] == row_buckets(seqs)[::-1]
    assert found[0].draws and found[0].rows == row_buckets(seqs)[0]
    for task in found:
        assert task.tokens_each <= length
        assert task.tokens_each == 1 or task.rows * task.tokens_each <= tokens


@pytest.mark.parametrize(("seqs", "tokens"), quick_first([(64, 2048), (20, 1024), (1, 512), (256, 8192)], 3))
def test_every_table_of_rows_beside_prompts_is_run_with_few_tokens_and_many(seqs, tokens):
    """Kernels that look a token's row up are made for a table's size, some of them anew above 256 tokens."""

    def kind(rows, count):
        return next_power_of_2(rows), count > 256

    found = tasks(work(seqs, tokens, 2048))
    run = {kind(task.rows, task.beside or task.rows * task.tokens_each) for task in found if task.tokens_each > 1}
    for prompts in range(1, seqs + 1):
        room = max(FEWEST_ROWS, row_bucket(prompts))
        for decodes in range(1, seqs - prompts + 1):
            least = 2 * prompts + decodes
            sizes = {*range(least, least + 40), 255, 256, 257, tokens}
            for count in (size for size in sizes if least <= size <= tokens):
                for padded in (-(-count // 16) * 16, token_bucket(count)):
                    assert kind(ragged_rows(padded, room + decodes), padded) in run, (prompts, decodes, padded)


@pytest.mark.parametrize("limits", LIMITS[1:4])
@torch.inference_mode()
def test_each_can_be_run_on_padding_alone(limits):
    seqs, tokens, length = limits
    model = Decoder(TINY, dtype=torch.float32, ops=resolve_ops("cpu")).requires_grad_(False).init_weights()
    for task in tasks(work(*limits)):
        names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
        runner = trial_runner(
            model,
            16,
            torch.float32,
            sample_on_device=task.draws,
            **dict(zip(names, (seqs, tokens, length), strict=True)),
        )
        runner._drawn.token.fill_(-5)
        runner.compile(task.rows, task.tokens_each, task.rows if task.draws or task.tokens_each == 1 else 0)
        drawn = int((runner._drawn.token >= 0).sum())
        assert drawn == (task.rows if task.draws else 0)


@torch.inference_mode()
def test_whole_prompts_behind_decodes_and_alone():
    model = Decoder(TINY, dtype=torch.float32, ops=resolve_ops("cpu")).requires_grad_(False).init_weights()
    found = [task for task in tasks(work(20, 2048, 256, (1536, 96))) if task.prompts]
    assert [(task.rows, task.tokens_each) for task in found] == [(0, 128), (32, 96), (16, 96)]
    runner = trial_runner(model, 16, torch.float32, max_num_seqs=20, max_num_batched_tokens=2048, max_model_len=256)
    inner, seen = runner._model, []

    def noted(tokens, positions, context, places):
        batch = context.batch
        seen.append(
            (context.whole.row, context.whole.token, batch.query_starts.diff().tolist(), batch.seq_lens.tolist())
        )
        return inner(tokens, positions, context, places)

    noted.ops, noted.adapters = inner.ops, inner.adapters
    runner._model = noted
    for task in found:
        runner.compile_whole(task.rows, task.prompts, task.tokens_each)
        lengths = [1] * task.rows + [task.tokens_each] * 16
        assert seen.pop() == (task.rows, task.rows, lengths, lengths)


@pytest.mark.parametrize(
    ("layers", "full", "windows"), [(5, (0, 1, 3), {None, 7}), (3, (), {7}), (2, (0, 1), {None}), (1, (0,), {None})]
)
def test_layers_with_a_window_and_without(layers, full, windows):
    """Qwen2 has both: kernels that only a later layer needs are found too."""
    config = dataclasses.replace(TINY, n_layers=layers, sliding_window=7, full_attention_layers=full)
    ops, seen = resolve_ops("cpu"), set()

    def attention(q, k_cache, v_cache, batch, scale, window=None):
        seen.add(window)
        return ops.paged_attention(q, k_cache, v_cache, batch, scale, window)

    noting = dataclasses.replace(ops, paged_attention=attention)
    settings = dataclasses.replace(work(3, 48, 64), config=config)
    run(settings, noting, torch.device("cpu"), lambda: None)
    assert seen == windows


def test_a_model_without_a_fused_stack():
    config = dataclasses.replace(
        TINY, architecture="gpt2", norm="layernorm", gated_mlp=False, activation="gelu_tanh", position="learned"
    )
    needed = []
    settings = dataclasses.replace(work(3, 48, 64), config=config)
    run(settings, resolve_ops("cpu"), torch.device("cpu"), lambda: needed.append(True))
    assert needed == [True]


class Noting:
    """Compilers that are only told which files to make."""

    needed = 1

    def begin(self, arch, stamps):
        self.stamps = [Path(stamp) for stamp in stamps]

    def submit(self, kernel):
        raise AssertionError("nothing is run")

    all_needed = submit


def test_settings_that_no_kernel_depends_on_are_noted_too(monkeypatch, tmp_path):
    """So that the next start with them does not prepare to compile."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warm_kernels, "INTERPRETED", False)
    monkeypatch.setattr(warm_kernels, "run", lambda *arguments: None)
    monkeypatch.setattr(warm_kernels, "collected", lambda found: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    steps, ops, device = work(3, 48, 64), resolve_ops("cpu"), torch.device("cuda", 0)
    first = Noting()
    assert warm_kernels.start(steps, ops, device, first, "seed 1").collected == 1
    for stamp in first.stamps:
        stamp.touch()
    for settings in ("seed 1", "seed 2"):
        assert warm_kernels.start(steps, ops, device, Noting(), settings).collected == 0
        assert warm_kernels.hint(settings).exists()


def test_the_pass_gives_its_memory_back_at_once():
    """The KV cache is sized soon afterwards."""

    def models():
        return sum(type(thing) is Decoder for thing in gc.get_objects())

    gc.collect()
    before, needed = models(), []
    gc.disable()
    try:
        run(work(20, 1024, 256), resolve_ops("cpu"), torch.device("cpu"), lambda: needed.append(models()))
        assert needed == [before + 1]
        assert models() == before
    finally:
        gc.enable()
