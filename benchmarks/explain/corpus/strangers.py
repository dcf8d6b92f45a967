"""Programs in the style of tutorials, half of them healthy; explained once before the rules changed."""

import random
import tempfile
from collections import deque
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from corpus import program
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

WORDS = ["the", "film", "was", "good", "bad", "a", "plot", "slow", "story", "actor", "great", "dull", "we", "liked"]


def tokenizer_of_words():
    from transformers import BertTokenizerFast

    path = Path(tempfile.mkdtemp(), "vocab.txt")
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    return BertTokenizerFast(str(path))


def reviews(count, shortest=6, longest=30):
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(shortest, longest))) for _ in range(count)]


@program(library="torchvision")
def healthy_finetuning_of_a_resnet(fast):
    from torchvision.models import resnet18

    class Finetuner:
        def __init__(self):
            self.model = resnet18(num_classes=10).to(memory_format=torch.channels_last)
            self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, fused=True)
            images, labels = torch.randn(64, 3, 48, 48), torch.randint(0, 10, (64,))
            self.loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)

        def run_epoch(self):
            self.model.train()
            running = 0.0
            for images, labels in self.loader:
                images = images.to(memory_format=torch.channels_last)
                self.optimizer.zero_grad(set_to_none=True)
                loss = self.criterion(self.model(images), labels)
                loss.backward()
                self.optimizer.step()
                running += loss.item() * images.size(0)
            return running / len(self.loader.dataset)

    return Finetuner().run_epoch


@program(library="transformers Trainer")
def healthy_classifier_of_reviews(fast):
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    tokenizer = tokenizer_of_words()
    encoded = tokenizer(reviews(64, 24, 36), truncation=True, max_length=40)
    features = [{key: encoded[key][i] for key in encoded} | {"labels": i % 2} for i in range(64)]
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=1024)  # fmt: skip
    model = BertForSequenceClassification(config)
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=16, per_device_eval_batch_size=64, num_train_epochs=1,
        learning_rate=2e-5, weight_decay=0.01, logging_steps=50, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, optim="adamw_torch_fused", train_sampling_strategy="group_by_length",
    )  # fmt: skip
    return lambda: Trainer(
        model=model, args=arguments, train_dataset=features, data_collator=DataCollatorWithPadding(tokenizer)
    ).train()


@program(library="transformers")
def healthy_batched_generation(fast):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=2000, bos_token_id=1, eos_token_id=2, n_embd=384, n_layer=3, n_head=8, n_positions=256)
    ).eval()
    prompts = torch.randint(3, 2000, (32, 32))

    @torch.inference_mode()
    def answer():
        return model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=16, min_new_tokens=16,
                              do_sample=False, pad_token_id=0, use_cache=True)  # fmt: skip

    return answer


@program(library="Lightning", steady=True)
def healthy_lightning_convnet(fast):
    import logging
    import warnings

    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    class LitConvNet(L.LightningModule):
        def __init__(self, lr=1e-3):
            super().__init__()
            self.save_hyperparameters()
            self.features = nn.Sequential(
                nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            )  # fmt: skip
            self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(64 * 49, 128), nn.ReLU(), nn.Linear(128, 10))

        def forward(self, x):
            return self.classifier(self.features(x))

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self(x), y)
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val_loss", F.cross_entropy(self(x), y))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, fused=True)

    x, y = torch.rand(576, 1, 28, 28), torch.randint(0, 10, (576,))
    train = DataLoader(TensorDataset(x[:512], y[:512]), batch_size=64, shuffle=True)
    valid = DataLoader(TensorDataset(x[512:], y[512:]), batch_size=64)

    def fit():
        trainer = L.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)  # fmt: skip
        trainer.fit(LitConvNet(), train, valid)

    return fit


@program()
def healthy_compiled_transformer(fast):
    class Block(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads, self.ln1, self.ln2 = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

        def forward(self, x):
            B, T, C = x.shape
            q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
            return x + self.mlp(self.ln2(x))

    class TinyGPT(nn.Module):
        def __init__(self, vocab=512, dim=192, heads=6, depth=3, block_size=128):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(block_size, dim)
            self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(depth)])
            self.head = nn.Linear(dim, vocab, bias=False)

        def forward(self, idx):
            x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
            return self.head(self.blocks(x))

    data = torch.randint(0, 512, (20000,))
    model: nn.Module = torch.compile(TinyGPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def get_batch(batch_size=8, block_size=128):
        ix = torch.randint(len(data) - block_size - 1, (batch_size, 1)) + torch.arange(block_size + 1)
        chunk = data[ix]
        return chunk[:, :-1], chunk[:, 1:]

    def train():
        for _ in range(4):
            xb, yb = get_batch()
            logits = model(xb)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), yb.reshape(-1))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    return train


@program(library="torch-geometric")
def healthy_graph_network(fast):
    from torch_geometric.data import Data
    from torch_geometric.nn import GCNConv

    class GCN(nn.Module):
        def __init__(self, in_channels, hidden, out_channels):
            super().__init__()
            self.conv1 = GCNConv(in_channels, hidden, cached=True)
            self.conv2 = GCNConv(hidden, out_channels, cached=True)

        def forward(self, x, edge_index):
            x = F.dropout(x, p=0.5, training=self.training)
            x = self.conv1(x, edge_index).relu()
            x = F.dropout(x, p=0.5, training=self.training)
            return self.conv2(x, edge_index)

    data = Data(x=torch.rand(2700, 1400), edge_index=torch.randint(0, 2700, (2, 10500)), y=torch.randint(0, 7, (2700,)))
    data.train_mask = torch.rand(2700) < 0.1
    model = GCN(1400, 64, 7)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4, fused=True)

    def train():
        model.train()
        for _ in range(5):
            optimizer.zero_grad()
            out = model(data.x, data.edge_index)
            loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
            loss.backward()
            optimizer.step()

    return train


@program(library="diffusers")
def healthy_diffusion_training(fast):
    from diffusers import DDPMScheduler, UNet2DModel

    unet = UNet2DModel(sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=8,
                       block_out_channels=(32, 64), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                       up_block_types=("AttnUpBlock2D", "UpBlock2D"))  # fmt: skip
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4, fused=True)
    loader = DataLoader(TensorDataset(torch.randn(32, 3, 16, 16)), batch_size=16, shuffle=True, drop_last=True)

    def epoch():
        for (clean,) in loader:
            noise = torch.randn_like(clean)
            timesteps = torch.randint(0, scheduler.config.num_train_timesteps, (clean.shape[0],))
            noisy = scheduler.add_noise(clean, noise, timesteps)
            loss = F.mse_loss(unet(noisy, timesteps, return_dict=False)[0], noise)
            loss.backward()
            nn.utils.clip_grad_norm_(unet.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()

    return epoch


@program("loading", library="pandas")
def houses_read_with_iloc(fast):
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(2000, 12)), columns=[f"feature_{i}" for i in range(12)])
    frame["zone"] = np.random.default_rng(1).choice(["north", "south", "east"], 2000)
    frame["price"] = frame[[f"feature_{i}" for i in range(12)]].sum(axis=1)

    class HouseDataset(Dataset):
        def __init__(self, df):
            self.df = df
            self.features = [c for c in df.columns if c.startswith("feature")]
            self.zones = {"north": 0, "south": 1, "east": 2}

        def __len__(self):
            return len(self.df)

        def __getitem__(self, idx):
            row = self.df.iloc[idx]
            x = torch.tensor([row[c] for c in self.features], dtype=torch.float32)
            zone = torch.tensor(self.zones[row["zone"]])
            return x, zone, torch.tensor(row["price"], dtype=torch.float32)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.zone = nn.Embedding(3, 4)
            self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

        def forward(self, x, zone):
            return self.net(torch.cat([x, self.zone(zone)], dim=1)).squeeze(1)

    dataset: Dataset = HouseDataset(frame)
    if fast:
        columns = frame[[c for c in frame.columns if c.startswith("feature")]].to_numpy(np.float32)
        zones = frame["zone"].map({"north": 0, "south": 1, "east": 2}).to_numpy()
        prices = torch.tensor(frame["price"].to_numpy(np.float32))
        dataset = TensorDataset(torch.tensor(columns), torch.tensor(zones), prices)
    model, criterion = Model(), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=64, shuffle=True)

    def train_one_epoch():
        for x, zone, price in loader:
            optimizer.zero_grad()
            loss = criterion(model(x, zone), price)
            loss.backward()
            optimizer.step()

    return train_one_epoch


@program("python", "launch", "convert", library="gymnasium")
def replay_kept_as_a_deque_of_tuples(fast):
    class ReplayMemory:
        def __init__(self, capacity):
            self.memory = deque(maxlen=capacity)

        def push(self, *transition):
            self.memory.append(transition)

        def sample(self, batch_size):
            transitions = random.sample(self.memory, batch_size)
            states, actions, rewards, following, done = zip(*transitions, strict=True)
            return (
                torch.tensor([list(s) for s in states], dtype=torch.float32), torch.tensor(actions),
                torch.tensor(rewards, dtype=torch.float32),
                torch.tensor([list(s) for s in following], dtype=torch.float32),
                torch.tensor(done, dtype=torch.float32),
            )  # fmt: skip

    class ReplayArrays:
        def __init__(self, capacity):
            self.states, self.following = np.empty((2, capacity, 8), np.float32)
            self.actions = np.empty(capacity, np.int64)
            self.rewards, self.done = np.empty((2, capacity), np.float32)
            self.count, self.capacity = 0, capacity

        def push(self, *transition):
            i = self.count % self.capacity
            self.states[i], self.actions[i], self.rewards[i], self.following[i], self.done[i] = transition
            self.count += 1

        def sample(self, batch_size):
            chosen = np.random.randint(0, min(self.count, self.capacity), batch_size)
            kept = (self.states, self.actions, self.rewards, self.following, self.done)
            return tuple(torch.from_numpy(each[chosen]) for each in kept)

    memory = (ReplayArrays if fast else ReplayMemory)(5000)
    for _ in range(2000):
        state = np.random.rand(8).astype(np.float32)
        memory.push(state, random.randrange(4), random.random(), state * 0.9, random.random() < 0.02)
    policy, target = (nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)) for _ in range(2))
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)

    def optimize():
        for _ in range(10):
            states, actions, rewards, following, done = memory.sample(256)
            q = policy(states).gather(1, actions[:, None]).squeeze(1)
            with torch.no_grad():
                expected = rewards + 0.99 * (1 - done) * target(following).max(1).values
            loss = F.smooth_l1_loss(q, expected)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return optimize


@program("small batch", "launch")
def private_gradients_sample_by_sample(fast):
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(64, 64), torch.randint(0, 10, (64,))

    def loss_of(parameters, x, y):
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

    gradients_of_all = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))

    def private_step(max_norm=1.0, sigma=0.5):
        if fast:
            found = gradients_of_all({name: each.detach() for name, each in parameters.items()}, images, labels)
            norms = sum(each.flatten(1).square().sum(1) for each in found.values()).sqrt()
            scale = (max_norm / (norms + 1e-6)).clamp(max=1.0)
            summed = {name: torch.einsum("b,b...->...", scale, each) for name, each in found.items()}
        else:
            summed = {name: torch.zeros_like(each) for name, each in parameters.items()}
            for x, y in zip(images, labels, strict=True):
                model.zero_grad()
                F.cross_entropy(model(x.unsqueeze(0)), y.unsqueeze(0)).backward()
                norm = torch.sqrt(sum(each.grad.square().sum() for each in parameters.values()))
                scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
                for name, each in parameters.items():
                    summed[name] += each.grad * scale
        for name, each in parameters.items():
            each.grad = (summed[name] + sigma * max_norm * torch.randn_like(each)) / len(images)
        optimizer.step()

    def work():
        for _ in range(2):
            private_step()

    return work


@program("loading", library="torch-geometric")
def graphs_transformed_at_each_access(fast):
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.nn import GraphConv, global_mean_pool
    from torch_geometric.transforms import Compose, NormalizeFeatures

    clouds = [Data(x=torch.rand(40, 8), pos=torch.rand(40, 3), y=torch.tensor([i % 4])) for i in range(128)]

    def neighbours(data):
        order = torch.cdist(data.pos, data.pos).topk(7, largest=False).indices[:, 1:]
        data.edge_index = torch.stack([order.reshape(-1), torch.arange(40).repeat_interleave(6)])
        degree = torch.zeros(40).scatter_add_(0, data.edge_index[1], torch.ones(240))
        data.x = torch.cat([data.x, degree[:, None]], dim=1)
        return data

    class Clouds(Dataset):
        def __init__(self, transform=None, pre_transform=None):
            self.transform = transform
            self.clouds = [pre_transform(each.clone()) for each in clouds] if pre_transform else clouds

        def __len__(self):
            return len(self.clouds)

        def __getitem__(self, i):
            return self.transform(self.clouds[i].clone()) if self.transform else self.clouds[i]

    prepare = Compose([neighbours, NormalizeFeatures()])
    dataset = Clouds(pre_transform=prepare) if fast else Clouds(transform=prepare)
    loader = GraphLoader(dataset, batch_size=32, shuffle=True)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2, self.lin = GraphConv(9, 64), GraphConv(64, 64), nn.Linear(64, 4)

        def forward(self, x, edge_index, batch):
            x = self.conv1(x, edge_index).relu()
            return self.lin(global_mean_pool(self.conv2(x, edge_index).relu(), batch))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def train():
        for data in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(data.x, data.edge_index, data.batch), data.y).backward()
            optimizer.step()

    return train


@program("launch", "small batch", library="transformers")
def articles_summarized_one_at_a_time(fast):
    from transformers import BartConfig, BartForConditionalGeneration

    model = BartForConditionalGeneration(BartConfig(
        vocab_size=500, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=128,
    )).eval()  # fmt: skip
    articles = torch.randint(5, 500, (8, 48))

    def summarize(batch):
        return model.generate(batch, attention_mask=torch.ones_like(batch), num_beams=1, do_sample=False,
                              min_length=12, max_length=12)  # fmt: skip

    def work():
        summaries = []
        for batch in articles.split(8 if fast else 1):
            summaries.extend(summarize(batch))
        return summaries

    return work


@program("launch", "python", "sync", library="torchmetrics")
def metrics_computed_after_each_batch(fast):
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 6))
    batches = DataLoader(TensorDataset(torch.randn(640, 32), torch.randint(0, 6, (640,))), batch_size=64)

    @torch.no_grad()
    def evaluate():
        metrics = MetricCollection(
            {"acc": MulticlassAccuracy(6), "f1": MulticlassF1Score(6), "auroc": MulticlassAUROC(6, thresholds=20)}
        )
        history = []
        net.eval()
        for x, y in batches:
            probabilities = net(x).softmax(dim=-1)
            metrics.update(probabilities, y)
            if not fast:
                history.append({name: value.item() for name, value in metrics.compute().items()})
        history.append({name: value.item() for name, value in metrics.compute().items()})
        return history[-1]

    return evaluate


@program("preparing", "launch", "python", library="torchvision")
def pictures_augmented_in_the_training_loop(fast):
    from torchvision.transforms import v2

    augment = v2.Compose([
        v2.RandomResizedCrop(32, scale=(0.6, 1.0), antialias=True),
        v2.RandomHorizontalFlip(),
        v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
    ])  # fmt: skip
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
    )
    images, labels = torch.rand(128, 3, 40, 40), torch.randint(0, 10, (128,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    def train():
        for x, y in loader:
            x = augment(x) if fast else torch.stack([augment(image) for image in x])
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train
