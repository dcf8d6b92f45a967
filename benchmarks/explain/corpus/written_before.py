"""Programs that were held out when they were written; what explains programs has changed since."""

import collections
import json
import random
import re
import tempfile
from pathlib import Path

import numpy as np
import torch
from corpus import program
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torch_programs import mlp, train


@program("saving", "file", "python", "logging", library="torchvision")
def samples_drawn_to_a_file_every_step(fast):
    from torchvision.utils import save_image

    net, x, folder = mlp(64, 128, 3 * 24 * 24), torch.randn(32, 64), Path(tempfile.mkdtemp())
    steps = iter(range(10**9))

    def draw(y):
        step = next(steps)
        if not fast or step % 25 == 0:
            save_image(y.detach().view(-1, 3, 24, 24), folder / f"{step % 10}.png", normalize=True)

    return lambda: train(net, [(x,)] * 25, after=draw)


class Block(nn.Module):
    def __init__(self, fast, width=128, heads=4):
        super().__init__()
        self.fast, self.heads = fast, heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        shape = batch, length, self.heads, width // self.heads
        q, k, v = (each.view(shape).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        if self.fast:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
            mask = torch.tril(torch.ones(length, length, dtype=torch.bool))
            y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


@program("attention")
def attention_written_by_hand(fast):
    net, x = nn.Sequential(*[Block(fast) for _ in range(2)]), torch.randn(2, 512, 128)

    def work():
        with torch.inference_mode():
            for _ in range(4):
                net(x)

    return work


@program("attention")
def attention_asked_for_its_weights(fast):
    layer, x = nn.MultiheadAttention(128, 4, batch_first=True), torch.randn(2, 640, 128)

    def work():
        with torch.inference_mode():
            for _ in range(4):
                layer(x, x, x, need_weights=not fast)

    return work


@program("python", "loading", "tokenize")
def words_counted_in_each_epoch(fast):
    texts = [" ".join(f"word{(i * j) % 97}," for j in range(60)) for i in range(200)]
    places, net = {f"word{i}": i for i in range(97)}, mlp(97, 32, 2)

    def features(text):
        row = [0.0] * 97
        for word, count in collections.Counter(re.findall(r"\w+", text.lower())).items():
            row[places[word]] = float(count)
        return row

    ready = torch.tensor([features(text) for text in texts])

    def work():
        for _ in range(2):
            for i in range(0, 200, 20):
                rows = ready[i : i + 20] if fast else torch.tensor([features(text) for text in texts[i : i + 20]])
                train(net, [(rows,)])

    return work


class Sounds(Dataset):
    def __init__(self, fast):
        self.sounds, self.fast, self.window = torch.randn(128, 4000), fast, torch.hann_window(256)

    def spectra(self, sounds):
        return torch.stft(sounds, 256, 64, window=self.window, return_complex=True).abs().log1p()

    def __len__(self):
        return 128

    def __getitem__(self, i):
        return self.sounds[i] if self.fast else self.spectra(self.sounds[i])


@program("loading", "launch", library="torch audio")
def spectrum_of_each_sound_in_the_dataset(fast):
    data, net = Sounds(fast), nn.Sequential(nn.Conv2d(1, 4, 5, 4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    net(data.spectra(data.sounds[:1])[:, None])

    def work():
        batches = DataLoader(data, batch_size=32)
        train(net, (((data.spectra(x) if fast else x)[:, None],) for x in batches))

    return work


@program("python", "launch", "grow", "loading")
def transitions_sampled_from_a_deque(fast):
    memory = collections.deque(
        ((torch.randn(8), random.randrange(4), random.random(), torch.randn(8)) for _ in range(2000)), maxlen=2000
    )
    states, actions, rewards, following = (
        torch.stack([torch.as_tensor(each[place]) for each in memory]) for place in range(4)
    )
    net = mlp(8, 64, 4)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def work():
        for _ in range(40):
            if fast:
                chosen = torch.randint(0, 2000, (64,))
                batch = states[chosen], actions[chosen], rewards[chosen].float(), following[chosen]
            else:
                picked = random.sample(memory, 64)
                batch = (
                    torch.stack([each[0] for each in picked]), torch.tensor([each[1] for each in picked]),
                    torch.tensor([each[2] for each in picked]), torch.stack([each[3] for each in picked]),
                )  # fmt: skip
            x, action, reward, later = batch
            with torch.no_grad():
                target = reward + 0.99 * net(later).max(1).values
            optimizer.zero_grad()
            functional.mse_loss(net(x).gather(1, action[:, None])[:, 0], target).backward()
            optimizer.step()

    return work


@program("launch", "sync", "python", library="torchvision")
def boxes_suppressed_in_a_loop(fast):
    from torchvision.ops import box_iou, nms

    corners = torch.rand(3, 120, 2)
    boxes, scores = torch.cat([corners, corners + 0.2], -1), torch.rand(3, 120)

    def suppress(boxes, scores):
        kept, order = [], scores.argsort(descending=True)
        while len(order):
            kept.append(order[0].item())
            overlap = box_iou(boxes[order[:1]], boxes[order[1:]])[0]
            order = order[1:][overlap <= 0.5]
        return torch.tensor(kept)

    def work():
        for mine, values in zip(boxes, scores, strict=True):
            nms(mine, values, 0.5) if fast else suppress(mine, values)

    return work


@program("launch", "sync", "python")
def tags_decoded_tag_by_tag(fast):
    moves, emissions = torch.randn(12, 12), torch.randn(40, 12)

    def work():
        with torch.inference_mode():
            best = emissions[0]
            for given in emissions[1:]:
                if fast:
                    best = (best[:, None] + moves).max(0).values + given
                else:
                    best = torch.stack([(best + moves[:, tag]).max() + given[tag] for tag in range(12)])

    return work


@program("logging", "python", "sync", "file", "launch")
def predictions_written_as_json_every_step(fast):
    net, x, path = mlp(32, 64, 128), torch.randn(64, 32), Path(tempfile.mkdtemp(), "predictions.jsonl")

    def work():
        with path.open("w") as file:

            def log(y):
                if not fast:
                    file.write(json.dumps({"predictions": y.tolist()}) + "\n")

            train(net, [(x,)] * 30, after=log)

    return work


@program("one-hot")
def words_looked_up_by_one_hot_products(fast):
    table, ids = torch.randn(4000, 64), torch.randint(0, 4000, (8, 128))

    def work():
        with torch.inference_mode():
            for rows in ids:
                x = table[rows] if fast else functional.one_hot(rows, 4000).float() @ table
                x.relu().mean(0)

    return work


@program("unused gradients")
def generator_differentiated_for_the_discriminator(fast):
    make, judge = mlp(64, 512, 512, 512, 128), mlp(128, 128, 1)
    optimizers = [torch.optim.SGD(each.parameters(), 1e-3) for each in (judge, make)]
    real = torch.randn(64, 128)

    def work():
        for step in range(12):
            fake = make(torch.randn(64, 64))
            optimizers[0].zero_grad()
            (judge(fake.detach() if fast else fake).mean() - judge(real).mean()).backward(retain_graph=not fast)
            optimizers[0].step()
            if step % 4 == 3:
                optimizers[1].zero_grad()
                (-judge(make(torch.randn(64, 64))).mean()).backward()
                optimizers[1].step()

    return work


@program("python", library="numpy")
def rewards_discounted_in_numpy(fast):
    rewards, net, states = np.random.default_rng(0).random(3000), mlp(8, 32, 1), torch.randn(3000, 8)
    powers = 0.99 ** np.arange(3000)

    def work():
        for _ in range(4):
            if fast:
                returns = np.cumsum((rewards * powers)[::-1])[::-1] / powers
            else:
                returns = np.zeros(3000)
                total = 0.0
                for i in reversed(range(3000)):
                    total = rewards[i] + 0.99 * total
                    returns[i] = total
            target = torch.from_numpy(np.ascontiguousarray(returns)).float()
            train(net, [(states,)], loss=lambda y, target=target: functional.mse_loss(y[:, 0], target))

    return work
