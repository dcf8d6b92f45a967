"""Programs that were held out when they were written; what explains programs has changed since."""

import io
import math
import random
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from corpus import program
from hugging_face import bert, llama
from sklearn.neighbors import NearestNeighbors
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset
from torch_programs import mlp, train
from tqdm import tqdm

LETTERS = [chr(97 + i) * n for i in range(26) for n in (1, 2, 3)]


@program("tokenize", "loading", library="transformers Trainer", steady=True)
def trainer_tokenizes_in_its_collator(fast):
    from transformers import BertTokenizerLegacy as Slow  # type: ignore[attr-defined]
    from transformers import Trainer, TrainingArguments

    path = Path(tempfile.mkdtemp(), "vocab.txt")
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]))
    tokenizer, model = Slow(str(path)), llama()
    texts = [" ".join(LETTERS[(i * j) % 78] for j in range(160)) for i in range(64)]

    def encode(chosen):
        return tokenizer(chosen, return_tensors="pt", truncation=True, max_length=32)["input_ids"]

    ready = dict(zip(texts, encode(texts), strict=True))

    def collate(chosen):
        ids = torch.stack([ready[text] for text in chosen]) if fast else encode(chosen)
        return {"input_ids": ids, "labels": ids}

    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=8, num_train_epochs=5, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_steps=1000, remove_unused_columns=False,
    )  # fmt: skip
    return lambda: Trainer(model, arguments, train_dataset=texts, data_collator=collate).train()  # type: ignore[arg-type]


@program("optimizer", library="Lightning", steady=True)
def lightning_with_adam_parameter_by_parameter(fast):
    import logging

    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            layers = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(24)]
            self.net = nn.Sequential(*layers)

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3, foreach=False, fused=fast)

    data = TensorDataset(torch.randn(960, 32))

    def fit():
        trainer = L.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(data, batch_size=32))

    return fit


@program("launch", "small batch", library="torchvision")
def crops_scored_one_by_one(fast):
    from torchvision.models import mobilenet_v3_small

    model, picture = mobilenet_v3_small(num_classes=20).eval(), torch.randn(3, 160, 160)
    corners = [(y, x) for y in range(0, 128, 32) for x in range(0, 128, 16)]

    def work():
        with torch.inference_mode():
            crops = [picture[:, y : y + 32, x : x + 32] for y, x in corners]
            if fast:
                model(torch.stack(crops)).argmax(1)
            else:
                torch.stack([model(crop[None]).argmax(1) for crop in crops])

    return work


@program("launch", "small batch", library="diffusers")
def guidance_in_two_passes(fast):
    from diffusers import UNet2DModel

    net = UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32),
        norm_num_groups=4, num_class_embeds=5, down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    ).eval()  # fmt: skip
    wanted, none, noise = torch.tensor([1]), torch.tensor([0]), torch.randn(1, 3, 8, 8)

    def work():
        x = noise
        with torch.inference_mode():
            for step in range(12, 0, -1):
                if fast:
                    with_class, without = net(torch.cat([x, x]), step, torch.cat([wanted, none])).sample.chunk(2)
                else:
                    with_class, without = net(x, step, wanted).sample, net(x, step, none).sample
                x = x - 0.05 * (without + 3.0 * (with_class - without))

    return work


@program("launch", "small batch")
def sequences_of_unlike_lengths_one_by_one(fast):
    rnn, head = nn.GRU(16, 48), nn.Linear(48, 5)
    sequences = [torch.randn(6 + i % 20, 16) for i in range(96)]

    def work():
        with torch.inference_mode():
            if fast:
                _, last = rnn(pack_sequence(sequences, enforce_sorted=False))
                head(last[0])
            else:
                for each in sequences:
                    head(rnn(each)[1][0])

    return work


@program("launch", "python")
def histories_averaged_user_by_user(fast):
    histories = [torch.randint(0, 5000, (5 + i % 30,)) for i in range(256)]
    items, bag, tower = nn.Embedding(5000, 32), nn.EmbeddingBag(5000, 32), mlp(32, 64, 16)
    together = torch.cat(histories)
    starts = torch.tensor([0, *(len(each) for each in histories[:-1])]).cumsum(0)

    def work():
        with torch.inference_mode():
            users = bag(together, starts) if fast else torch.stack([items(each).mean(0) for each in histories])
            tower(users)

    return work


@program("launch", "small batch", "sync", "python")
def actions_drawn_agent_by_agent(fast):
    policy = mlp(8, 64, 4)

    def work():
        states = torch.randn(32, 8)
        with torch.no_grad():
            for _ in range(10):
                if fast:
                    actions = Categorical(logits=policy(states)).sample()
                else:
                    actions = torch.stack([Categorical(logits=policy(each)).sample() for each in states])
                states = states * 0.95 + actions[:, None] * 0.01

    return work


@program("python", library="scikit-learn")
def neighbours_searched_query_by_query(fast):
    encoder = mlp(32, 64, 16)
    with torch.inference_mode():
        index = NearestNeighbors(n_neighbors=5).fit(encoder(torch.randn(2000, 32)).numpy())
    queries = torch.randn(200, 32)

    def work():
        with torch.inference_mode():
            found = encoder(queries).numpy()
            if fast:
                index.kneighbors(found)
            else:
                for each in found:
                    index.kneighbors(each[None])

    return work


@program("launch", library="sentence-transformers")
def embeddings_compared_pair_by_pair(fast):
    from sentence_transformers import util

    questions, answers = torch.randn(24, 64), torch.randn(24, 64)

    def work():
        if fast:
            return util.cos_sim(questions, answers).max(1)
        return [max(util.cos_sim(a, b).item() for b in answers) for a in questions]

    return work


@program("loading", library="torch-geometric")
def graphs_collated_in_each_epoch(fast):
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

    graphs = [Data(x=torch.randn(12, 16), edge_index=torch.randint(0, 12, (2, 30))) for _ in range(320)]
    conv, head = GCNConv(16, 32), nn.Linear(32, 1)
    optimizer = torch.optim.SGD([*conv.parameters(), *head.parameters()], 1e-3)
    ready = list(GraphLoader(graphs, batch_size=32))  # type: ignore[arg-type]

    def work():
        for batch in ready if fast else GraphLoader(graphs, batch_size=32):  # type: ignore[arg-type]
            optimizer.zero_grad()
            pooled = global_mean_pool(conv(batch.x, batch.edge_index).relu(), batch.batch)
            head(pooled).square().mean().backward()
            optimizer.step()

    return work


@program("preparing", "python", "loading", library="transformers")
def audio_features_made_clip_by_clip(fast):
    from transformers import WhisperFeatureExtractor

    extract = WhisperFeatureExtractor(feature_size=40, chunk_length=4)
    clips = [np.random.default_rng(i).standard_normal(48_000, dtype=np.float32) for i in range(6)]
    net = nn.Sequential(nn.Conv1d(40, 32, 3, 2), nn.ReLU(), nn.Conv1d(32, 8, 3, 2))

    def features(clip):
        return extract(clip, sampling_rate=16_000, return_tensors="pt").input_features

    ready = [features(clip) for clip in clips]
    return lambda: train(net, ((ready[i] if fast else features(clips[i]),) for i in range(6)))


@program("launch", "small batch", "python", "convert", library="pandas")
def frame_scored_with_apply(fast):
    frame, net = pd.DataFrame(np.random.default_rng(0).random((300, 12), dtype=np.float32)), mlp(12, 64, 64, 1)

    def work():
        with torch.inference_mode():
            if fast:
                net(torch.from_numpy(frame.to_numpy(copy=True)))
            else:
                frame.apply(lambda row: net(torch.tensor(row.values)).item(), axis=1)

    return work


@program("launch", "sync")
def confusions_counted_pair_by_pair(fast):
    net, x, labels = mlp(32, 64, 6), torch.randn(512, 32), torch.randint(0, 6, (512,))

    def work():
        counts = torch.zeros(6, 6, dtype=torch.long)
        with torch.inference_mode():
            predicted = net(x).argmax(1)
            if fast:
                counts += torch.bincount(labels * 6 + predicted, minlength=36).view(6, 6)
            else:
                for label, prediction in zip(labels, predicted, strict=True):
                    counts[label, prediction] += 1

    return work


@program("launch", "small batch")
def jacobian_row_by_row(fast):
    net, x = mlp(24, 64, 48), torch.randn(24)
    return lambda: torch.autograd.functional.jacobian(net, x, vectorize=fast)  # type: ignore[arg-type]


@program("python")
def positions_encoded_in_each_forward(fast):
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True).eval()
    x = torch.randn(8, 48, 32)

    def encode():
        rows = []
        for t in range(48):
            angles = [t / 10000 ** (i / 32) for i in range(0, 32, 2)]
            rows.append([math.sin(each) for each in angles] + [math.cos(each) for each in angles])
        return torch.tensor(rows)

    table = encode()

    def work():
        with torch.inference_mode():
            for _ in range(20):
                layer(x + (table if fast else encode()))

    return work


@program("logging", "printing", "python", library="tqdm")
def bar_refreshed_at_each_step(fast):
    net, x = mlp(32, 64, 8), torch.randn(64, 32)

    def work():
        bar = tqdm(range(200), file=io.StringIO(), mininterval=10.0 if fast else 0.0)
        numbers = iter(range(200))

        def show(y):
            step = next(numbers)
            if not fast or step % 100 == 0:
                bar.set_postfix(loss=random.random(), step=step, best=0.0, patience=step // 10)
            bar.update()

        train(net, [(x,)] * 200, after=show)

    return work


@program("launch", "small batch", library="torchvision")
def frames_resized_one_by_one(fast):
    from torchvision.transforms.v2 import functional as pictures

    frames = torch.rand(96, 3, 24, 24)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def prepare(x):
        x = pictures.resize(x, [16, 16], antialias=True)
        return pictures.normalize(x, [0.5, 0.5, 0.5], [0.2, 0.2, 0.2])

    def work():
        with torch.inference_mode():
            net(prepare(frames) if fast else torch.stack([prepare(frame) for frame in frames]))

    return work


@program(library="torchvision")
def healthy_resnet_in_batches(fast):
    from torchvision.models import resnet18

    model, x = resnet18().eval().to(memory_format=torch.channels_last), torch.randn(16, 3, 96, 96)
    x = x.to(memory_format=torch.channels_last)

    def work():
        with torch.inference_mode():
            for _ in range(3):
                model(x)

    return work


@program(library="transformers")
def healthy_texts_encoded_in_batches(fast):
    model, ids = bert(max_position_embeddings=512), torch.randint(3, 500, (32, 256))

    def work():
        with torch.inference_mode():
            for _ in range(3):
                model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.mean(1)

    return work


@program()
def healthy_transformer_training(fast):
    layer, head = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True), nn.Linear(256, 256)
    optimizer, x = torch.optim.AdamW([*layer.parameters(), *head.parameters()], fused=True), torch.randn(16, 128, 256)

    def work():
        for _ in range(3):
            optimizer.zero_grad()
            functional.mse_loss(head(layer(x)), x).backward()
            optimizer.step()

    return work
