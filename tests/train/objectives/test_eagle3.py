"""An EAGLE-3 head is trained for a frozen model: its steps are those of drafting, and its checkpoints are served."""

import pytest
import torch
from naive_head import features_of, naive_layer
from safetensors.torch import load_file
from tiny_llm import save_tiny_llm
from training_runs import tiny_run
from transformers import LlamaForCausalLM

from transect import LLM, SamplingParams
from transect.ops.lang.jit import INTERPRETED
from transect.train.loop.checkpoint import newest
from transect.train.loop.trainer import Trainer
from transect.train.objectives import draft_attention
from transect.train.objectives.draft_attention import DraftContext
from transect.train.objectives.head_loss import targets_of

OWN = {"vocabulary": 120, "steps": 3}


def run_of(folder, **changes):
    return tiny_run(folder, **{"objective": "eagle3", "eagle3": OWN, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a model that has learnt its text, so that its answers are like it."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "model").mkdir()
    save_tiny_llm(folder / "model", num_hidden_layers=4)
    config = tiny_run(folder, run_dir=str(folder / "base"), steps=80, optimizer={"learning_rate": 5e-3})
    Trainer(config).run()
    (folder / "model").rename(folder / "random")
    (folder / "base" / "last").resolve().rename(folder / "model")
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    """A finished run, its directory, and the numbers of its steps."""
    config = run_of(
        folder,
        run_dir=str(folder / "long"),
        steps=60,
        data={"validation": [str(folder / "text.txt")]},
        optimizer={"learning_rate": 3e-3},
    )
    trainer, records = Trainer(config), []

    class Listening:
        step = staticmethod(records.append)
        evaluation = staticmethod(records.append)

    trainer.run([Listening()])
    return trainer, records


def test_each_step_is_what_drafting_would_compute(folder):
    """Row i of step k: the features of entries 0 to i, then k of the head's own outputs."""
    trainer = Trainer(run_of(folder, run_dir=str(folder / "none")))
    batch = trainer.objective.batches(0)[0]
    head, model = trainer.trainable.head, trainer.model
    with torch.no_grad():
        targets = targets_of(model, head, batch)
        hidden, context = head.fc(targets.features_TD), DraftContext(batch.cu_seqlens, head.ops)
        steps = []
        for step in range(3):
            ahead = (torch.arange(batch.num_tokens) + 1 + step).clamp(max=batch.num_tokens - 1)
            hidden = head.layer(head.embed(batch.tokens_T[ahead]), hidden, batch.positions_T + step, context)
            steps.append(hidden)
    directory = folder / "written"
    trainer.trainable.snapshot()(directory)
    weights = load_file(directory / "model.safetensors")
    plain = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    begin, end = batch.cu_seqlens[1:3].tolist()
    tokens = batch.tokens_T[begin:end].tolist()
    with torch.no_grad():
        for row in (0, 4, 11):
            features = list(features_of(plain, directory, weights, tokens)[: row + 1])
            for step in range(3):
                entries = torch.tensor(tokens[1 : row + 2 + step])
                output = naive_layer(weights, plain, entries, torch.stack(features))[-1]
                torch.testing.assert_close(steps[step][begin + row], output, atol=2e-4, rtol=2e-4)
                features.append(output)


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
def test_fused_attention_of_drafting_steps_is_that_of_whole_scores(implementation):
    """Results and gradients, of several steps."""
    if implementation == "triton" and not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    torch.manual_seed(3)
    cu_seqlens = torch.tensor([0, 5, 6, 40], dtype=torch.int32)
    inputs = [torch.randn(40, heads, 16, requires_grad=True) for heads in (4, *(6 * (2,)))]
    steps = list(zip(inputs[1:4], inputs[4:], strict=True))
    for count in (1, 3):
        found = []
        for fused in (False, True):
            if fused:
                flat = [k for k, _ in steps[1:count]] + [v for _, v in steps[1:count]]
                kernels = draft_attention.KERNELS[implementation]()
                out = draft_attention._Fused.apply(kernels, cu_seqlens, 0.3, inputs[0], *steps[0], *flat)
            else:
                out = draft_attention.by_document(inputs[0], steps[:count], cu_seqlens, 0.3)
            used = [inputs[0], *(x for step in steps[:count] for x in step)]
            found.append([out, *torch.autograd.grad((out * torch.arange(16.0)).sum(), used)])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_a_trained_head_is_served_and_accepted(folder, trained):
    trainer, records = trained
    assert records[-1].loss < 0.8 * records[0].loss
    assert records[-1].extra["agree_1"] > records[0].extra["agree_1"]
    before = Trainer(run_of(folder, run_dir=str(folder / "none")))
    before.trainable.snapshot()(folder / "untrained")
    shares = []
    for directory in (folder / "untrained", folder / "long" / "last"):
        spec = {"method": "eagle3", "model": str(directory), "adaptive": False, "num_speculative_tokens": 2}
        settings = {"dtype": "float32", "threads": 1, "num_kv_blocks": 60, "max_model_len": 128}
        llm = LLM(str(folder / "model"), speculative_config=spec, **settings)
        prompts = ["3 times 4 is 12. The cat", "9 times 2 is", "The cat sat on mat"]
        llm.generate(prompts, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
        stats = llm.stats()
        shares.append(sum(stats.accepted_at.values()) / stats.drafted_tokens)
    assert shares[1] > shares[0] + 0.05
    assert not any(p.requires_grad for p in trainer.model.parameters())


def test_a_resumed_run_is_the_undisturbed_one(folder):
    whole = Trainer(run_of(folder, run_dir=str(folder / "whole"), steps=4))
    losses = [whole.step().loss for _ in range(4)]
    config = run_of(folder, run_dir=str(folder / "parts"), steps=4)
    first = Trainer(config)
    first.run(should_stop=lambda: first.steps_done == 2)
    again = Trainer(config, newest(config.run_dir))
    assert [again.step().loss for _ in range(2)] == losses[2:]


def test_settings_that_cannot_work_are_refused_by_name(folder):
    for message, changes in {
        'set task to "finetune"': {"task": "lora"},
        "eagle3.steps must be at least 1": {"eagle3": {"steps": 0}},
        "three ascending numbers": {"eagle3": {"layers": [1, 2, 9]}},
        "no config.json": {"eagle3": {"start": str(folder)}},
    }.items():
        with pytest.raises(ValueError, match=message):
            Trainer(run_of(folder, **changes))
