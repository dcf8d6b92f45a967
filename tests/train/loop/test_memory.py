"""The trainer and its memory: which checkpointing it takes, what it refuses, and the allocator's peak on a GPU."""

import gc
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from allocated import allocated_by, shape_of
from effort import quick_first
from tiny_llm import save_tiny_llm
from training_runs import tiny_run

from transect.costs.memory.fit import first_that_fits
from transect.costs.memory.training import training
from transect.spec.shapes import PRESETS
from transect.train.config import OptimizerConfig
from transect.train.loop import memory, trainer
from transect.train.loop.trainer import Trainer
from transect.train.optim import adamw8bit

CPU = torch.device("cpu")
LLAMA_8B = PRESETS["llama-3.1-8b"]


def test_auto_takes_the_first_plan_that_fits(tmp_path):
    config = tiny_run(tmp_path, task="lora", precision="bfloat16", data={"micro_batch": 8192, "seq_len": 1024})
    base = memory.plan_of(config, LLAMA_8B, CPU)
    for kept in ("none", "selective", "full"):
        budget = training(LLAMA_8B, replace(base, checkpointing=kept)).needed
        fitted = memory.fit(config, LLAMA_8B, CPU, free=budget)
        assert fitted.checkpointing == kept
        assert kept in fitted.why and "first plan that fits" in fitted.why


def test_a_run_that_cannot_fit_is_refused_before_anything_is_built(tmp_path, monkeypatch):
    def build(config):
        raise AssertionError("the model was built")

    monkeypatch.setattr(memory, "free_bytes", lambda device: 2**20)
    monkeypatch.setattr(trainer, "build", build)
    with pytest.raises(ValueError, match=r"this run needs .* 1\.0 MiB are free"):
        Trainer(tiny_run(tmp_path))


def test_all_ranks_stay_within_what_the_fullest_of_them_has_free(monkeypatch):
    """Ranks that computed different things again would wait for each other for ever."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 900)
    world = SimpleNamespace(on_host=3, exchange=lambda mine: [mine, 200, None])
    assert memory.least_free(CPU, None) == 900
    assert memory.least_free(CPU, world) == 200
    world.exchange = lambda mine: [mine, 700]
    assert memory.least_free(CPU, world) == 300  # they share one memory
    assert memory.least_free(torch.device("cuda"), world) == 700
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    world.exchange = lambda mine: [mine, None]
    assert memory.least_free(CPU, world) is None


def test_a_plan_that_was_set_is_kept_or_refused(tmp_path):
    config = tiny_run(tmp_path, precision="bfloat16", checkpointing="none", data={"micro_batch": 8192, "seq_len": 1024})
    needed = training(LLAMA_8B, memory.plan_of(config, LLAMA_8B, CPU)).needed
    assert memory.fit(config, LLAMA_8B, CPU, free=needed).checkpointing == "none"
    with pytest.raises(ValueError, match='set checkpointing = "selective"'):
        memory.fit(config, LLAMA_8B, CPU, free=needed - 1)


def test_a_tiny_run_says_what_it_takes(tmp_path):
    made = Trainer(tiny_run(tmp_path))
    assert made.memory.checkpointing == "none"
    assert "free" in made.memory.why
    state = next(t.bytes for t in made.memory.estimate.terms if t.name == "optimizer state")
    assert state == made.optimizer.state_bytes()


def test_eight_bit_moments_do_not_depend_on_how_many_blocks_go_together(monkeypatch):
    def run(chunk):
        monkeypatch.setattr(adamw8bit, "MOMENT_BLOCKS", chunk)
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(73, 91, generator=generator).bfloat16())
        made = adamw8bit.AdamW8bit(OptimizerConfig(name="adamw8bit"), {"w": weight})
        for _ in range(3):
            weight.grad = torch.randn(73, 91, generator=generator).bfloat16()
            made.step()
        return weight.detach(), made.state_tensors()

    whole, states = run(2**14)
    parts, others = run(5)
    assert torch.equal(whole, parts)
    assert all(torch.equal(states[name], others[name]) for name in states)


@pytest.mark.parametrize(
    "mode",
    quick_first(
        [
            {"precision": "mixed", "checkpointing": "selective"},
            {"accumulate": 2, "precision": "bfloat16"},
            {"task": "lora", "checkpointing": "full"},
            {"optimizer": {"name": "adamw8bit"}, "data": {"micro_batch": 256}},
            {"optimizer": {"name": "muon"}, "data": {"micro_batch": 256}},
            {"objective": "dpo", "data": {"train": "pairs"}},
            {"objective": "distill"},
            {},
            {"precision": "bfloat16"},
            {"checkpointing": "full"},
            {"accumulate": 2},
            {"task": "lora"},
            {"task": "lora", "checkpointing": "full", "precision": "bfloat16"},
            {"vocab": 20000},
            {"objective": "distill", "vocab": 20000},
            {"objective": "distill", "task": "lora", "precision": "bfloat16", "vocab": 20000},
        ],
        7,
    ),
    ids=str,
)
def test_the_predicted_peak_is_that_of_a_step_on_the_cpu(tmp_path, mode):
    torch.set_num_threads(1)
    mode = dict(mode)
    vocab = mode.pop("vocab", 2000)
    folder = shape_of(tmp_path, vocab_size=vocab)
    if mode.get("objective") == "distill":
        (tmp_path / "teacher").mkdir()
        save_tiny_llm(tmp_path / "teacher", vocab_size=vocab, max_position_embeddings=1024)
        mode["distill"] = {"teacher": str(tmp_path / "teacher")}
    data = {"seq_len": 256, "micro_batch": 1024, **mode.pop("data", {})}
    if data.get("train") == "pairs":
        data["train"] = [_pairs(tmp_path / "pairs.jsonl")]
    made = Trainer(tiny_run(tmp_path, model=folder, load_format="dummy", data=data, **mode))
    made.step()
    weights = {t.data_ptr(): t.nbytes for t in made.model.state_dict().values()}
    teacher = getattr(made.objective, "_teacher", None)
    before = sum(weights.values()) + made.optimizer.state_bytes()
    before += sum(p.nbytes for p in teacher.parameters()) if teacher is not None else 0
    peak = max(phase.bytes for phase in made.memory.estimate.phases if phase.name != "checkpoint")
    assert peak == pytest.approx(before + allocated_by(made.step), rel=0.10)


MODES = [
    {"task": "pretrain"},
    {"task": "pretrain", "checkpointing": "selective"},
    {"task": "pretrain", "checkpointing": "full"},
    {"task": "pretrain", "accumulate": 2},
    {"task": "pretrain", "precision": "mixed", "checkpointing": "full"},
    {"task": "pretrain", "optimizer": {"name": "adamw8bit"}, "checkpointing": "full"},
    {"task": "pretrain", "optimizer": {"name": "muon"}, "checkpointing": "full"},
    {"task": "lora"},
    {"task": "lora", "checkpointing": "selective"},
    {"task": "qlora", "checkpointing": "full"},
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares with the allocator of a CUDA GPU")
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def test_the_predicted_peak_is_the_allocators(tmp_path, mode):
    text = tmp_path / "long.txt"
    text.write_text("".join(f"{i} and {i * 7 % 1001}. " for i in range(12000)))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    config = tiny_run(
        tmp_path, device="cuda", model=shape_of(tmp_path, **HALF_A_BILLION), load_format="dummy", steps=3,
        **{"precision": "bfloat16", "checkpointing": "none", **mode},
        data={"train": [str(text)], "seq_len": 2048, "micro_batch": 8192},
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    made = Trainer(config)
    made.step()
    made.step()
    measured = torch.cuda.max_memory_allocated() - before
    assert made.memory.estimate.peak == pytest.approx(measured, rel=0.10)


def _pairs(path):
    """Preferences that fill micro-batches of 1024 tokens: 256 for a pair, nearly all of them answers."""
    line = {"prompt": "", "chosen": "yes! " * 20, "rejected": "never " * 17}
    path.write_text("".join(json.dumps({**line, "prompt": f"{i:03}"}) + "\n" for i in range(24)))
    return str(path)


HALF_A_BILLION = {
    "vocab_size": 50304, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip


def test_what_is_left_lets_layers_keep_everything(tmp_path):
    config = tiny_run(tmp_path, task="qlora", precision="bfloat16", data={"micro_batch": 8192, "seq_len": 4096})
    base = replace(memory.plan_of(config, LLAMA_8B, CPU), backend="gpu", merged=True)
    found = first_that_fits(LLAMA_8B, base, 24 * 10**9)
    assert found is not None
    plan, estimate = found
    assert plan.checkpointing == "selective" and 4 <= plan.whole < LLAMA_8B.n_layers
    assert estimate.fits(24 * 10**9)
    assert not training(LLAMA_8B, replace(plan, whole=plan.whole + 1)).fits(24 * 10**9)


def test_offloaded_states_leave_the_device(tmp_path, monkeypatch):
    """A model of 8B in mixed precision has 96 GB of states, and leaves all gradients but a few; the host has them all
    until the processor steps."""
    how = {"precision": "mixed", "data": {"seq_len": 4096, "micro_batch": 8192}}
    monkeypatch.setattr(memory, "free_memory", lambda: 200 * 2**30)
    gpu = torch.device("cuda")
    with pytest.raises(ValueError, match="this run needs"):
        memory.fit(tiny_run(tmp_path, **how), LLAMA_8B, gpu, 60 * 10**9)
    offloaded = tiny_run(tmp_path, parallel={"offload": "optimizer"}, **how)
    fitted = memory.fit(offloaded, LLAMA_8B, gpu, 60 * 10**9)
    assert sum(term.bytes for term in fitted.estimate.host) == (12 + 2) * 8_030_261_248
    monkeypatch.setattr(memory, "free_memory", lambda: 64 * 2**30)
    with pytest.raises(ValueError, match=r"the host's memory .* set parallel\.offload_path"):
        memory.fit(offloaded, LLAMA_8B, gpu, 60 * 10**9)
    on_disk = {"offload": "optimizer", "offload_path": "/mnt/nvme"}
    assert (
        memory.fit(tiny_run(tmp_path, parallel=on_disk, **how), LLAMA_8B, gpu, 60 * 10**9).estimate == fitted.estimate
    )
    monkeypatch.setattr(memory, "free_memory", lambda: 8 * 2**30)  # not for the gradients
    with pytest.raises(ValueError, match=r"the host's memory .* smaller model"):
        memory.fit(tiny_run(tmp_path, parallel=on_disk, **how), LLAMA_8B, gpu, 60 * 10**9)


def test_weights_that_come_layer_by_layer_take_two_of_them(tmp_path, monkeypatch):
    """The states of the run are eight times what the device has."""
    monkeypatch.setattr(memory, "free_memory", lambda: 200 * 2**30)
    how = {"precision": "mixed", "data": {"seq_len": 4096, "micro_batch": 8192}}
    config = tiny_run(tmp_path, parallel={"offload": "all"}, **how)
    fitted = memory.fit(config, LLAMA_8B, torch.device("cuda"), 14 * 10**9)
    assert fitted.checkpointing != "none"
    host = {term.name: term.bytes for term in fitted.estimate.host}
    assert host["weights"] + host["master weights"] + host["optimizer state"] > 8 * 13.5 * 10**9
