"""Programs that were written after the rules of the day were final, and explained once."""

from functools import partial

import numpy as np
import torch
from corpus import program as any_program
from sklearn.preprocessing import LabelBinarizer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch_programs import mlp, train

program = partial(any_program, held_out=True)


@program("loading", "wait", "process")
def workers_for_data_in_memory(fast):
    data, net = TensorDataset(torch.randn(2048, 32)), mlp(32, 64, 4)
    loader = DataLoader(data, batch_size=16, num_workers=0 if fast else 2, persistent_workers=not fast)
    return lambda: train(net, loader)


@program("launch", "eager")
def heads_called_task_by_task(fast):
    body, heads, joined = mlp(32, 64, 64), nn.ModuleList([nn.Linear(64, 1) for _ in range(60)]), nn.Linear(64, 60)
    x, y = torch.randn(64, 32), torch.randn(64, 60)
    optimizer = torch.optim.SGD([*body.parameters(), *(joined if fast else heads).parameters()], 1e-2)

    def work():
        for _ in range(5):
            hidden = body(x).relu()
            scores = joined(hidden) if fast else torch.cat([head(hidden) for head in heads], 1)
            optimizer.zero_grad()
            functional.mse_loss(scores, y).backward()
            optimizer.step()

    return work


@program("launch", "eager", "python")
def weights_penalized_one_by_one(fast):
    net, x = mlp(*[48] * 30), torch.randn(64, 48)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=1e-4 if fast else 0.0, fused=True)

    def work():
        for _ in range(5):
            loss = net(x).square().mean()
            if not fast:
                penalty = torch.tensor(0.0)
                for each in net.parameters():
                    penalty = penalty + each.norm(2) ** 2
                loss = loss + 1e-4 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return work


@program("python", library="scikit-learn")
def labels_binarized_for_each_batch(fast):
    words = np.array([f"class {i}" for i in range(20)])
    x, labels = torch.randn(8, 64, 32), words[np.random.default_rng(0).integers(0, 20, (8, 64))]
    codes = torch.tensor(np.searchsorted(np.sort(words), labels))
    net = mlp(32, 64, 20)
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)

    def work():
        for rows, names, numbers in zip(x, labels, codes, strict=True):
            if fast:
                target = functional.one_hot(numbers, 20).float()
            else:
                target = torch.tensor(LabelBinarizer().fit(words).transform(names), dtype=torch.float32)
            optimizer.zero_grad()
            functional.binary_cross_entropy_with_logits(net(rows), target).backward()
            optimizer.step()

    return work


@program("python")
def masks_made_of_lists_for_each_step(fast):
    layer, head = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0), nn.Linear(32, 2)
    lengths, x = torch.randint(16, 64, (32,)), torch.randn(32, 64, 32)
    optimizer = torch.optim.SGD([*layer.parameters(), *head.parameters()], 1e-3)

    def work():
        for _ in range(4):
            if fast:
                mask = torch.arange(64) >= lengths[:, None]
            else:
                pairs = [[[j >= n or j > i for j in range(64)] for i in range(64)] for n in lengths.tolist()]
                mask = torch.tensor(pairs)[:, -1]
            optimizer.zero_grad()
            head(layer(x, src_key_padding_mask=mask)).square().mean().backward()
            optimizer.step()

    return work


@program("evaluation", library="Lightning", steady=True)
def lightning_validates_after_each_batch(fast):
    import logging
    import warnings

    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp(64, 256, 8)

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def validation_step(self, batch, index):
            self.log("loss", self.net(batch[0]).square().mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    training, validation = (DataLoader(TensorDataset(torch.randn(n, 64)), batch_size=32) for n in (2048, 256))

    def work():
        trainer = L.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, val_check_interval=1.0 if fast else 1,
        )  # fmt: skip
        trainer.fit(Module(), training, validation)

    return work


@program()
def healthy_training_with_validation(fast):
    net, x, held = mlp(256, 1024, 1024, 10), torch.randn(12, 256, 256), torch.randn(512, 256)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, fused=True)

    def work():
        for rows in x:
            optimizer.zero_grad()
            net(rows).square().mean().backward()
            optimizer.step()
        with torch.inference_mode():
            net(held).square().mean().item()

    return work


@program()
def healthy_gru_training(fast):
    net, head, x = nn.GRU(64, 256, batch_first=True), nn.Linear(256, 1), torch.randn(128, 24, 64)
    optimizer = torch.optim.AdamW([*net.parameters(), *head.parameters()], 1e-3, fused=True)

    def work():
        for _ in range(2):
            optimizer.zero_grad()
            head(net(x)[0][:, -1]).square().mean().backward()
            optimizer.step()

    return work
