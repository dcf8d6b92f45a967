"""Adapters that a run trains: in PEFT's hands, taken up again, started from, and on every kind of target."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft_models import logits_of, logits_of_model, make_adapter, peft_logits
from tiny_checkpoints import make_model
from tiny_llm import save_tiny_llm, save_tiny_llm_text
from training_runs import tiny_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from transect.checkpoints.load import load_model
from transect.checkpoints.peft_config import is_adapter
from transect.checkpoints.resolve import resolve
from transect.models.weights.adapted import Adapted
from transect.parallel.world import Solo
from transect.spec.layouts.ranks import RankPlace
from transect.train.config import TrainConfig
from transect.train.loop import checkpoint
from transect.train.loop.strategies.replicated import Replicated
from transect.train.loop.trainer import Trainer
from transect.train.model.build import build

TABLES = {"targets": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "norm"]}
VARIANTS = {
    "lora": {"targets": ["q", "v"]},
    "rslora": {"target_modules": ["all-linear"], "use_rslora": True},
    "dora": {"targets": "all-linear", "dora": True, "r": 2},
    "modules to save": TABLES,
    "tables": {"targets": ["up_proj", "embed_tokens", "lm_head"], "lora_alpha": 4},
    "a pattern": {"targets": [r"model\.layers\.1\..*_proj"], "dropout": 0.2},
}


def logits_here(trainer):
    return logits_of_model(trainer.model)


def run_of(folder, task="lora", tied=False, **settings):
    if tied:
        (folder / "model").mkdir()
        save_tiny_llm(folder / "model", tie_word_embeddings=True)
    return tiny_run(folder, task=task, steps=3, optimizer={"learning_rate": 2e-2}, **settings)


def trained(config):
    trainer = Trainer(config)
    for _ in range(3):
        trainer.step()
    with checkpoint.Writer(config.run_dir, keep=1) as writer:
        writer.save(trainer.snapshot())
    return trainer, checkpoint.list_steps(config.run_dir)[-1]


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_trained_here_has_the_same_logits_in_peft(variant: str, tied: bool, tmp_path) -> None:
    torch.set_num_threads(1)
    config = run_of(tmp_path, tied=tied, lora=VARIANTS[variant])
    trainer, step = trained(config)
    assert is_adapter(step)
    ours = logits_here(trainer)
    plain = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
    assert (ours - plain).abs().max() > 0.01
    torch.testing.assert_close(peft_logits(tmp_path / "model", step), ours, atol=1e-4, rtol=1e-4)
    resumed = Trainer(config, checkpoint.newest(config.run_dir))
    assert resumed.step().loss == trainer.step().loss
    for (name, one), (_, other) in zip(resumed.model.named_parameters(), trainer.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings:UserWarning")
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("gpt2", {"targets": ["q", "v"]}),  # two parts of one module of transformers
        ("phi3", {"dora": True}),
        ("phi3", {"targets": ["k", "up"]}),
        ("phi3", {"targets": ["o"], "modules_to_save": ["qkv_proj", "norm"]}),
        ("llama4_text", {"targets": ["q", "k"]}),  # its rows stand in another order there
        ("smollm2", {"targets": ["head"]}),  # tied
        ("smollm2", {"targets": ["embed"]}),
    ],
)
def test_modules_that_are_not_ours_one_to_one(family: str, lora, tmp_path) -> None:
    torch.set_num_threads(1)
    (tmp_path / "model").mkdir()
    make_model(family, vocab_size=300).float().save_pretrained(tmp_path / "model")
    save_tiny_llm_text(tmp_path / "model")
    config = run_of(tmp_path, lora=lora)
    trainer, step = trained(config)
    ours = logits_here(trainer)
    served = logits_of_model(load_model(resolve(str(step)), dtype="float32", native=False))
    torch.testing.assert_close(served, ours, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(peft_logits(tmp_path / "model", step), ours, atol=1e-4, rtol=1e-4)
    resumed = Trainer(config, checkpoint.newest(config.run_dir))
    assert resumed.step().loss == trainer.step().loss
    started = Trainer(config.changed([f"lora.start={json.dumps(str(step))}"]))
    torch.testing.assert_close(logits_here(started), ours, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lora", [{"targets": ["q", "v"], "dora": True}, {"targets": ["o"], "modules_to_save": ["k"]}])
def test_parts_of_a_module_that_peft_cannot_hold_are_refused_at_once(lora, tmp_path) -> None:
    (tmp_path / "model").mkdir()
    make_model("gpt2", vocab_size=300).save_pretrained(tmp_path / "model")
    save_tiny_llm_text(tmp_path / "model")
    with pytest.raises(
        ValueError, match=r"a part of transformer\.h\.0\.attn\.c_attn\.\w+, .*must name all parts.*: q, k, v"
    ):
        Trainer(run_of(tmp_path, lora=lora))


def test_a_checkpoint_of_an_earlier_version_is_taken_up(tmp_path) -> None:
    torch.set_num_threads(1)
    config = run_of(tmp_path, lora={"rank": 4})
    trainer, step = trained(config)
    found = checkpoint.newest(config.run_dir)
    tensors = dict(found.tensors) | {f"weight/{n}": p.detach() for n, p in trainer.trainable.parameters.items()}
    (step / "adapter_config.json").unlink()  # which earlier versions did not write
    resumed = Trainer(config, checkpoint.Checkpoint(step, found.step, found.state, tensors))
    assert resumed.step().loss == trainer.step().loss


STARTS = (
    {"target_modules": "all-linear", "use_dora": True},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": "all-linear", "init_lora_weights": "pissa"},
)


@pytest.mark.parametrize("kind", STARTS)
def test_a_run_starts_from_an_adapter_of_peft(kind, tmp_path) -> None:
    torch.set_num_threads(1)
    config = run_of(tmp_path)
    expected = make_adapter(tmp_path / "model", tmp_path / "a", **kind)
    config = run_of(tmp_path, lora={"start": str(tmp_path / "a")})
    trainer, step = trained(config)
    assert trainer.trainable.lora.rank == 4
    fresh = Trainer(run_of(tmp_path, lora={"start": str(tmp_path / "a")}, run_dir=str(tmp_path / "other")))
    torch.testing.assert_close(logits_here(fresh), expected, atol=1e-4, rtol=1e-4)
    assert (logits_here(trainer) - expected).abs().max() > 0.01
    torch.testing.assert_close(peft_logits(tmp_path / "model", step), logits_here(trainer), atol=1e-4, rtol=1e-4)
    again = Trainer(run_of(tmp_path, lora={"start": str(tmp_path / "run")}, run_dir=str(tmp_path / "third")))
    torch.testing.assert_close(logits_here(again), logits_here(trainer))


def test_a_run_s_directory_is_a_model_for_the_next_run_and_the_engine(tmp_path) -> None:
    torch.set_num_threads(1)
    trainer, step = trained(run_of(tmp_path, lora={"rank": 4, "dora": True}))
    (tmp_path / "run" / "last").symlink_to(step.name) if not (tmp_path / "run" / "last").exists() else None
    over = Trainer(tiny_run(tmp_path, model=str(tmp_path / "run" / "last"), run_dir=str(tmp_path / "full")))
    torch.testing.assert_close(logits_here(over), logits_here(trainer), atol=1e-4, rtol=1e-4)
    assert resolve(str(step)).adapter is not None


def test_dropout_is_of_the_step_and_only_where_there_is_a_gradient(tmp_path) -> None:
    torch.set_num_threads(1)
    losses = {}
    for name, settings in {
        "none": {},
        "half": {"lora": {"dropout": 0.5}},
        "again": {"lora": {"dropout": 0.5}, "checkpointing": "full"},
    }.items():
        trainer = Trainer(run_of(tmp_path, run_dir=str(tmp_path / name), **settings))
        losses[name] = [trainer.step().loss for _ in range(3)]
        if name == "half":
            torch.testing.assert_close(logits_here(trainer), logits_here(trainer), rtol=0, atol=0)
    assert losses["half"] == losses["again"]
    assert losses["half"][0] == losses["none"][0]  # B is zero
    assert losses["half"][2] != losses["none"][2]


def test_dropout_knows_which_tokens_a_rank_has(tmp_path, monkeypatch) -> None:
    config = run_of(tmp_path, lora={"dropout": 0.5})
    strategy, trainable = Replicated(config, Solo(), print), build(config)
    strategy.mesh = SimpleNamespace(place=RankPlace(0, 0, 0, context=1))
    monkeypatch.setattr(
        "transect.train.loop.strategies.together.parallelize",
        lambda model, *_: SimpleNamespace(model=model, parameters={}),
    )
    strategy.cut(trainable)
    assert {each.dropout.moment.slice for _, each in trainable.model.weights() if isinstance(each, Adapted)} == {1}


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"targets": ["qproj"]}, "did you mean q_proj"),
        ({"targets": ["c_attn"]}, "the model has nothing called c_attn"),
        ({"targets": ["(q"]}, "not a regular expression"),
        ({"r": 4, "rank": 5}, "given twice"),
        ({"dropout": 1.0}, "lora.dropout is a share"),
        ({"targets": ["embed_tokens"], "dora": True}, "DoRA is for matrices"),
        ({"targets": ["lm_head"], "modules_to_save": ["lm_head"]}, "take it out of one of them"),
        ({"start": "nowhere"}, "nowhere has no adapter"),
    ],
)
def test_wrong_settings_say_what_to_change(lora, words: str, tmp_path) -> None:
    with pytest.raises(ValueError, match=words):
        Trainer(run_of(tmp_path, lora=lora))


def test_peft_s_names_are_ours() -> None:
    given = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "use_rslora": True, "use_dora": True}
    given["target_modules"] = "all-linear"
    lora = TrainConfig.from_dict({"model": "m", "lora": given}).lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.rank_stabilized, lora.dora) == (8, 16.0, 0.1, True, True)
    assert lora.targets == ("all-linear",)
    assert json.dumps(TrainConfig.from_dict({"model": "m", "lora": given}).to_dict()["lora"])


def test_adapters_are_in_the_places_that_targets_name(tmp_path) -> None:
    trainer = Trainer(run_of(tmp_path, lora={"targets": [r".*\.0\.mlp\..*", "k_proj"]}))
    adapted = {name for name, weight in trainer.model.weights() if isinstance(weight, Adapted)}
    first = {f"layers.0.mlp.{name}" for name in ("gate", "up", "down")}
    assert adapted == first | {"layers.0.attention.k", "layers.1.attention.k"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings:UserWarning")
def test_new_tokens_have_rows_and_a_tokenizer(tied: bool, tmp_path) -> None:
    torch.set_num_threads(1)
    tokens = ["<tool>", "<|call|>", "<0>"]
    config = run_of(tmp_path, tied=tied, lora={"targets": ["q_proj"]}, new_tokens=tokens)
    trainer, step = trained(config)
    tokenizer = trainer.trainable.tokenizer
    added = [tokenizer.encode(token, parse_special=True) for token in tokens]
    assert added == [[301], [300], [302]] and tokenizer.special_ids >= {300} and 301 not in tokenizer.special_ids
    assert trainer.model.embed.weight.shape == trainer.model.head.weight.shape == (303, 64)
    ours = logits_here(trainer)
    torch.testing.assert_close(peft_logits(tmp_path / "model", step), ours, atol=1e-4, rtol=1e-4)
    assert AutoTokenizer.from_pretrained(step).convert_tokens_to_ids(tokens) == [301, 300, 302]
    found = load_model(resolve(str(step)), dtype="float32", native=False)
    torch.testing.assert_close(logits_here(SimpleNamespace(model=found)), ours, atol=1e-4, rtol=1e-4)
    assert found.config.tied_embeddings == tied
    resumed = Trainer(config, checkpoint.newest(config.run_dir))
    assert resumed.step().loss == trainer.step().loss


def test_new_tokens_of_a_whole_model(tmp_path) -> None:
    torch.set_num_threads(1)
    config = run_of(tmp_path, task="finetune", new_tokens=["<tool>"])
    before = Trainer(config)
    table = before.model.embed.weight
    torch.testing.assert_close(table[300], table[:300].mean(0))
    trainer, step = trained(config)
    theirs = logits_of(AutoModelForCausalLM.from_pretrained(step))
    torch.testing.assert_close(theirs, logits_here(trainer), atol=1e-4, rtol=1e-4)
    assert Trainer(config, checkpoint.newest(config.run_dir)).step().loss == trainer.step().loss
