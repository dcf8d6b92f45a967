"""Programs that were held out when they were written; what explains programs has changed since."""

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from corpus import program
from hugging_face import llama
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch_programs import mlp, train
from transformers import GPT2Config, GPT2LMHeadModel


@program("file", "loading")
def shards_read_each_step(fast):
    folder = Path(tempfile.mkdtemp())
    for i in range(8):
        np.savez_compressed(folder / f"{i}.npz", x=np.random.randn(64, 512).astype("float32"))
    net, kept = mlp(512, 16), [torch.from_numpy(np.load(folder / f"{i}.npz")["x"]) for i in range(8)]

    def work():
        for step in range(40):
            train(net, [(kept[step % 8] if fast else torch.from_numpy(np.load(folder / f"{step % 8}.npz")["x"]),)])

    return work


@program("sleep")
def waits_for_a_queue_by_sleeping(fast):
    net, x = mlp(128, 128, 8), torch.randn(64, 128)

    def work():
        def idle(y):
            if not fast:
                time.sleep(0.004)

        train(net, [(x,)] * 50, after=idle)

    return work


@program("launch", "small batch", library="transformers")
def gpt2_scores_one_by_one(fast):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=64, n_layer=3, n_head=4)).eval()
    ids = torch.randint(0, 300, (48, 16))

    def work():
        with torch.no_grad():
            for rows in ids.split(48 if fast else 1):
                model(rows).logits.logsumexp(-1)

    return work


@program("padding", library="transformers")
def llama_prompts_padded_on_the_left(fast):
    model, ids, mask = llama(), torch.zeros(16, 256, dtype=torch.long), torch.zeros(16, 256, dtype=torch.long)
    ids[:, 192:], mask[:, 192:] = torch.randint(3, 200, (16, 64)), 1
    begin = 192 if fast else 0

    def work():
        with torch.inference_mode():
            for _ in range(3):
                model(input_ids=ids[:, begin:], attention_mask=mask[:, begin:], use_cache=False)

    return work


class Pairs(Dataset):
    def __init__(self, fast):
        self.rows = [self._row(i) for i in range(400)] if fast else None

    def _row(self, i):
        counts = [0] * 64
        for k in range(1500):
            counts[(i * k * 7 + k) % 64] += 1
        return torch.tensor(counts, dtype=torch.float32)

    def __len__(self):
        return 400

    def __getitem__(self, i):
        return self._row(i) if self.rows is None else self.rows[i]


@program("loading")
def recommender_counts_in_the_dataset(fast):
    net, data = mlp(64, 64, 8), Pairs(fast)
    return lambda: train(net, ((x,) for x in DataLoader(data, batch_size=20)))


@program("python", library="scikit-learn")
def classifier_asked_row_by_row(fast):
    x = torch.randn(300, 16).numpy()
    model, net = LogisticRegression().fit(x, np.arange(300) % 3), nn.Linear(16, 16)

    def work():
        with torch.inference_mode():
            y = net(torch.from_numpy(x)).numpy()
            if fast:
                model.predict_proba(y)
            else:
                for row in y:
                    model.predict_proba(row[None])

    return work


@program("launch")
def convolution_filter_by_filter(fast):
    filters, x = torch.randn(64, 3, 3, 3), torch.randn(1, 3, 24, 24)

    def work():
        with torch.inference_mode():
            for _ in range(10):
                if fast:
                    nn.functional.conv2d(x, filters)
                else:
                    torch.cat([nn.functional.conv2d(x, filters[i : i + 1]) for i in range(64)], 1)

    return work


@program("float64")
def gaussian_process_in_double(fast):
    kind = torch.float32 if fast else torch.float64
    x, weight = torch.randn(500, 64, dtype=kind), torch.randn(500, 500, dtype=kind)

    def work():
        for _ in range(12):
            kernel = (-torch.cdist(x, x)).exp()
            kernel @ weight

    return work


@program("optimizer", "launch")
def moving_average_of_weights_in_a_loop(fast):
    net, other = (nn.Sequential(*[nn.Linear(16, 16) for _ in range(100)]) for _ in range(2))
    mine, theirs = list(net.parameters()), list(other.parameters())

    def work():
        with torch.no_grad():
            for _ in range(40):
                net(torch.ones(1, 16))
                if fast:
                    torch._foreach_lerp_(theirs, mine, 0.01)
                else:
                    for a, b in zip(theirs, mine, strict=True):
                        a.copy_(0.99 * a + 0.01 * b)

    return work


@program("sync")
def early_stop_checked_by_value(fast):
    x = torch.rand(256, 8)

    def work():
        y = x
        for _ in range(1500):
            y = y * 0.999
            if not fast and y.max().item() < 0 and y.min().item() < 0 and y.sum().item() < 0:
                break

    return work
