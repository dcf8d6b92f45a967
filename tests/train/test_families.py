"""Families with something of their own in training: capped logits, no gate."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_checkpoints import make_model
from tiny_llm import save_tiny_llm_text
from training_runs import tiny_run

from transect.train.data.batches import pack
from transect.train.data.tokens import TokenStream
from transect.train.loop.trainer import Trainer
from transect.train.model.build import build, teacher_of
from transect.train.objectives.loss import batch_loss, token_loss

VOCAB, HALF = 300, 20


def saved(folder, family):
    """A tiny model of a family with the tokenizer of the tiny one; returns transformers'."""
    model = make_model(family, vocab_size=VOCAB)
    folder.mkdir()
    model.save_pretrained(folder)
    save_tiny_llm_text(folder)
    return model


def test_gemma_2_has_transformers_loss_and_gradients(tmp_path) -> None:
    theirs = saved(tmp_path / "model", "gemma2")
    trainable = build(tiny_run(tmp_path))
    ids = np.random.default_rng(0).integers(0, VOCAB, 2 * HALF)
    halves = [(0, HALF, False), (HALF, 2 * HALF, False)]
    batch = pack(TokenStream(ids, np.array([HALF, 2 * HALF])), halves)
    cap = trainable.source.config.logit_softcap
    assert cap == 8.0
    ours = batch_loss(trainable.model, batch, token_loss(trainable.device, cap))
    ours.backward()
    rows = torch.from_numpy(ids).view(2, HALF)
    wanted = F.cross_entropy(theirs(rows).logits[:, :-1].reshape(-1, VOCAB), rows[:, 1:].reshape(-1))
    wanted.backward()
    assert ours.item() == pytest.approx(wanted.item(), rel=1e-5)
    for own, their in (
        ("embed.weight", "model.embed_tokens.weight"),
        ("layers.0.attention.k.weight", "model.layers.0.self_attn.k_proj.weight"),
        ("layers.1.mlp.down.weight", "model.layers.1.mlp.down_proj.weight"),
    ):
        found, expected = trainable.model.get_parameter(own).grad[1:], theirs.get_parameter(their).grad[1:]
        torch.testing.assert_close(
            found, expected, atol=1e-5, rtol=1e-3
        )  # row 0 of their table is padding, without one


def test_gemma_2_trains_and_is_saved(tmp_path) -> None:
    saved(tmp_path / "model", "gemma2")
    changes = {"task": "lora", "steps": 2, "optimizer": {"learning_rate": 1e-2}}
    trainer = Trainer(tiny_run(tmp_path, **changes))
    first = trainer.step().loss
    trainer.run()
    assert first > 0 and (tmp_path / "run" / "last" / "adapter_config.json").exists()


def test_what_does_not_know_the_cap_is_refused(tmp_path) -> None:
    saved(tmp_path / "capped", "gemma2")
    capped = str(tmp_path / "capped")
    with pytest.raises(ValueError, match=r'objective = "next_token" alone, not with \'dpo\''):
        build(tiny_run(tmp_path, model=capped, objective="dpo"))
    with pytest.raises(ValueError, match=r"set parallel\.tensor to 1"):
        build(tiny_run(tmp_path, model=capped, parallel={"tensor": 2}))
    with pytest.raises(ValueError, match=r"distill\.teacher .* caps its logits"):
        teacher_of(tiny_run(tmp_path, objective="distill", distill={"teacher": capped}))


def test_adapters_of_gpt_2_by_default(tmp_path) -> None:
    theirs = saved(tmp_path / "model", "gpt2")
    assert isinstance(theirs, transformers.GPT2LMHeadModel)
    trainer = Trainer(tiny_run(tmp_path, task="lora", data={"seq_len": 32}))
    names = {name.split(".")[-2] for name in trainer.trainable.parameters}
    assert names == {"q", "k", "v", "o", "up", "down"}
    assert trainer.step().loss > 0
