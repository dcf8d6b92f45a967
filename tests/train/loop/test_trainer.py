"""The training loop: the same losses as transformers with torch's AdamW, and runs that go on to the last bit."""

import itertools
import json
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from effort import proving, quick_first
from safetensors.torch import load_file, save_file
from tiny_llm import save_tiny_llm
from training_runs import tiny_run, write_chats

from transect.train.config import TrainConfig
from transect.train.data.identity import check_settings
from transect.train.data.loader import Loader, Position
from transect.train.data.tokenize import tokenize
from transect.train.loop import checkpoint
from transect.train.loop.health import LossWatch, TrainingStopped
from transect.train.loop.trainer import Trainer, _dated


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def losses(trainer, steps):
    return [trainer.step().loss for _ in range(steps)]


def test_the_loss_curve_is_that_of_transformers_with_torch(tmp_path) -> None:
    steps = 200 if proving() else 80
    config = tiny_run(
        tmp_path, steps=steps, optimizer={"weight_decay": 0.0, "clip": 1.0}, data={"seq_len": 32, "micro_batch": 128},
        schedule={"kind": "cosine", "warmup": 10, "final": 0.1},
    )  # fmt: skip
    trainer = Trainer(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    mirror = Loader(trainer.objective.loader.stream, config.data, config.seed)
    ours, theirs = [], []
    for _ in range(steps):
        batch = next(mirror)  # windows of the file's one document, all of the same length: rows
        record = trainer.step()
        rows, labels = batch.tokens_T.view(-1, 32), batch.labels_T.view(-1, 32)
        logits = model(rows).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = record.learning_rate
        optimizer.step()
        ours.append(record.loss)
        theirs.append(loss.item())
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-3
    assert ours[-1] < ours[0] - 1  # it learned something


def test_accumulating_micro_batches_is_one_large_batch(tmp_path) -> None:
    whole = Trainer(tiny_run(tmp_path, data={"micro_batch": 512}))
    parts = Trainer(tiny_run(tmp_path, accumulate=2, data={"micro_batch": 256}))
    for a, b in zip(losses(whole, 3), losses(parts, 3), strict=True):
        assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.parametrize("plan", ["selective", "full"])
def test_recomputing_activations_changes_no_bit(tmp_path, plan: str) -> None:
    kept = losses(Trainer(tiny_run(tmp_path, checkpointing="none")), 4)
    assert losses(Trainer(tiny_run(tmp_path, checkpointing=plan)), 4) == kept


WAYS = [("finetune", "float32"), ("finetune", "mixed"), ("finetune", "bfloat16"), ("lora", "float32")]


@pytest.mark.parametrize(
    ("name", "way"),
    quick_first(
        itertools.product(["adamw", "adamw8bit", "lamb", "muon"], WAYS),
        [*(("adamw", way) for way in WAYS), ("adamw8bit", WAYS[2]), ("lamb", WAYS[1]), ("muon", WAYS[1])],
    ),
)
def test_a_resumed_run_is_the_same_to_the_last_bit(tmp_path, name: str, way: tuple[str, str]) -> None:
    task, precision = way
    changes = {"steps": 8, "task": task, "precision": precision, "optimizer": {"name": name}, "lora": {"rank": 4}}
    through = Trainer(tiny_run(tmp_path, **changes))
    expected = losses(through, 8)
    first = Trainer(tiny_run(tmp_path, **changes))
    assert losses(first, 5) == expected[:5]
    with checkpoint.Writer(tmp_path / "run", keep=2) as writer:
        writer.save(first.snapshot())
        first.step()  # training goes on while the snapshot is written
    found = checkpoint.newest(tmp_path / "run")
    assert found.step == 5
    second = Trainer(TrainConfig.from_dict(found.state["config"]), found)
    assert losses(second, 3) == expected[5:]
    for a, b in zip(through.trainable.parameters.values(), second.trainable.parameters.values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("task", ["finetune", "lora"])
def test_a_checkpoint_is_a_model_for_transformers_and_for_the_engine(tmp_path, task: str) -> None:
    from transect import LLM, SamplingParams

    config = tiny_run(tmp_path, task=task, steps=3, optimizer={"learning_rate": 1e-2})
    trainer = Trainer(config)
    last = trainer.run()
    assert (tmp_path / "run" / "last").resolve() == last
    tokens = torch.arange(20, 60)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(last, dtype=torch.float32)
    with torch.no_grad():
        from transect.models.context import VarlenContext

        context = VarlenContext(torch.tensor([0, 40], dtype=torch.int32), trainer.model.ops)
        ours = trainer.model.logits(trainer.model(tokens, torch.arange(40), context))
        torch.testing.assert_close(theirs(tokens[None]).logits[0], ours, atol=2e-4, rtol=1e-4)
    assert transformers.AutoTokenizer.from_pretrained(last).encode("hi") == trainer.trainable.tokenizer.encode("hi")
    llm = LLM(str(last), dtype="float32", max_num_seqs=2, kv_cache_tokens=256)
    (answer,) = llm.generate([tokens.tolist()], SamplingParams(temperature=0, max_tokens=3))
    with torch.no_grad():
        first = int(theirs(tokens[None]).logits[0, -1].argmax())
    assert answer.outputs[0].token_ids[0] == first


def test_adapters_in_bfloat16_are_float32_for_the_optimizer(tmp_path) -> None:
    trainer = Trainer(tiny_run(tmp_path, task="lora", precision="bfloat16", accumulate=2))
    assert {p.dtype for p in trainer.trainable.parameters.values()} == {torch.bfloat16}
    assert all(state["master"].dtype == torch.float32 for state in trainer.optimizer.state.values())
    trainer.step()
    for name, parameter in trainer.trainable.parameters.items():
        assert torch.equal(trainer.optimizer.state[name]["master"].bfloat16(), parameter)
    assert not trainer.told


def test_rounding_to_the_nearest_is_warned_of(tmp_path) -> None:
    trainer = Trainer(tiny_run(tmp_path, precision="bfloat16", optimizer={"rounding": "nearest"}))
    assert 'precision = "mixed"' in trainer.told[0]
    assert not Trainer(tiny_run(tmp_path, precision="bfloat16")).told
    assert "[lora] have no effect on this run" in Trainer(tiny_run(tmp_path, lora={"rank": 2})).told[0]


def test_chats_train_on_the_assistant_alone(tmp_path) -> None:
    config = tiny_run(tmp_path, data={"train": [write_chats(tmp_path / "chats.jsonl")], "seq_len": 128})
    trainer = Trainer(config)
    tokenizer = trainer.trainable.tokenizer
    batch = next(trainer.objective.loader)
    said = tokenizer.decode(batch.labels_T[batch.labels_T >= 0].tolist(), skip_special_tokens=False)
    assert set(said.replace("<|im_end|>", "")) <= set("0123456789!Yes.")
    assert said.count("Yes.<|im_end|>") == len(batch.cu_seqlens) - 1
    before = trainer.step().loss
    for _ in range(20):
        after = trainer.step().loss
    assert after < before


def test_a_gradient_that_is_not_finite_stops_the_run_and_names_the_place(tmp_path) -> None:
    trainer = Trainer(tiny_run(tmp_path))
    trainer.step()
    with torch.no_grad():
        trainer.model.layers[1].mlp.up.weight[0, 0] = float("nan")
    with pytest.raises(TrainingStopped, match=r"step 2 \(epoch 0, micro-batch 1\).*weight layers.1.mlp.up"):
        trainer.step()
    trainer = Trainer(tiny_run(tmp_path))
    with torch.no_grad():
        trainer.model.layers[0].attention.o.weight.mul_(1e38)
    with pytest.raises(TrainingStopped, match=r"output of layers\.0\."):
        trainer.step()


def diverged(tmp_path, **changes) -> Trainer:
    """A trainer whose model has gone wrong after 25 calm steps."""
    trainer = Trainer(tiny_run(tmp_path, steps=60, **changes))
    losses(trainer, 25)
    with torch.no_grad():
        trainer.model.head.weight.mul_(-30)
    return trainer


def test_a_model_that_has_gone_wrong_stops_the_run_where_that_is_asked_for(tmp_path) -> None:
    trainer = diverged(tmp_path, on_spike="stop")
    with pytest.raises(TrainingStopped, match=r"the loss jumped at step 26.*no checkpoint was written yet"):
        losses(trainer, 1)
    with checkpoint.Writer(tmp_path / "run", keep=1) as writer:
        writer.save(trainer.snapshot())
    with pytest.raises(TrainingStopped, match=r"step-00000025 is whole and from before this step"):
        losses(trainer, 1)


def test_a_run_that_stops_waits_for_the_checkpoint_that_is_being_written(tmp_path, monkeypatch) -> None:
    began, stopping = threading.Event(), threading.Event()

    def slow(*arguments) -> None:
        began.set()
        stopping.wait(200)
        write(*arguments)

    write = checkpoint.write
    monkeypatch.setattr(checkpoint, "write", slow)
    trainer = Trainer(tiny_run(tmp_path, save_every=2))
    take, whole = trainer.step, trainer._whole

    def step():
        if trainer.steps_done == 2:
            assert began.wait(200)
            with torch.no_grad():
                trainer.model.norm.weight.fill_(float("nan"))
            threading.Timer(0.05, stopping.set).start()
        return take()

    monkeypatch.setattr(trainer, "step", step)
    assert "no checkpoint" in whole()
    with pytest.raises(TrainingStopped, match="step-00000002 is whole and from before this step"):
        trainer.run()
    assert checkpoint.newest(tmp_path / "run").step == 2


def test_a_checkpoint_that_could_not_be_written_ends_the_run_at_the_next_step(tmp_path, monkeypatch) -> None:
    def full(*arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", full)
    trainer = Trainer(tiny_run(tmp_path, save_every=5, steps=20))
    take = trainer.step

    def step():
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join(200)
        return take()

    monkeypatch.setattr(trainer, "step", step)
    with pytest.raises(checkpoint.NotWritten, match="No space left on device"):
        trainer.run()
    assert trainer.steps_done in (5, 6)


@pytest.mark.parametrize(
    "before",
    [
        [0.1] * 6,
        [9 * 0.9**step + 0.1 for step in range(40)] + [0.1] * 5,  # the fall of the loss is not its usual spread
        [5.0, 0.1, 0.1],
        [5.0, 2.0, 0.5, 0.1, 0.1],
        [6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.6, 0.4, 0.2, 0.1, 0.1, 0.1],
        [6 * 0.7**step + 0.1 for step in range(12)],
    ],
)
def test_a_loss_far_above_the_last_ones_stands_out(before) -> None:
    watch = LossWatch()
    assert not any(watch.stands_out(loss) for loss in before)
    assert watch.stands_out(5.0) and not watch.stands_out(0.2)


def test_losses_of_uneven_batches_do_not_stand_out() -> None:
    draw = random.Random(0)
    watch = LossWatch()
    assert not any(watch.stands_out(draw.gauss(2, 0.5)) for _ in range(5000))
    assert watch.stands_out(12.0)


def test_a_model_that_has_gone_wrong_is_told_of_and_trained_on_by_default(tmp_path, caplog) -> None:
    trainer = diverged(tmp_path)
    losses(trainer, 2)
    assert "The model has gone wrong" in caplog.text
    assert trainer.steps_done == 27


def test_an_update_can_be_skipped(tmp_path, caplog) -> None:
    trainer = diverged(tmp_path, on_spike="skip")
    before = trainer.model.norm.weight.clone()
    record = trainer.step()
    assert record.extra["skipped"] and torch.equal(trainer.model.norm.weight, before)
    assert "this update is skipped" in caplog.text


@pytest.mark.parametrize("on_spike", ["warn", "stop", "skip"])
def test_an_odd_batch_stops_no_healthy_run(tmp_path, caplog, on_spike) -> None:
    trainer = Trainer(tiny_run(tmp_path, steps=60, on_spike=on_spike))
    losses(trainer, 25)
    inner, odd = trainer.objective.loss, []

    def loss(batch):
        odd.append(batch)
        return inner(batch) + (20.0 if batch is odd[0] else 0.0)  # this batch alone, whenever it is looked at

    trainer.objective.loss = loss
    record = trainer.step()
    assert record.loss > 20 and "The batch is unusual, the model is well" in caplog.text
    assert ("skipped" in record.extra) == (on_spike == "skip")
    losses(trainer, 2)
    assert trainer.steps_done == 28


def test_validation_in_bits_per_byte(tmp_path) -> None:
    config = tiny_run(tmp_path, data={"validation": [str(tmp_path / "text.txt")]})
    record = Trainer(config).evaluate()
    assert record is not None
    size = (tmp_path / "text.txt").stat().st_size  # a byte-level tokenizer; the token that ends the text is no byte
    assert record.bits_per_byte == pytest.approx(record.loss * record.labels / 0.693147 / (size - 1), rel=1e-4)


def test_other_data_than_the_checkpoint_s_is_refused(tmp_path) -> None:
    config = tiny_run(tmp_path, steps=2)
    Trainer(config).run()
    text = (tmp_path / "text.txt").read_text()
    (tmp_path / "text.txt").write_text(text[:-2] + "x\n")  # one byte of some ten thousand
    found = checkpoint.newest(tmp_path / "run")
    with pytest.raises(ValueError, match=r"the tokens of the data changed since.*--allow-changed data"):
        Trainer(config, found)
    assert Trainer(config, found, allow_changed=["data"]).steps_done == 2
    with pytest.raises(ValueError, match=r"knows data, masks, base, .*not dta"):
        Trainer(config, found, allow_changed=["dta"])


def test_another_mask_than_the_checkpoint_s_is_refused(tmp_path) -> None:
    folder = tmp_path / "chats.tokens"
    config = tiny_run(tmp_path, steps=1, data={"train": [str(folder)], "seq_len": 128})
    tokenize([write_chats(tmp_path / "chats.jsonl")], folder, str(tmp_path / "model"), workers=1)
    Trainer(config).run()
    mask = np.fromfile(folder / "trained.bin", dtype=np.bool_)
    mask[np.flatnonzero(mask)[-1]] = False
    mask.tofile(folder / "trained.bin")
    with pytest.raises(ValueError, match="which tokens are trained on changed since"):
        Trainer(config, checkpoint.newest(tmp_path / "run"))


def test_another_base_than_the_adapters_are_of_is_refused(tmp_path) -> None:
    config = tiny_run(tmp_path, steps=1, task="lora", lora={"rank": 2})
    Trainer(config).run()
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(weights)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ValueError, match="the weights of the base model changed since"):
        Trainer(config, checkpoint.newest(tmp_path / "run"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("precision=mixed", "precision = 'float32', and this asks for 'mixed': leave it as it was"),
        ("optimizer.name=muon", "optimizer.name = 'adamw', and this asks for 'muon'"),
        ("task=finetune", "task = 'lora'"),
        ("lora.alpha=3", "lora.alpha = 32.0, and this asks for 3.0"),
        ("lora.targets=q", r"lora.targets = .*this asks for \['q'\]"),
    ],
)
def test_a_run_that_goes_on_trains_what_it_did(tmp_path, setting, message) -> None:
    config = tiny_run(tmp_path, task="lora", lora={"rank": 2})
    kept = checkpoint.Checkpoint(tmp_path / "step", 1, {"config": json.loads(json.dumps(config.to_dict()))}, {})
    with pytest.raises(ValueError, match=message):
        Trainer(config.changed([setting]), kept)


def test_the_base_of_a_qlora_run_stays_what_it_was(tmp_path) -> None:
    config = tiny_run(tmp_path, task="qlora", lora={"base_format": "int4"})
    for setting in ("lora.base_format=nf4", "lora.group=32"):
        now = config.changed([setting, "lora.dropout=0.1"]).to_dict()
        with pytest.raises(ValueError, match=setting.partition("=")[0]):
            check_settings(config.to_dict(), now, tmp_path)
    plain = tiny_run(tmp_path, task="lora")
    check_settings(plain.to_dict(), plain.changed(["lora.group=32"]).to_dict(), tmp_path)  # it has no such base


def test_a_stop_tells_of_a_checkpoint_that_could_not_be_written(tmp_path, caplog) -> None:
    def full() -> None:
        raise ValueError("free some space")

    trainer = Trainer(tiny_run(tmp_path))
    trainer._written = full
    assert trainer._whole() == "no checkpoint was written yet" and "free some space" in caplog.text


def test_settings_that_are_set_by_hand(tmp_path) -> None:
    config = tiny_run(tmp_path).changed(["optimizer.clip=0.5", "on_spike=skip", 'data.train=["a", "b"]', "steps=9"])
    assert (config.optimizer.clip, config.on_spike, config.data.train, config.steps) == (0.5, "skip", ("a", "b"), 9)
    for setting, message in (("clip", "takes key=value"), ("optimizer.clp=1", "did you mean optimizer.clip"),
                             ("steps.x=1", "steps is not a table")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            config.changed([setting])


def test_more_tokens_than_the_model_has_positions_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"data\.seq_len is 512 tokens.*knows 256 positions"):
        Trainer(tiny_run(tmp_path, data={"seq_len": 512, "micro_batch": 512}))


@pytest.mark.parametrize("objective", ["next_token", "dpo", "kto", "grpo"])
def test_tokens_that_the_model_does_not_know_are_refused(tmp_path, objective) -> None:
    tiny_run(tmp_path, objective=objective)
    save_tiny_llm(tmp_path / "model", vocab_size=200, bos_token_id=0, eos_token_id=1)  # of the tokenizer's 300
    row = {"prompt": "q", "chosen": "é", "rejected": "b", "text": "é", "answer": "é"}
    row = {"text": "\u00e9" * 300} if objective == "next_token" else row
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    data = {"train": [str(tmp_path / "rows.jsonl")]}
    with pytest.raises(ValueError, match=r"gives the token 2\d\d, and the model knows 200"):
        Trainer(tiny_run(tmp_path, objective=objective, data=data, grpo={"max_tokens": 4}))


def test_pairs_that_are_too_long_are_told_of_in_training_and_validation(tmp_path) -> None:
    rows = [{"prompt": "q", "chosen": "a" * n, "rejected": "b"} for n in (3, 3, 200)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": [str(path)], "validation": [str(path)], "seq_len": 60, "micro_batch": 200}
    trainer = Trainer(tiny_run(tmp_path, objective="dpo", data=data))
    told = [line for line in trainer.objective.described() if "are left out" in line]
    assert len(told) == 2 and f"1 of 3 pairs of {path} are longer than data.seq_len" in told[0]
    with pytest.raises(ValueError, match=r"1 of 3 pairs of .* raise them, or set data\.too_long"):
        Trainer(tiny_run(tmp_path, objective="dpo", data=data | {"too_long": "stop"}))


def test_the_state_file_is_plain_json(tmp_path) -> None:
    trainer = Trainer(tiny_run(tmp_path, steps=1))
    state = json.loads((trainer.run() / "train_state.json").read_text())
    assert TrainConfig.from_dict(state["state"]["config"]) == trainer.config


def test_the_micro_batch_whose_loss_is_not_finite_is_the_one_that_is_named(tmp_path) -> None:
    trainer = Trainer(tiny_run(tmp_path, accumulate=3))
    trainer.step()
    loss, count = trainer.objective.loss, 0

    def second_is_infinite(batch):
        nonlocal count
        count += 1
        return loss(batch) * (float("inf") if count in (2, 4) else 1.0)  # the fourth is when it is looked at again

    trainer.objective.loss = second_is_infinite
    with pytest.raises(TrainingStopped, match=r"loss inf .* step 2 \(epoch 0, micro-batch 4\).*the loss itself"):
        trainer.step()


def test_the_micro_batch_whose_gradient_is_not_finite_is_the_one_that_is_named(tmp_path) -> None:
    trainer = Trainer(tiny_run(tmp_path, accumulate=3))
    trainer.step()
    loss, last = trainer.objective.loss, trainer.objective.loader
    bad = [next(last) for _ in range(3)][1].tokens_T
    trainer.objective.position = Position(0, 3)

    def flat_at_zero(batch):
        value = loss(batch)
        if torch.equal(batch.tokens_T, bad):
            value = value + (0 * trainer.model.layers[1].attention.o.weight.sum()).sqrt()
        return value

    trainer.objective.loss = flat_at_zero
    where = r"step 2 \(epoch 0, micro-batch 4\).*the gradient of layers.1.attention.o"
    with pytest.raises(TrainingStopped, match=where):
        trainer.step()


def test_a_finished_run_that_is_taken_up_writes_nothing(tmp_path) -> None:
    config = tiny_run(tmp_path, steps=2)
    last = Trainer(config).run()
    written = {path: path.stat().st_mtime_ns for path in last.rglob("*")}
    assert Trainer(config, checkpoint.newest(tmp_path / "run")).run() == last
    assert {path: path.stat().st_mtime_ns for path in last.rglob("*")} == written


def test_ranks_that_begin_around_midnight_take_one_day(tmp_path) -> None:
    world = SimpleNamespace(exchange=lambda mine: ["2026-01-31", mine])
    assert _dated(tiny_run(tmp_path), None, world).data.date == "2026-01-31"
    assert _dated(tiny_run(tmp_path, data={"date": "2025-01-01"}), None, None).data.date == "2025-01-01"
