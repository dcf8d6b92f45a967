"""A run's configuration: what is refused, with which words; and the learning rate over the steps."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transect.train.config import ScheduleConfig, TrainConfig
from transect.train.loop.schedule import factor


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "m", "stps": 1}, r"stps is not known; did you mean steps\?"),
        ({"model": "m", "data": {"trian": []}}, r"data\.trian is not known; did you mean data\.train\?"),
        ({"model": "m", "lr": 1}, r"the setting lr is not known; here it is optimizer\.learning_rate"),
        ({"model": "m", "num_train_epochs": 1}, "here it is epochs"),
        ({"model": "m", "optimizer": {"lr": 1}}, r"optimizer\.lr is not known; here it is optimizer\.learning_rate"),
        ({"model": "m", "max_seq_length": 8}, r"here it is data\.seq_len"),
        ({"model": "m", "data": {"batch_size": 8}}, r"here it is data\.micro_batch, in tokens"),
        ({"model": "m", "xyz": 8}, "known are model, load_format"),
        ({"steps": 1}, "the setting model is missing"),
        ({"model": "m", "steps": "many"}, "steps must be a whole number, not 'many'"),
        ({"model": "m", "steps": True}, "steps must be a whole number"),
        ({"model": 3}, "model must be a string, not 3"),
        ({"model": "m", "steps": 0}, "steps must be at least 1"),
        ({"model": "m", "task": "dpo"}, 'an objective: set objective to "dpo", and task to what is trained'),
        ({"model": "m", "task": "sft"}, 'that is task = "finetune" here, or "lora"'),
        ({"model": "m", "objective": "lora"}, 'a task: set task to "lora"'),
        ({"model": "m", "data": {"train": ["a"], "weights": [float("nan")]}}, "a number greater than 0 for each"),
        ({"model": "m", "lora": {"alpha": float("inf")}}, "lora.alpha must be greater than 0"),
        ({"model": "m", "threads": 0}, "threads must be at least 1, not 0"),
        ({"model": "m", "seed": 2**64}, "seed must be less than"),
        ({"model": "m", "lora": {"start": "a"}}, "task = 'finetune' trains none: set task to"),
        ({"model": "m", "task": "learn"}, "task must be one of pretrain, finetune, lora, qlora, not 'learn'"),
        ({"model": "m", "data": 3}, "data must be a table"),
        ({"model": "m", "data": {"train": [1]}}, r"data\.train must be a list of strings"),
        ({"model": "m", "data": {"seq_len": 10, "micro_batch": 5}}, "raise it to at least that"),
        (
            {"model": "m", "optimizer": {"learning_rate": -1}},
            r"optimizer\.learning_rate must be a number greater than 0",
        ),
        ({"model": "m", "optimizer": {"beta1": 1.0}}, r"optimizer\.beta1 must be at least 0 and less than 1"),
        ({"model": "m", "lora": {"targets": ["qkv"]}}, "lora.targets must be some of q, k"),
        (
            {"model": "m", "objective": "kto", "data": {"streaming": True}},
            "'kto' needs all of its rows before the first",
        ),
        ({"model": "m", "grpo": {"reward_weights": [float("nan")]}}, r"grpo\.reward_weights must be finite numbers"),
        ({"model": "m", "grpo": {"group": 1}}, r"grpo\.group must be at least 2"),
        ({"model": "m", "schedule": {"final": 2}}, r"schedule\.final is a share"),
    ],
)
def test_mistakes_are_named(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict(values)


def test_a_day_needs_no_quotes(tmp_path) -> None:
    (tmp_path / "run.toml").write_text('model = "m"\n[data]\ndate = 2026-01-31\n')
    assert TrainConfig.from_toml(tmp_path / "run.toml").data.date == "2026-01-31"
    assert TrainConfig.from_dict({"model": "m"}, ["data.date=2026-02-01"]).data.date == "2026-02-01"


def test_settings_make_good_what_a_stored_run_has_wrong() -> None:
    values = {"model": "m", "objective": "grpo", "data": {"streaming": True}}
    assert not TrainConfig.from_dict(values, ["data.streaming=false"]).data.streaming


def test_tables_that_mean_nothing_are_told_of() -> None:
    values = {"model": "m", "task": "lora", "lora": {"rank": 4}, "objective": "dpo", "dpo": {"beta": 0.2}}
    assert TrainConfig.from_dict(values).unused() == []
    assert TrainConfig.from_dict({**values, "task": "finetune", "objective": "orpo"}).unused() == ["lora", "dpo"]


def test_toml_in_and_plain_values_out(tmp_path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model = "m"\nsteps = 3\n[data]\ntrain = "a.txt"\n[optimizer]\nlearning_rate = 1\n')
    config = TrainConfig.from_toml(path)
    assert config.data.train == ("a.txt",) and config.optimizer.learning_rate == 1.0
    assert TrainConfig.from_dict(config.to_dict()) == config
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as Windows writes it
    assert TrainConfig.from_toml(path) == config
    path.write_text('model = "m"\nepochs = 2\n')
    assert TrainConfig.from_toml(path, ["steps=7"]).steps == 7 and TrainConfig.from_toml(path).epochs == 2
    assert config.changed(["epochs=1.5"]).epochs == 1.5
    with pytest.raises(ValueError, match="steps or epochs, not both"):
        config.changed(["epochs=1", "steps=2"])
    path.write_text("model = ")
    with pytest.raises(ValueError, match="is not TOML"):
        TrainConfig.from_toml(path)
    with pytest.raises(ValueError, match="cannot read"):
        TrainConfig.from_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("values", "rate", "decay", "warmup"),
    [
        ({"task": "pretrain"}, 3e-4, 0.1, 0),
        ({}, 2e-5, 0.01, -1),
        ({"steps": 1000}, 2e-5, 0.01, -1),
        ({"task": "lora"}, 2e-4, 0.0, -1),
        ({"task": "qlora", "objective": "dpo"}, 2e-5, 0.0, -1),
        ({"objective": "grpo"}, 1e-6, 0.01, -1),
        (
            {"task": "lora", "optimizer": {"learning_rate": 1, "weight_decay": 0.5}, "schedule": {"warmup": 9}},
            1,
            0.5,
            9,
        ),
    ],
)
def test_what_is_left_out_is_as_the_task_needs_it(values, rate, decay, warmup) -> None:
    config = TrainConfig.from_dict({"model": "m", **values})
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (rate, decay)
    assert config.schedule.warmup == warmup
    share = ScheduleConfig(kind="constant", warmup=-1)
    assert [factor(share, step, 100) for step in (0, 1, 2, 50)] == [1 / 3, 2 / 3, 1, 1]
    assert TrainConfig.from_dict(config.to_dict()) == config  # a run that goes on keeps what it began with


def test_settings_by_hand_come_before_what_the_task_decides(tmp_path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model = "m"\n')
    config = TrainConfig.from_toml(path, ["task=lora", "steps=1000"])
    assert (config.optimizer.learning_rate, config.schedule.warmup) == (2e-4, -1)


@given(
    kind=st.sampled_from(["constant", "cosine", "linear", "wsd"]),
    warmup=st.integers(0, 20),
    decay=st.integers(0, 30),
    final=st.floats(0, 1),
    steps=st.integers(21, 100),
)
def test_the_learning_rate_rises_then_never_rises_again(kind, warmup, decay, final, steps) -> None:
    schedule = ScheduleConfig(kind=kind, warmup=warmup, decay=decay, final=final)
    values = [factor(schedule, step, steps) for step in range(steps)]
    assert all(0 < value <= 1 + 1e-12 for value in values[: max(warmup, 1)])
    assert values[:warmup] == sorted(values[:warmup])
    after = values[warmup:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
    assert all(value >= min(final, 1) - 1e-12 for value in after)
    assert after[0] == pytest.approx(1.0) or (kind == "wsd" and decay > steps - warmup)


def test_wsd_stays_and_then_decays() -> None:
    schedule = ScheduleConfig(kind="wsd", warmup=2, decay=4, final=0.0)
    assert [factor(schedule, step, 10) for step in range(10)] == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
