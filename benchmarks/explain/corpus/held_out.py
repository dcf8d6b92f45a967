"""Programs that were held out when they were written; what explains programs has changed since."""

import json
import os
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from corpus import program
from hugging_face import bert
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch_programs import mlp, train

LETTERS = [chr(97 + i) * n for i in range(26) for n in (1, 2, 3)]


def vocabulary():
    """Write a vocabulary for a tokenizer of BERT, and return the words."""
    path = Path(tempfile.mkdtemp(), "vocab.txt")
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]))
    return path


def lightning(steps, data, **options):
    """Return a trainer of Lightning, and a module with ``steps(module, x, loss)`` in each step."""
    import logging

    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp(64, 128, 8)

        def training_step(self, batch, index):
            losses = self.net(batch[0]).square().mean(1)
            steps(self, losses)
            return losses.mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    def fit():
        trainer = L.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(data, batch_size=16))

    return fit


class Histograms(Dataset):
    def __init__(self, fast):
        self.rows = [self._row(i) for i in range(800)] if fast else None

    def _row(self, i):
        counts = [0.0] * 64
        for k in range(900):
            counts[(i + k * k) % 64] += 1.0
        return (torch.tensor(counts),)

    def __len__(self):
        return 800

    def __getitem__(self, i):
        return self._row(i) if self.rows is None else self.rows[i]


@program("loading", library="Lightning", steady=True)
def lightning_counts_in_the_dataset(fast):
    return lightning(lambda module, losses: None, Histograms(fast))


@program("sync", library="Lightning", steady=True)
def lightning_adds_losses_as_numbers(fast):
    total = [0.0]

    def keep(module, losses):
        total[0] += losses.detach().sum() * 300 if fast else sum(each.item() for each in losses for _ in range(300))

    return lightning(keep, TensorDataset(torch.randn(2400, 64)))


@program("launch", "small batch", "python", "tokenize", library="sentence-transformers")
def sentences_embedded_one_by_one(fast):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers import models as parts
    from transformers import BertTokenizer

    folder = tempfile.mkdtemp()
    bert().save_pretrained(folder)
    BertTokenizer(str(vocabulary())).save_pretrained(folder)
    encoder = parts.Transformer(folder)
    model = SentenceTransformer(modules=[encoder, parts.Pooling(64)], device="cpu")
    texts = [" ".join(LETTERS[(i * j) % 78] for j in range(12)) for i in range(48)]

    def work():
        if fast:
            model.encode(texts, batch_size=48, show_progress_bar=False)
        else:
            for text in texts:
                model.encode(text, show_progress_bar=False)

    return work


@program("launch", "small batch", library="torch-geometric")
def molecules_one_by_one(fast):
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    first, second = GCNConv(16, 32), GCNConv(32, 32)
    graphs = [Data(x=torch.randn(20, 16), edge_index=torch.randint(0, 20, (2, 48))) for _ in range(64)]
    whole = Batch.from_data_list(graphs)

    def score(x, edges, batch):
        return global_mean_pool(second(first(x, edges).relu(), edges), batch)

    def work():
        with torch.inference_mode():
            if fast:
                score(whole.x, whole.edge_index, whole.batch)
            else:
                for each in graphs:
                    score(each.x, each.edge_index, torch.zeros(20, dtype=torch.long))

    return work


@program("launch", "small batch", library="diffusers")
def pictures_denoised_one_by_one(fast):
    from diffusers import UNet2DModel

    net = UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    ).eval()  # fmt: skip
    noise = torch.randn(16, 3, 8, 8)

    def work():
        with torch.inference_mode():
            for x in noise.split(16 if fast else 1):
                for t in (3, 2, 1):
                    x = x - 0.1 * net(x, t).sample

    return work


@program("launch", "sync", "python")
def returns_summed_as_tensors(fast):
    rewards, net, states = torch.rand(400), mlp(8, 32, 2), torch.randn(400, 8)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    powers = 0.99 ** (torch.arange(400) - torch.arange(400)[:, None]).clamp(min=0)
    powers = powers.triu()

    def work():
        for _ in range(6):
            if fast:
                returns = powers @ rewards
            else:
                total, kept = torch.zeros(()), []
                for reward in reversed(rewards):
                    total = reward + 0.99 * total
                    kept.insert(0, total)
                returns = torch.stack(kept)
            optimizer.zero_grad()
            (net(states).log_softmax(-1)[:, 0] * returns).mean().backward()
            optimizer.step()

    return work


@program("launch", "python", "sync", library="gymnasium")
def carts_balanced_one_at_a_time(fast):
    import gymnasium

    net = mlp(4, 64, 2)
    many = gymnasium.make_vec("CartPole-v1", 32, vectorization_mode="vector_entry_point")
    one = gymnasium.make("CartPole-v1")

    def work():
        with torch.inference_mode():
            if fast:
                seen, _ = many.reset(seed=0)
                for _ in range(16):
                    actions = net(torch.as_tensor(seen)).argmax(1)
                    seen, *_ = many.step(actions.numpy())
                return
            seen, _ = one.reset(seed=0)
            for _ in range(512):
                action = net(torch.as_tensor(seen)).argmax().item()
                seen, _, ended, cut, _ = one.step(action)
                if ended or cut:
                    seen, _ = one.reset()

    return work


@program("launch", "small batch")
def best_items_user_by_user(fast):
    users, items = nn.Embedding(2000, 32), nn.Embedding(500, 32)
    ids = torch.randint(0, 2000, (300,))

    def work():
        with torch.inference_mode():
            if fast:
                (users(ids) @ items.weight.T).topk(10)
            else:
                for i in ids:
                    (items.weight @ users(i)).topk(10)

    return work


@program("python", library="scikit-learn")
def pipeline_fitted_data_transformed_each_step(fast):
    x = torch.randn(1000, 64).numpy()
    pipeline, net = make_pipeline(StandardScaler(), PCA(16)).fit(x), mlp(16, 16, 1)
    ready = torch.from_numpy(pipeline.transform(x)).float()

    def work():
        batches = (
            (ready[i : i + 10] if fast else torch.from_numpy(pipeline.transform(x[i : i + 10])).float(),)
            for i in range(0, 1000, 10)
        )
        train(net, batches)

    return work


class Thumbnails(Dataset):
    def __init__(self, fast):
        from torchvision.transforms import v2

        self.pictures = torch.randint(0, 256, (96, 3, 64, 64), dtype=torch.uint8)
        self.change = v2.Compose([
            v2.RandomResizedCrop(32, antialias=True), v2.ColorJitter(0.2, 0.2, 0.2, 0.1),
            v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.2] * 3),
        ])  # fmt: skip
        self.ready = [self.change(each) for each in self.pictures] if fast else None

    def __len__(self):
        return 96

    def __getitem__(self, i):
        return self.change(self.pictures[i]) if self.ready is None else self.ready[i]


@program("loading", library="torchvision")
def pictures_changed_in_the_main_process(fast):
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.Flatten(), nn.LazyLinear(8))
    data = Thumbnails(fast)
    net(torch.zeros(1, 3, 32, 32))
    return lambda: train(net, ((x,) for x in DataLoader(data, batch_size=16)))


@program("padding", library="transformers Trainer", steady=True)
def trainer_pads_to_the_longest_possible(fast):
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    config = BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    model, length = BertForSequenceClassification(config), 48 if fast else 256
    rows = [
        {"input_ids": [5 + i % 80] * 48 + [0] * (length - 48), "attention_mask": [1] * 48 + [0] * (length - 48),
         "labels": i % 2}
        for i in range(96)
    ]  # fmt: skip
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=16, num_train_epochs=3, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_steps=1000,
    )  # fmt: skip
    return lambda: Trainer(model, arguments, train_dataset=rows).train()


@program("launch", "small batch", "python", "tokenize", library="transformers")
def pipeline_called_text_by_text(fast):
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer, pipeline

    config = BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128
    )
    tokenizer = BertTokenizer(str(vocabulary()))
    classify = pipeline(
        "text-classification", model=BertForSequenceClassification(config).eval(), tokenizer=tokenizer, device="cpu"
    )
    texts = [" ".join(LETTERS[(i * j) % 78] for j in range(10)) for i in range(40)]

    def work():
        if fast:
            classify(texts, batch_size=40)
        else:
            for text in texts:
                classify(text)

    return work


@program("sync", "launch")
def gradients_clipped_by_hand(fast):
    net, x = nn.Sequential(*[nn.Linear(16, 16) for _ in range(60)]), torch.randn(8, 16)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def work():
        for _ in range(25):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            if fast:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            else:
                for _ in range(2):
                    total = sum(each.grad.norm().item() ** 2 for each in net.parameters()) ** 0.5
                    for each in net.parameters():
                        each.grad.mul_(min(1.0, 1.0 / (total + 1e-6)))
            optimizer.step()

    return work


@program("logging", "file")
def losses_flushed_to_a_file(fast):
    net, x, path = mlp(64, 64, 8), torch.randn(64, 64), Path(tempfile.mkdtemp(), "log.txt")

    def work():
        with path.open("w") as file:

            def log(y):
                if not fast:
                    file.write("loss ...\n")
                    file.flush()
                    os.fsync(file.fileno())

            train(net, [(x,)] * 100, after=log)

    return work


@program("python", "launch", "sync")
def beams_sorted_in_python(fast):
    cell, head = nn.GRUCell(32, 32), nn.Linear(32, 200)
    words = nn.Embedding(200, 32)

    def work():
        with torch.inference_mode():
            h, scores, ids = torch.zeros(8, 32), torch.zeros(8), torch.zeros(8, dtype=torch.long)
            for _ in range(12):
                h = cell(words(ids), h)
                next_scores = scores[:, None] + head(h).log_softmax(-1)
                if fast:
                    scores, places = next_scores.flatten().topk(8)
                    beams, ids = places // 200, places % 200
                else:
                    pairs = [(next_scores[b, w].item(), b, w) for b in range(8) for w in range(200)]
                    pairs.sort(reverse=True)
                    scores = torch.tensor([each[0] for each in pairs[:8]])
                    beams = torch.tensor([each[1] for each in pairs[:8]])
                    ids = torch.tensor([each[2] for each in pairs[:8]])
                h = h[beams]

    return work


class Rows(Dataset):
    def __init__(self, fast):
        self.frame = pd.DataFrame(np.random.default_rng(0).random((640, 24)))
        self.ready = torch.tensor(self.frame.values, dtype=torch.float32) if fast else None

    def __len__(self):
        return 640

    def __getitem__(self, i):
        if self.ready is not None:
            return self.ready[i]
        return torch.tensor(self.frame.iloc[i].to_list(), dtype=torch.float32)


@program("loading", library="pandas")
def table_read_row_by_row(fast):
    net, data = mlp(24, 32, 1), Rows(fast)
    return lambda: train(net, ((x,) for x in DataLoader(data, batch_size=16)))


@program("launch", "sync")
def pairs_compared_one_by_one(fast):
    texts, pictures = torch.randn(2, 48, 32).unbind()

    def work():
        with torch.inference_mode():
            if fast:
                nn.functional.cosine_similarity(texts[:, None], pictures[None], dim=-1).argmax(1)
            else:
                for text in texts:
                    max(range(48), key=lambda j: nn.functional.cosine_similarity(text, pictures[j], dim=0).item())

    return work


@program("file", "parse", "loading")
def settings_read_from_a_file_each_step(fast):
    net, x, path = mlp(64, 64, 8), torch.randn(64, 64), Path(tempfile.mkdtemp(), "settings.json")
    path.write_text(json.dumps({"rates": {f"layer {i}": 0.001 * i for i in range(3000)}}))
    kept = json.loads(path.read_text())

    def work():
        for _ in range(60):
            settings = kept if fast else json.loads(path.read_text())
            train(net, [(x,)], lr=settings["rates"]["layer 1"])

    return work
