"""A run's configuration: what is refused, with which words; and the learning rate over the steps."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transect.train.config import ScheduleConfig, TrainConfig
from transect.train.schedule import factor


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "m", "stps": 1}, r"stps is not known; did you mean steps\?"),
        ({"model": "m", "data": {"trian": []}}, r"data\.trian is not known; did you mean data\.train\?"),
        ({"steps": 1}, "the setting model is missing"),
        ({"model": "m", "steps": "many"}, "steps must be a whole number, not 'many'"),
        ({"model": "m", "steps": True}, "steps must be a whole number"),
        ({"model": "m", "steps": 0}, "steps must be at least 1"),
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
        ({"model": "m", "grpo": {"group": 1}}, r"grpo\.group must be at least 2"),
        ({"model": "m", "schedule": {"final": 2}}, r"schedule\.final is a share"),
    ],
)
def test_mistakes_are_named(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict(values)


def test_toml_in_and_plain_values_out(tmp_path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model = "m"\nsteps = 3\n[data]\ntrain = "a.txt"\n[optimizer]\nlearning_rate = 1\n')
    config = TrainConfig.from_toml(path)
    assert config.data.train == ("a.txt",) and config.optimizer.learning_rate == 1.0
    assert TrainConfig.from_dict(config.to_dict()) == config
    path.write_text("model = ")
    with pytest.raises(ValueError, match="is not TOML"):
        TrainConfig.from_toml(path)
    with pytest.raises(ValueError, match="cannot read"):
        TrainConfig.from_toml(tmp_path / "none.toml")


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
