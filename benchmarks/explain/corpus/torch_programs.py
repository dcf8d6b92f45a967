"""Programs of plain PyTorch."""

import copy
import io
import itertools
import json
import random
import tempfile
from pathlib import Path

import torch
from corpus import program
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


def mlp(*widths):
    layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*[each for pair in layers for each in pair][:-1])


def train(net, batches, loss=lambda y: y.square().mean(), after=lambda y: None, lr=1e-3):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for (x,) in batches:
        optimizer.zero_grad()
        y = net(x)
        loss(y).backward()
        optimizer.step()
        after(y)


class Windows(Dataset):
    def __init__(self, series):
        self.series = series.tolist()

    def __len__(self):
        return 1200

    def __getitem__(self, i):
        piece = self.series[i : i + 256]
        mean = sum(piece) / 256
        return torch.tensor([value - mean for value in piece])


@program("loading")
def time_series_dataset_in_python(fast):
    series, net = torch.randn(2000), mlp(256, 128, 1)

    def work():
        if fast:
            pieces = series.unfold(0, 256, 1)[:1200]
            batches = ((x,) for x in (pieces - pieces.mean(1, keepdim=True)).split(16))
        else:
            batches = ((x,) for x in DataLoader(Windows(series), batch_size=16))
        train(net, batches)

    return work


@program("sync")
def accuracy_by_item(fast):
    net, data = mlp(32, 64, 10), torch.randn(64 * 60, 32)
    labels = torch.randint(0, 10, (64,))

    def work():
        right = [0]

        def count(y):
            hits = y.argmax(1) == labels
            if fast:
                right[0] += hits.sum()
            else:
                for each in hits:
                    right[0] += each.item()

        train(net, ((x,) for x in data.split(64)), after=count)

    return work


@program("grow")
def replay_buffer_by_cat(fast):
    net = mlp(256, 32, 256)

    @torch.no_grad()
    def work():
        kept, buffer, state = torch.zeros(0, 256), torch.empty(1500, 256), torch.zeros(1, 256)
        for step in range(1500):
            state = net(state)
            if fast:
                buffer[step] = state[0]
            else:
                kept = torch.cat([kept, state])

    return work


@program("launch", "small batch")
def lstm_cell_by_cell(fast):
    cell, lstm = nn.LSTMCell(32, 64), nn.LSTM(32, 64)
    x = torch.randn(64, 8, 32)

    def work():
        with torch.inference_mode():
            for _ in range(12):
                if fast:
                    lstm(x)
                else:
                    h = c = torch.zeros(8, 64)
                    for t in range(64):
                        h, c = cell(x[t], (h, c))

    return work


@program("launch", "small batch")
def predict_row_by_row(fast):
    net, x = mlp(64, 128, 128, 4), torch.randn(2000, 64)

    def work():
        with torch.inference_mode():
            if fast:
                net(x)
            else:
                for row in x:
                    net(row[None])

    return work


@program("float64")
def data_from_numpy_in_float64(fast):
    x = torch.randn(256, 512, dtype=torch.float64).numpy()
    net = mlp(512, 512, 512).to(torch.float32 if fast else torch.float64)

    def work():
        for _ in range(12):
            t = torch.from_numpy(x)
            train(net, [(t.float() if fast else t,)])

    return work


@program("autograd")
def evaluation_with_gradients(fast):
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(40)])

    def work():
        x = torch.ones(4, 8)
        with torch.inference_mode(fast):
            for _ in range(250):
                x = net(x)

    return work


@program("optimizer")
def adam_parameter_by_parameter(fast):
    net = nn.Sequential(*[nn.Linear(24, 24) for _ in range(60)])
    x = torch.randn(8, 24)
    optimizer = torch.optim.AdamW(net.parameters(), fused=fast, foreach=False)

    def work():
        for _ in range(30):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    return work


@program("python")
def environment_in_python(fast):
    net = mlp(4, 64, 2)

    def work():
        with torch.inference_mode():
            states = [[random.random() for _ in range(4)] for _ in range(64)]
            x = torch.rand(64, 4)
            for _ in range(60):
                if fast:
                    x = (x * 0.99 + 0.01 * net(x).mean(1, keepdim=True)).clamp(-1, 1)
                    continue
                action = net(torch.tensor(states)).mean(1).tolist()
                for i, state in enumerate(states):
                    for _ in range(8):
                        states[i] = [max(-1.0, min(1.0, v * 0.99 + 0.01 * action[i])) for v in state]

    return work


@program("stacks")
def anomaly_detection_left_on(fast):
    net, x = nn.Sequential(*[nn.Linear(32, 32) for _ in range(10)]), torch.randn(16, 32)

    def work():
        with torch.autograd.set_detect_anomaly(not fast):
            train(net, [(x,)] * 60)

    return work


@program("copying")
def best_model_by_deepcopy(fast):
    net, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)]), torch.randn(8, 64)
    kept = copy.deepcopy(net)

    def work():
        def keep(y):
            if fast:
                with torch.no_grad():
                    torch._foreach_copy_(list(kept.parameters()), list(net.parameters()))
            else:
                copy.deepcopy(net)

        train(net, [(x,)] * 60, after=keep)

    return work


@program("saving")
def checkpoint_every_step(fast):
    net, x = mlp(256, 256, 256), torch.randn(16, 256)
    folder = tempfile.mkdtemp()

    def work():
        def save(y):
            if not fast:
                torch.save(net.state_dict(), Path(folder, "last.pt"))

        train(net, [(x,)] * 60, after=save)

    return work


@program("printing", "logging")
def predictions_printed(fast):
    net, x, out = mlp(64, 64, 32), torch.randn(32, 64), io.StringIO()

    def work():
        train(net, [(x,)] * 60, after=lambda y: None if fast else print(y, file=out))

    return work


@program("launch")
def graph_messages_edge_by_edge(fast):
    nodes, edges, lin = torch.randn(200, 16), torch.randint(0, 200, (600, 2)), nn.Linear(16, 16)
    pairs = edges.tolist()

    def work():
        with torch.inference_mode():
            for _ in range(5):
                h, out = lin(nodes), torch.zeros(200, 16)
                if fast:
                    out.index_add_(0, edges[:, 1], h[edges[:, 0]])
                else:
                    for a, b in pairs:
                        out[b] += h[a]

    return work


@program("launch", "layout")
def attention_head_by_head(fast):
    q, k, v = torch.randn(3, 4, 16, 32, 16).unbind()

    def work():
        with torch.inference_mode():
            for _ in range(25):
                if fast:
                    functional.scaled_dot_product_attention(q, k, v)
                else:
                    rows = []
                    for b in range(4):
                        for h in range(16):
                            rows.append(((q[b, h] @ k[b, h].T) / 4).softmax(-1) @ v[b, h])
                    torch.stack(rows)

    return work


@program("parse")
def records_parsed_each_epoch(fast):
    lines = [json.dumps({"x": [random.random() for _ in range(64)]}) for _ in range(400)]
    parsed = torch.tensor([json.loads(line)["x"] for line in lines])
    net = mlp(64, 32, 1)

    def work():
        for _ in range(6):
            for i in range(0, 400, 40):
                if fast:
                    rows = parsed[i : i + 40]
                else:
                    rows = torch.tensor([
                        json.loads(line)["x"]
                        for line in lines[i : i + 40]])  # fmt: skip
                train(net, [(rows,)])

    return work


@program("collection")
def collecting_garbage_each_step(fast):
    import gc

    net, x = mlp(64, 64, 8), torch.randn(16, 64)
    train(net, [(x,)])

    def collect(y):
        if not fast:
            gc.collect()

    return lambda: train(net, [(x,)] * 15, after=collect)
