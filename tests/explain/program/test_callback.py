"""The callback explains training of transformers' Trainer, and of what calls it as Lightning does."""

import time

import pytest
import torch
from planted_faults import ceilings
from torch import nn

from transect.explain.program.callback import ExplainCallback


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 240

    def __getitem__(self, index):
        time.sleep(0.002)  # long enough for samples of Python
        return {"x": torch.full((8,), float(index))}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, **kwargs):
        return {"loss": self.layer(x).square().mean()}


def test_a_trainer_is_explained(tmp_path):
    transformers = pytest.importorskip("transformers")
    seen = []
    callback = ExplainCallback(0.1, seen.append, ceilings=ceilings(), cores=1)
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_steps=1000,
    )  # fmt: skip
    transformers.Trainer(Net(), arguments, train_dataset=Rows(), callbacks=[callback]).train()
    assert seen == [callback.result] and callback.result.steps.kind == "optimizer step"
    assert callback.result.steps.count > 20
    best = callback.result.findings[0]
    assert ".py:" in best.where, str(callback.result)


def test_lightning_calls_it_by_other_names():
    net, seen = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    callback = ExplainCallback(0.05, seen.append, ceilings=ceilings(), cores=1)
    callback.setup(None, net, stage="fit")
    callback.on_train_start(None, net)
    for _ in range(2000):
        net(torch.ones(4, 8))["loss"].backward()
        optimizer.step()
        callback.on_train_batch_end(None, net, None, None, 0)
    callback.on_train_end(None, net)
    assert seen[0].steps.kind == "optimizer step" and callback.state_dict() == {}
    with pytest.raises(AttributeError):
        callback.nothing  # noqa: B018


def test_a_failed_training_leaves_no_profiler_running():
    callback = ExplainCallback(0.05, print, ceilings=ceilings(), cores=1)
    callback.on_train_start(None, None)
    callback.on_exception(None, None, RuntimeError("no"))
    callback.on_train_end(None, None)
    assert callback.result is None and not torch.autograd.profiler._is_profiler_enabled
