"""Programs that were held out when they were written; what explains programs has changed since."""

import tempfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from corpus import program
from hugging_face import bert, llama
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torch_programs import mlp, train


@program("launch", "small batch")
def folds_scored_by_models_row_by_row(fast):
    models, x = [mlp(16, 48, 48, 3) for _ in range(5)], torch.randn(80, 16)

    def work():
        with torch.no_grad():
            if fast:
                return torch.stack([model(x).softmax(-1) for model in models]).mean(0)
            return torch.stack([torch.stack([model(row).softmax(-1) for model in models]).mean(0) for row in x])

    return work


@program("loading")
def numbers_read_from_lines_in_the_dataset(fast):
    path = Path(tempfile.mkdtemp(), "table.csv")
    rows = np.random.default_rng(0).random((1200, 48))
    path.write_text("\n".join(",".join(f"{each:.6f}" for each in row) for row in rows))

    class Lines(Dataset):
        def __init__(self):
            self.lines = path.read_text().splitlines()

        def __len__(self):
            return len(self.lines)

        def __getitem__(self, i):
            return torch.tensor([float(word) for word in self.lines[i].split(",")])

    net, table = mlp(48, 64, 1), torch.tensor(rows, dtype=torch.float32)
    data = Lines()

    def work():
        batches = table.split(32) if fast else DataLoader(data, batch_size=32)
        train(net, ((x,) for x in batches))

    return work


@program("launch", "sync", "python")
def paddings_removed_row_by_row(fast):
    lengths, hidden = torch.randint(4, 64, (192,)), torch.randn(192, 64, 48)
    head = nn.Linear(48, 8)

    def work():
        with torch.inference_mode():
            if fast:
                mask = torch.arange(64) < lengths[:, None]
                pooled = (hidden * mask[..., None]).sum(1) / lengths[:, None]
            else:
                pooled = torch.stack([row[: int(length)].mean(0) for row, length in zip(hidden, lengths, strict=True)])
            head(pooled)

    return work


@program("launch", "small batch", library="transformers")
def choices_scored_by_a_language_model_one_by_one(fast):
    model, choices = llama(), torch.randint(3, 200, (24, 16))

    def work():
        with torch.inference_mode():
            scores = []
            for rows in choices.split(24 if fast else 1):
                logits = model(input_ids=rows).logits[:, :-1].log_softmax(-1)
                scores.append(logits.gather(-1, rows[:, 1:, None]).sum((1, 2)))
            torch.cat(scores).argmax()

    return work


@program("saving", "file", "logging")
def states_saved_after_each_epoch(fast):
    path = Path(tempfile.mkdtemp(), "state.pt")
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    optimizer, x = torch.optim.AdamW(net.parameters(), fused=True), torch.randn(64, 256)

    def work():
        for epoch in range(10):
            for _ in range(3):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
            if not fast or epoch == 9:
                torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)

    return work


@program("python", "loading")
def replay_drawn_with_priorities_in_python(fast):
    import random

    priorities = [random.random() + 0.01 for _ in range(5000)]
    states, net = torch.randn(5000, 16), mlp(16, 64, 4)
    weights = torch.tensor(priorities)

    def drawn():
        if fast:
            return torch.multinomial(weights, 32, replacement=True)
        total, chosen = sum(priorities), []
        for _ in range(32):
            point, place = random.random() * total, 0
            while place < 4999 and point > priorities[place]:
                point -= priorities[place]
                place += 1
            chosen.append(place)
        return torch.tensor(chosen)

    return lambda: train(net, ((states[drawn()],) for _ in range(4)))


@program("unused gradients", library="transformers")
def classifier_trained_on_a_frozen_bert(fast):
    body, head = bert(), nn.Linear(64, 3)
    body.requires_grad_(not fast)
    ids, labels = torch.randint(3, 500, (16, 48)), torch.randint(0, 3, (16,))
    optimizer = torch.optim.AdamW(head.parameters(), fused=True)

    def work():
        for _ in range(3):
            optimizer.zero_grad()
            body.zero_grad()
            functional.cross_entropy(head(body(input_ids=ids).last_hidden_state[:, 0]), labels).backward()
            optimizer.step()

    return work


@program("loading", library="torch")
def subset_indexed_sample_by_sample(fast):
    pictures, labels = torch.rand(2000, 3, 16, 16), torch.randint(0, 10, (2000,))
    chosen = torch.randperm(2000)[:1024].tolist()
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 10))
    data = Subset(TensorDataset(pictures, labels), chosen)
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)

    def work():
        if fast:
            places = torch.tensor(chosen).split(64)
            batches = ((pictures[each], labels[each]) for each in places)
        else:
            batches = iter(DataLoader(data, batch_size=64))
        for x, y in batches:
            optimizer.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            optimizer.step()

    return work


@program("launch", "python")
def relations_of_words_written_pair_by_pair(fast):
    words, bias = torch.randn(48, 32), nn.Embedding(32, 1)

    def work():
        with torch.inference_mode():
            if fast:
                places = torch.arange(48)
                distance = (places[:, None] - places).clamp(-16, 15) + 16
                scores = words @ words.T + bias(distance)[..., 0]
            else:
                scores = torch.empty(48, 48)
                for i in range(48):
                    for j in range(48):
                        distance = torch.tensor(max(-16, min(15, i - j)) + 16)
                        scores[i, j] = words[i] @ words[j] + bias(distance)[0]
            scores.softmax(-1) @ words

    return work


@program("copying", "launch", "python")
def best_weights_kept_as_copies(fast):
    net, x = nn.Sequential(*[nn.Sequential(nn.Linear(24, 24), nn.ReLU()) for _ in range(30)]), torch.randn(32, 24)
    kept: OrderedDict[str, torch.Tensor] = OrderedDict()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def work():
        import copy

        for step in range(20):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            if not fast or step == 19:
                kept.clear()
                kept.update(copy.deepcopy(net.state_dict()))

    return work


@program()
def healthy_convolutions_for_inference(fast):
    net = nn.Sequential(nn.Conv2d(8, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)).eval()
    x = torch.randn(8, 8, 64, 64)

    def work():
        with torch.inference_mode():
            for _ in range(3):
                net(x)

    return work


@program()
def healthy_classifier_with_a_loader(fast):
    data = torch.randn(2048, 256)
    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def work():
        for x in data.split(256):
            optimizer.zero_grad(set_to_none=True)
            net(x).square().mean().backward()
            optimizer.step()

    return work
