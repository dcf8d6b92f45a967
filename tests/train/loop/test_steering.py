"""What steers a run: epochs, the best checkpoint and early stopping, samples, and services that follow it."""

import json
import sys
from types import SimpleNamespace

import pytest
from training_runs import tiny_run, write_chats

from transect.train.config import TrainConfig
from transect.train.loop import checkpoint
from transect.train.loop.best import Best
from transect.train.loop.report import RunLog, read_log
from transect.train.loop.trackers import trackers
from transect.train.loop.trainer import EvalRecord, StepRecord, Trainer


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.steps, self.evaluations, self.samples = [], [], []

    def step(self, record):
        self.steps.append(record)

    def evaluation(self, record):
        self.evaluations.append(record)

    def sample(self, record):
        self.samples.append(record)


@pytest.mark.parametrize(("epochs", "passes"), [(1, 1), (2, 2), (1.5, 1.5)])
def test_epochs_are_passes_over_the_data(tmp_path, epochs, passes) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 30)
    data = {"train": [chats], "seq_len": 128, "micro_batch": 256}
    config = TrainConfig.from_dict({**tiny_run(tmp_path, data=data).to_dict(), "steps": 0, "epochs": epochs})
    trainer = Trainer(config)
    sizes = [trainer.objective.micro_batches(epoch) for epoch in (0, 1)]
    expected = sizes[0] if passes == 1 else sum(sizes) if passes == 2 else -(-(2 * sizes[0] + sizes[1]) // 2)
    assert trainer.config.steps == expected and f"{epochs:g} epochs are {expected} steps" in trainer.told
    trainer.run()
    assert trainer.objective.position.epoch == (1 if passes > 1 else 0)
    state = checkpoint.newest(tmp_path / "run").state["config"]
    assert (state["steps"], state["epochs"]) == (expected, 0)  # a run that goes on counts the same steps


def test_steps_and_epochs_together_are_refused() -> None:
    with pytest.raises(ValueError, match="give steps or epochs, not both"):
        TrainConfig(model="m", steps=3, epochs=1.0)
    with pytest.raises(ValueError, match=r"patience counts measurements on data\.validation"):
        TrainConfig(model="m", patience=2)
    with pytest.raises(ValueError, match="log_to knows tensorboard, wandb, mlflow, not comet"):
        TrainConfig(model="m", log_to=("comet",))


def steered(tmp_path, losses, **changes):
    """A run whose validation loss, measured after every step, is what ``losses`` say."""
    trainer = Trainer(
        tiny_run(
            tmp_path, steps=len(losses), eval_every=1, data={"validation": [str(tmp_path / "text.txt")]}, **changes
        )
    )
    trainer.evaluate = lambda: EvalRecord(trainer.steps_done, losses[trainer.steps_done - 1], 1, None)
    return trainer


def names(tmp_path):
    return [path.name for path in checkpoint.list_steps(tmp_path / "run")]


def test_the_best_checkpoint_is_kept_and_found(tmp_path) -> None:
    steered(tmp_path, [3.0, 1.0, 2.0, 2.0, 2.0, 2.0], save_every=1, keep=2).run()
    assert names(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]
    assert (tmp_path / "run" / "best").resolve().name == "step-00000002"
    assert (tmp_path / "run" / "last").resolve().name == "step-00000006"
    assert checkpoint.newest(tmp_path / "run").state["best"] == {"loss": 1.0, "step": 2, "since": 4}


def test_a_run_without_gain_stops_early_and_stays_stopped(tmp_path) -> None:
    losses = [3.0, 2.0, 1.995, 2.5, 1.0]
    trainer = steered(tmp_path, losses, patience=2, min_gain=0.01)
    trainer.run()
    assert trainer.stopped_early and trainer.steps_done == 4
    assert (tmp_path / "run" / "best").resolve().name == "step-00000002"
    found = checkpoint.newest(tmp_path / "run")
    again = Trainer(TrainConfig.from_dict(found.state["config"]), found)
    assert again.finished and again.run().name == "step-00000004"
    longer = Trainer(TrainConfig.from_dict(found.state["config"]).changed(["patience=3"]), found)
    longer.evaluate = lambda: EvalRecord(longer.steps_done, 1.0, 1, None)
    longer.run()
    assert longer.steps_done == 5 and (tmp_path / "run" / "best").resolve().name == "step-00000005"


def test_links_that_a_kill_left_behind_are_mended(tmp_path) -> None:
    steered(tmp_path, [3.0, 2.0, 1.0], save_every=1, keep=3).run()
    run = tmp_path / "run"
    for name in ("last", "best"):  # killed after the checkpoint got its name, and before these did
        (run / name).unlink()
        (run / name).symlink_to("step-00000002")
    found = checkpoint.newest(run)
    Trainer(TrainConfig.from_dict(found.state["config"]), found).run()
    assert [(run / name).resolve().name for name in ("last", "best")] == ["step-00000003"] * 2


def test_going_back_before_the_best_forgets_it(tmp_path) -> None:
    steered(tmp_path, [3.0, 2.0, 1.0], save_every=1, keep=3).run()
    first = checkpoint.read(tmp_path / "run" / "step-00000001")
    checkpoint.set_aside_after(first)
    assert not (tmp_path / "run" / "best").exists() and Best.from_state(first.state["best"]).step == 1


def test_samples_are_the_engine_s_answers_and_change_nothing(tmp_path) -> None:
    from transect import LLM, SamplingParams

    plain, heard = Heard(), Heard()
    Trainer(tiny_run(tmp_path, steps=4)).run([plain])
    sampled = tiny_run(
        tmp_path, steps=4, run_dir=str(tmp_path / "b"), samples={"prompts": ["1 + 1?"], "every": 2, "max_tokens": 5}
    )
    log = RunLog(tmp_path / "b")
    last = Trainer(sampled).run([heard, log])
    log.close()
    assert [r.loss for r in heard.steps] == [r.loss for r in plain.steps]
    assert [r.step for r in heard.samples] == [2, 4]
    (answer,) = LLM(str(last), dtype="float32", max_num_seqs=1, kv_cache_tokens=256).chat(
        [{"role": "user", "content": "1 + 1?"}], SamplingParams(temperature=0, max_tokens=5)
    )
    assert heard.samples[-1].answer == answer.outputs[0].text
    assert [line["answer"] for line in read_log(tmp_path / "b") if line["kind"] == "sample"][-1] == answer.outputs[
        0
    ].text


def test_a_sample_that_does_not_fit_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"sample prompt .* the context leaves room for 6 beside"):
        Trainer(tiny_run(tmp_path, samples={"prompts": ["x" * 300], "max_tokens": 250}))


class FakeWandb(SimpleNamespace):
    """The calls of wandb that are used, as its documentation has them."""

    def __init__(self) -> None:
        super().__init__(runs=[])

    def Html(self, text):
        return text

    def init(self, *, project, name, dir, id, resume, config):
        lines = []
        run = SimpleNamespace(
            id=id or f"run{len(self.runs)}", project=project, name=name, config=config, lines=lines, ended=False
        )
        run.log = lambda values, step: lines.append((step, values))
        run.finish = lambda: setattr(run, "ended", True)
        self.runs.append(run)
        return run


class FakeMlflow:
    """The same of MLflow."""

    def __init__(self) -> None:
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return SimpleNamespace(info=SimpleNamespace(run_id=kwargs.get("run_id") or "m1"))

        return call


RECORD = StepRecord(1, 2.5, 1.0, 1e-3, 100, 90, 0.5, 0, extra={"margin": 0.25})


def test_services_follow_a_run_and_know_it_again(tmp_path, monkeypatch) -> None:
    wandb, mlflow = FakeWandb(), FakeMlflow()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    config = tiny_run(
        tmp_path, steps=2, log_to=["wandb", "mlflow"], project="p", samples={"prompts": ["<b>"], "max_tokens": 2}
    )
    for _ in range(2):
        followers = trackers(config)
        for follower in followers:
            follower.step(RECORD)
            follower.evaluation(EvalRecord(1, 2.0, 10, None))
        Trainer(config).run(followers[:1])
        for follower in followers:
            follower.close()
    first, again = wandb.runs
    assert (first.project, first.name, first.id, again.id, first.ended) == ("p", "run", "run0", "run0", True)
    assert first.config["optimizer"]["learning_rate"] == 1e-3
    step, values = first.lines[0]
    assert step == 1 and values["train/loss"] == 2.5 and values["train/margin"] == 0.25
    assert values["train/tokens_per_second"] == 200 and "train/step" not in values
    assert first.lines[1][1]["validation/loss"] == 2.0
    assert "&lt;b&gt;" in first.lines[-1][1]["sample"]
    calls = [name for name, _, _ in mlflow.calls]
    begun, logged = ["set_experiment", "start_run"], ["log_metrics", "log_metrics", "end_run"]
    assert calls == [*begun, "log_params", *logged, *begun, *logged]
    assert mlflow.calls[7][2] == {"run_id": "m1"}
    assert json.loads((tmp_path / "run" / "tracking.json").read_text()) == {"wandb": "run0", "mlflow": "m1"}


def test_a_service_that_is_not_installed_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"pip install 'transect\[track\]'"):
        trackers(tiny_run(tmp_path, log_to=["wandb"]))
