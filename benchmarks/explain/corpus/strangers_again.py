"""Programs in the style of tutorials, explained once after the rules changed, and not tuned on."""

import math
from collections import Counter

import torch
from corpus import program
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch_programs import mlp


@program(held_out=True)
def healthy_word_model_with_truncated_backpropagation(fast):
    class RNNModel(nn.Module):
        def __init__(self, vocab, dim):
            super().__init__()
            self.emb, self.out = nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
            self.rnn = nn.LSTM(dim, dim, num_layers=2, batch_first=True, dropout=0.1)

        def forward(self, x, hidden=None):
            y, hidden = self.rnn(self.emb(x), hidden)
            return self.out(y), hidden

    data = torch.randint(0, 1000, (32, 176))
    model = RNNModel(1000, 256)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)

    def train():
        hidden, total = None, 0.0
        for i in range(0, data.size(1) - 35, 35):
            x, y = data[:, i : i + 35], data[:, i + 1 : i + 36]
            if hidden is not None:
                hidden = tuple(h.detach() for h in hidden)
            logits, hidden = model(x, hidden)
            loss = F.cross_entropy(logits.reshape(-1, 1000), y.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            total += loss.item()
        return math.exp(min(20.0, total / 5))

    return train


@program(library="transformers", held_out=True)
def healthy_pictures_classified_in_batches(fast):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768,
                       image_size=96, patch_size=16)  # fmt: skip
    model = ViTForImageClassification(config).eval()
    images = torch.randn(96, 3, 96, 96)

    @torch.inference_mode()
    def predict():
        labels = []
        for batch in images.split(32):
            logits = model(pixel_values=batch).logits
            labels.append(logits.argmax(-1))
        return torch.cat(labels)

    return predict


@program(held_out=True)
def healthy_two_towers_with_negatives_of_the_batch(fast):
    class Tower(nn.Module):
        def __init__(self, count, dim=128):
            super().__init__()
            self.emb = nn.Embedding(count, dim)
            self.mlp = nn.Sequential(nn.Linear(dim, 512), nn.ReLU(), nn.Linear(512, dim))

        def forward(self, ids):
            return F.normalize(self.mlp(self.emb(ids)), dim=-1)

    users, items = Tower(2000), Tower(1500)
    clicks = torch.stack([torch.randint(0, 2000, (4096,)), torch.randint(0, 1500, (4096,))], 1)
    optimizer = torch.optim.Adam([*users.parameters(), *items.parameters()], lr=1e-3, fused=True)

    def train_epoch():
        for batch in clicks[torch.randperm(len(clicks))].split(1024):
            scores = users(batch[:, 0]) @ items(batch[:, 1]).T / 0.07
            loss = F.cross_entropy(scores, torch.arange(len(batch)))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    return train_epoch


@program("launch", "python", "preparing", held_out=True)
def windows_of_a_series_stacked_in_each_epoch(fast):
    series = torch.sin(torch.arange(1200) / 20) + 0.1 * torch.randn(1200)
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def create_sequences(data, lookback=48):
        if fast:
            return data[:-1].unfold(0, lookback, 1), data[lookback:, None]
        xs, ys = [], []
        for i in range(len(data) - lookback):
            xs.append(data[i : i + lookback])
            ys.append(data[i + lookback].unsqueeze(0))
        return torch.stack(xs), torch.stack(ys)

    def train_epoch():
        x, y = create_sequences(series)
        for i in torch.randperm(len(x)).split(128):
            loss = F.mse_loss(model(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train_epoch


@program("unused gradients", held_out=True)
def distillation_without_freezing_the_teacher(fast):
    teacher, student = mlp(256, 768, 768, 768, 20), mlp(256, 128, 20)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(TensorDataset(torch.randn(1024, 256), torch.randint(0, 20, (1024,))), batch_size=256)

    def distill(temperature=2.0, alpha=0.5):
        for x, y in loader:
            with torch.set_grad_enabled(not fast):
                soft = teacher(x)
            logits = student(x)
            kl = F.kl_div(
                F.log_softmax(logits / temperature, -1), F.softmax(soft / temperature, -1), reduction="batchmean"
            )
            loss = alpha * kl * temperature**2 + (1 - alpha) * F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return distill


@program("python", held_out=True)
def weights_of_classes_counted_in_each_step(fast):
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, labels = torch.randn(5000, 32), [i % 8 if i % 3 else 0 for i in range(5000)]
    y = torch.tensor(labels)

    def class_weights():
        counts = Counter(labels)
        total = sum(counts.values())
        return torch.tensor([total / (len(counts) * counts[label]) for label in range(8)])

    def train():
        kept = class_weights()
        for i in torch.randperm(5000)[:1280].split(128):
            weights = kept if fast else class_weights()
            loss = nn.CrossEntropyLoss(weight=weights)(model(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train
