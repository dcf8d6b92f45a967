"""Programs that were held out when they were written; what explains programs has changed since."""

import csv
import tempfile
from pathlib import Path

import numpy as np
import torch
from corpus import program
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torch_programs import mlp, train


@program("launch", "small batch", library="transformers")
def answers_ranked_pair_by_pair(fast):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=400, hidden_size=96, num_hidden_layers=2, num_attention_heads=4, intermediate_size=192
    )  # fmt: skip
    config.num_labels = 1
    model = BertForSequenceClassification(config).eval()
    question, answers = torch.randint(5, 400, (1, 8)), torch.randint(5, 400, (40, 16))

    def work():
        with torch.inference_mode():
            pairs = torch.cat([question.expand(40, -1), answers], 1)
            scores = [model(input_ids=rows).logits[:, 0] for rows in pairs.split(40 if fast else 1)]
            torch.cat(scores).argsort(descending=True)

    return work


@program("launch", "small batch", library="timm")
def pictures_classified_one_by_one(fast):
    import timm

    model = timm.create_model("mobilenetv3_small_050", num_classes=10).eval()
    pictures = torch.randn(24, 3, 32, 32)

    def work():
        with torch.inference_mode():
            for x in pictures.split(24 if fast else 1):
                model(x).argmax(1)

    return work


class Signals(Dataset):
    def __init__(self, fast):
        path = Path(tempfile.mkdtemp(), "signals.npy")
        np.save(path, np.random.default_rng(0).random((600, 512), dtype=np.float32))
        self.rows = np.load(path, mmap_mode="r")
        self.ready = torch.stack([self._row(i) for i in range(600)]) if fast else None

    def _row(self, i):
        row = np.array(self.rows[i])
        row = np.convolve(row, np.ones(9, np.float32) / 9, "same")
        row = (row - np.median(row)) / (np.percentile(row, 75) - np.percentile(row, 25))
        return torch.from_numpy(row.astype(np.float32))

    def __len__(self):
        return 600

    def __getitem__(self, i):
        return self._row(i) if self.ready is None else self.ready[i]


@program("loading", library="numpy")
def signals_filtered_in_the_dataset(fast):
    net, data = mlp(512, 64, 4), Signals(fast)
    return lambda: train(net, ((x,) for x in DataLoader(data, batch_size=30, shuffle=True)))


@program("python", "loading", library="pandas")
def rows_sampled_from_a_table_each_step(fast):
    import pandas

    frame = pandas.DataFrame(np.random.default_rng(0).random((5000, 20)), columns=[f"c{i}" for i in range(20)])
    table, net = torch.tensor(frame.values, dtype=torch.float32), mlp(20, 32, 1)

    def sample():
        if fast:
            return table[torch.randint(0, 5000, (64,))]
        chosen = frame.sample(64)
        chosen = chosen.assign(total=chosen.sum(axis=1)).sort_values("total").drop(columns="total")
        return torch.tensor(chosen.values, dtype=torch.float32)

    return lambda: train(net, ((sample(),) for _ in range(40)))


@program("launch")
def dice_loss_class_by_class(fast):
    net, x, labels = nn.Conv2d(3, 24, 3, padding=1), torch.randn(2, 3, 24, 24), torch.randint(0, 24, (2, 24, 24))
    truth = functional.one_hot(labels, 24).permute(0, 3, 1, 2).float()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)

    def loss(scores):
        if fast:
            both = (scores * truth).sum((0, 2, 3))
            return (1 - (2 * both + 1) / (scores.sum((0, 2, 3)) + truth.sum((0, 2, 3)) + 1)).mean()
        total = 0.0
        for label in range(24):
            mask = (labels == label).float()
            mine = scores[:, label]
            total = total + 1 - (2 * (mine * mask).sum() + 1) / (mine.sum() + mask.sum() + 1)
        return total / 24

    def work():
        for _ in range(15):
            optimizer.zero_grad()
            loss(net(x).softmax(1)).backward()
            optimizer.step()

    return work


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters, self.rnn, self.head = nn.Embedding(60, 64), nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 60)

    def forward(self, ids, state=None):
        y, state = self.rnn(self.letters(ids), state)
        return self.head(y[:, -1]), state


@program("prefix")
def names_generated_from_their_beginning_each_time(fast):
    model, first = Letters().eval(), torch.randint(0, 60, (8, 12))

    def work():
        with torch.inference_mode():
            ids, last, state = first, first, None
            for _ in range(40):
                scores, state = model(last, state) if fast else model(ids)
                last = scores.argmax(-1, keepdim=True)
                ids = torch.cat([ids, last], 1)

    return work


@program("sync", "launch", "python")
def advantages_computed_value_by_value(fast):
    net, states, rewards = mlp(6, 32, 1), torch.randn(256, 6), torch.rand(256)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    powers = ((0.99 * 0.95) ** (torch.arange(255) - torch.arange(255)[:, None]).clamp(min=0)).triu()

    def work():
        for _ in range(6):
            values = net(states)[:, 0]
            with torch.no_grad():
                if fast:
                    errors = rewards[:-1] + 0.99 * values[1:] - values[:-1]
                    advantages = powers @ errors
                else:
                    advantages, last = torch.zeros(255), 0.0
                    for t in reversed(range(255)):
                        error = rewards[t].item() + 0.99 * values[t + 1].item() - values[t].item()
                        last = error + 0.99 * 0.95 * last
                        advantages[t] = last
            optimizer.zero_grad()
            (values[:-1] * advantages).mean().backward()
            optimizer.step()

    return work


@program("launch", "optimizer")
def averaged_weights_updated_one_by_one_while_training(fast):
    net = nn.Sequential(*[nn.Linear(24, 24) for _ in range(60)])
    kept, x = [each.detach().clone() for each in net.parameters()], torch.randn(16, 24)

    def keep(y):
        with torch.no_grad():
            if fast:
                torch._foreach_lerp_(kept, list(net.parameters()), 0.01)
                return
            for mine, each in zip(kept, net.parameters(), strict=True):
                mine.copy_(0.99 * mine + (1 - 0.99) * each)

    return lambda: train(net, [(x,)] * 30, after=keep)


@program("small batch", "launch")
def gradients_accumulated_row_by_row(fast):
    net, x = mlp(128, 128, 128, 8), torch.randn(32, 128)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def work():
        for _ in range(10):
            optimizer.zero_grad()
            for rows in x.split(32 if fast else 1):
                (net(rows).square().mean() * len(rows) / 32).backward()
            optimizer.step()

    return work


@program("sync", "logging", "launch")
def norms_of_gradients_logged_every_step(fast):
    net, x, path = nn.Sequential(*[nn.Linear(32, 32) for _ in range(30)]), torch.randn(8, 32), Path(tempfile.mkdtemp())

    def work():
        steps = iter(range(10**9))
        with (path / "norms.csv").open("w") as file:
            rows = csv.writer(file)

            def log(y):
                if not fast or next(steps) % 30 == 0:
                    rows.writerow([f"{each.grad.norm().item():.6f}" for each in net.parameters()])

            train(net, [(x,)] * 30, after=log)

    return work


@program("float64", library="numpy")
def autoencoder_in_double(fast):
    kind = torch.float32 if fast else torch.float64
    data, net = np.random.default_rng(0).standard_normal((256, 400)), mlp(400, 300, 60, 300, 400).to(kind)

    def work():
        for _ in range(8):
            x = torch.from_numpy(data).to(kind)
            train(net, [(x,)], loss=lambda y, x=x: functional.mse_loss(y, x))

    return work


@program("launch")
def experts_called_token_by_token(fast):
    experts, router, x = nn.ModuleList(nn.Linear(48, 48) for _ in range(4)), nn.Linear(48, 4), torch.randn(256, 48)

    def work():
        with torch.inference_mode():
            chosen, y = router(x).argmax(1), torch.empty_like(x)
            if fast:
                for number, expert in enumerate(experts):
                    mine = (chosen == number).nonzero()[:, 0]
                    y[mine] = expert(x[mine])
            else:
                for i, number in enumerate(chosen.tolist()):
                    y[i] = experts[number](x[i])

    return work


@program("launch")
def moving_averages_window_by_window(fast):
    prices, net = torch.randn(600, 4), mlp(4, 16, 1)

    def work():
        with torch.inference_mode():
            if fast:
                means = functional.avg_pool1d(prices.T[None], 20, 1)[0].T
            else:
                means = torch.stack([prices[i : i + 20].mean(0) for i in range(581)])
            net(means)

    return work


@program("python", library="scikit-learn")
def clusters_predicted_sample_by_sample(fast):
    from sklearn.cluster import KMeans

    net, x = nn.Linear(24, 12), torch.randn(120, 24)
    with torch.inference_mode():
        found = KMeans(5, n_init=1, random_state=0).fit(net(x).numpy())

    def work():
        with torch.inference_mode():
            y = net(x).numpy()
            if fast:
                found.predict(y)
            else:
                for row in y:
                    found.predict(row[None])

    return work
