"""Programs that were held out when they were written; what explains programs has changed since."""

import copy
import logging
import tempfile
import warnings

import numpy as np
import pandas as pd
import torch
from corpus import program
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch_programs import mlp, train


@program("launch")
def centers_moved_cluster_by_cluster(fast):
    points, centers = torch.randn(2000, 8), torch.randn(64, 8)

    def work():
        found = centers
        for _ in range(8):
            nearest = torch.cdist(points, found).argmin(1)
            if fast:
                sums = torch.zeros(64, 8).index_add_(0, nearest, points)
                found = sums / nearest.bincount(minlength=64).clamp(min=1)[:, None]
            else:
                found = torch.stack(
                    [points[nearest == k].mean(0) if (nearest == k).any() else found[k] for k in range(64)]
                )

    return work


@program("hooks", "sync", "launch", "python", "logging")
def activations_watched_by_hooks(fast):
    net, x = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12)]), torch.randn(32, 64)
    history: dict[int, list[tuple[float, float, float]]] = {}

    def watch(layer, given, y):
        history.setdefault(id(layer), []).append(
            (y.mean().item(), y.std().item(), (y.abs() < 1e-3).float().mean().item())
        )

    if not fast:
        for layer in net:
            layer.register_forward_hook(watch)

    def work():
        history.clear()
        train(net, [(x,)] * 20)

    return work


@program("python", "loading", library="numpy")
def negatives_drawn_item_by_item(fast):
    random = np.random.default_rng(0)
    weights = random.random(4000) ** 0.75
    weights /= weights.sum()
    users, items = nn.Embedding(500, 32), nn.Embedding(4000, 32)
    optimizer = torch.optim.Adam([*users.parameters(), *items.parameters()], fused=True)

    def work():
        for step in range(6):
            user = torch.arange(step * 32, step * 32 + 32)
            if fast:
                drawn = random.choice(4000, (32, 5), p=weights)
            else:
                drawn = np.stack([random.choice(4000, 5, p=weights) for _ in range(32)])
            optimizer.zero_grad()
            scores = (users(user)[:, None] * items(torch.from_numpy(drawn))).sum(-1)
            functional.softplus(scores).mean().backward()
            optimizer.step()

    return work


@program("launch", "small batch", "python", library="transformers")
def pictures_processed_one_by_one_for_a_vit(fast):
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    processor = ViTImageProcessor(size={"height": 64, "width": 64})
    model = ViTModel(ViTConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, image_size=64, patch_size=16
    )).eval()  # fmt: skip
    random = np.random.default_rng(0)
    pictures = [Image.fromarray(random.integers(0, 255, (64, 64, 3), dtype=np.uint8)) for _ in range(24)]

    def work():
        with torch.inference_mode():
            if fast:
                return model(**processor(pictures, return_tensors="pt")).last_hidden_state[:, 0]
            return torch.cat(
                [model(**processor(each, return_tensors="pt")).last_hidden_state[:, 0] for each in pictures]
            )

    return work


@program("launch", "eager", "optimizer", library="timm")
def average_of_a_timm_model_tensor_by_tensor(fast):
    import timm
    from timm.utils import ModelEmaV2, ModelEmaV3

    model = timm.create_model("resnet10t", num_classes=10)
    average = ModelEmaV3(model, decay=0.999, foreach=True) if fast else ModelEmaV2(model, decay=0.999)
    optimizer, x = torch.optim.SGD(model.parameters(), 1e-3), torch.randn(2, 3, 32, 32)

    def work():
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            average.update(model)

    return work


@program("launch", "python", "sync", library="torchmetrics")
def metrics_returned_for_each_batch(fast):
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

    metrics = MetricCollection([MulticlassAccuracy(10), MulticlassF1Score(10), MulticlassConfusionMatrix(10)])
    net, x, labels = mlp(32, 64, 10), torch.randn(640, 32), torch.randint(0, 10, (640,))

    def work():
        metrics.reset()
        with torch.inference_mode():
            for part, wanted in zip(x.split(16), labels.split(16), strict=True):
                scores = net(part)
                metrics.update(scores, wanted) if fast else metrics(scores, wanted)
            metrics.compute()

    return work


@program("python", "loading", library="pandas")
def visits_grouped_in_each_epoch(fast):
    random = np.random.default_rng(0)
    table = pd.DataFrame({
        "user": random.integers(0, 300, 6000), "page": random.integers(0, 200, 6000), "when": random.random(6000)
    })  # fmt: skip
    bag, head = nn.EmbeddingBag(200, 32), mlp(32, 32, 1)
    optimizer = torch.optim.SGD([*bag.parameters(), *head.parameters()], 1e-2)

    def sequences():
        return [torch.tensor(rows.sort_values("when")["page"].to_numpy()) for _, rows in table.groupby("user")]

    ready = sequences()

    def work():
        every = ready if fast else sequences()
        for first in range(0, len(every), 50):
            chosen = every[first : first + 50]
            starts = torch.tensor([0, *(len(each) for each in chosen[:-1])]).cumsum(0)
            optimizer.zero_grad()
            head(bag(torch.cat(chosen), starts)).square().mean().backward()
            optimizer.step()

    return work


@program("autograd", library="diffusers")
def pictures_sampled_with_gradients(fast):
    from diffusers import DDPMScheduler, UNet2DModel

    net = UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32),
        norm_num_groups=4, down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    ).eval()  # fmt: skip
    scheduler = DDPMScheduler(1000)
    scheduler.set_timesteps(12)

    def work():
        x = torch.randn(4, 3, 8, 8)
        with torch.set_grad_enabled(not fast):
            for t in scheduler.timesteps:
                x = scheduler.step(net(x, t).sample, t, x).prev_sample

    return work


@program("logging", "saving", "file", "python", library="Lightning", steady=True)
def lightning_writes_a_table_at_each_step(fast):
    import lightning as L
    from lightning.pytorch.loggers import CSVLogger

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp(32, 64, 8)

        def training_step(self, batch, index):
            y = self.net(batch[0])
            loss = y.square().mean()
            self.log_dict({"loss": loss} | {f"mean {i}": each for i, each in enumerate(y.mean(0))})
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    data = TensorDataset(torch.randn(3200, 32))

    def fit():
        logger = CSVLogger(tempfile.mkdtemp(), flush_logs_every_n_steps=100 if fast else 1)
        trainer = L.Trainer(
            max_epochs=1, accelerator="cpu", logger=logger, log_every_n_steps=50 if fast else 1,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(data, batch_size=16))

    return fit


@program("launch", library="torch audio")
def spectrogram_made_frame_by_frame(fast):
    sound, window = torch.randn(16_000), torch.hann_window(400)
    net = nn.Sequential(nn.Conv1d(201, 32, 3), nn.ReLU(), nn.Conv1d(32, 8, 3))

    def work():
        with torch.inference_mode():
            if fast:
                spectrum = torch.stft(sound, 400, 160, window=window, center=False, return_complex=True).abs()
            else:
                frames = [sound[i : i + 400] * window for i in range(0, 16_000 - 399, 160)]
                spectrum = torch.stack([torch.fft.rfft(frame).abs() for frame in frames], 1)
            net(spectrum.log1p()[None])

    return work


@program("launch", "small batch")
def derivatives_taken_point_by_point(fast):
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    points, optimizer = torch.linspace(0, 1, 64)[:, None], torch.optim.Adam(net.parameters(), fused=True)

    def slope(x):
        x = x.clone().requires_grad_()
        y = net(x)
        return y, torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    def work():
        for _ in range(3):
            optimizer.zero_grad()
            if fast:
                y, dy = slope(points)
                loss = (dy + y).square().mean()
            else:
                parts = [slope(x) for x in points]
                loss = torch.stack([(dy + y).square().mean() for y, dy in parts]).mean()
            loss.backward()
            optimizer.step()

    return work


@program("loading")
def crops_cut_by_the_collator(fast):
    pictures = np.random.default_rng(0).integers(0, 255, (256, 40, 40, 3), dtype=np.uint8)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    random = np.random.default_rng(1)

    def collate(chosen):
        made = []
        for picture in chosen:
            y, x = random.integers(0, 8, 2)
            crop = picture[y : y + 32, x : x + 32]
            if random.random() < 0.5:
                crop = crop[:, ::-1]
            crop = (crop.astype(np.float32) / 255 - 0.5) / 0.25
            made.append(torch.from_numpy(np.ascontiguousarray(crop.transpose(2, 0, 1))))
        return (torch.stack(made),)

    ready = list(DataLoader(pictures, batch_size=32, collate_fn=collate))  # type: ignore[arg-type]
    return lambda: train(net, ready if fast else DataLoader(pictures, batch_size=32, collate_fn=collate))  # type: ignore[arg-type]


@program("copying")
def clients_copy_the_global_model(fast):
    server = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(40)])
    reused, batches = copy.deepcopy(server), torch.randn(8, 8, 32)

    def work():
        with torch.no_grad():
            weights = {name: torch.zeros_like(each) for name, each in server.state_dict().items()}
        for x in batches:
            if fast:
                client = reused
                client.load_state_dict(server.state_dict())
            else:
                client = copy.deepcopy(server)
            optimizer = torch.optim.SGD(client.parameters(), 1e-2)
            client(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, each in client.state_dict().items():
                weights[name] += each / len(batches)
        server.load_state_dict(weights)

    return work


@program(library="diffusers")
def healthy_unet_of_batches(fast):
    from diffusers import UNet2DModel

    net = UNet2DModel(
        sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(64, 128),
        norm_num_groups=8, down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    ).eval()  # fmt: skip
    x = torch.randn(8, 3, 32, 32)

    def work():
        with torch.inference_mode():
            for step in range(2):
                net(x, step)

    return work


@program()
def healthy_lstm_training(fast):
    rnn, head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 8)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], fused=True)
    x, labels = torch.randn(64, 48, 64), torch.randint(0, 8, (64,))

    def work():
        for _ in range(2):
            optimizer.zero_grad()
            functional.cross_entropy(head(rnn(x)[1][0][0]), labels).backward()
            optimizer.step()

    return work
