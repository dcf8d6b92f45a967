"""Programs that were held out when they were written; what explains programs has changed since."""

import random
import sqlite3
import tempfile
from pathlib import Path

import numpy as np
import torch
from corpus import program
from held_out import LETTERS, vocabulary
from hugging_face import llama
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch_programs import mlp, train


@program("evaluation", library="transformers Trainer", steady=True)
def trainer_evaluates_after_each_step(fast):
    from transformers import Trainer, TrainingArguments

    model, ids = llama(), torch.randint(3, 200, (160, 24))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=8, per_device_eval_batch_size=16, max_steps=12, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True, logging_steps=1000, eval_strategy="steps",
        eval_steps=100 if fast else 1,
    )  # fmt: skip
    return lambda: Trainer(model, arguments, train_dataset=rows[:128], eval_dataset=rows[128:]).train()  # type: ignore[arg-type]


@program("python", library="torch-geometric")
def neighbours_sampled_node_by_node(fast):
    nodes, degree, width = 4000, 12, 8
    targets = torch.randint(0, nodes, (nodes, degree))
    adjacency = {node: each.tolist() for node, each in enumerate(targets)}
    features, first, last = torch.randn(nodes, 32), nn.Linear(64, 64), nn.Linear(64, 8)
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], 1e-2)
    labels = torch.randint(0, 8, (nodes,))

    def sampled(seeds):
        if fast:
            return targets[seeds[:, None], torch.randint(0, degree, (len(seeds), width))]
        chosen = []
        for node in seeds.tolist():
            neighbours = adjacency[node]
            chosen.append(random.sample(neighbours, min(width, len(neighbours))))
        return torch.tensor(chosen)

    def work():
        for seeds in torch.randperm(nodes)[:1536].split(256):
            around = features[sampled(seeds)].mean(1)
            hidden = first(torch.cat([features[seeds], around], 1)).relu()
            optimizer.zero_grad()
            functional.cross_entropy(last(hidden), labels[seeds]).backward()
            optimizer.step()

    return work


def mel_filters(bands, bins):
    """Return triangular filters, as a list of rows."""
    edges = [bins * (10 ** (i / (bands + 1)) - 1) / 9 for i in range(bands + 2)]
    rows = []
    for low, middle, high in zip(edges, edges[1:], edges[2:], strict=False):
        row = []
        for k in range(bins):
            up, down = (k - low) / (middle - low), (high - k) / (high - middle)
            row.append(max(0.0, min(up, down)))
        rows.append(row)
    return torch.tensor(rows)


@program("python", library="torch audio")
def filters_made_for_each_batch(fast):
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("window", torch.hann_window(256))
            self.register_buffer("filters", mel_filters(40, 129))

        def forward(self, sound):
            power = torch.stft(sound, 256, 128, window=self.window, return_complex=True).abs().square()
            filters = self.filters if fast else mel_filters(40, 129)
            return (filters @ power + 1e-6).log().mean(-1)

    net, sounds = nn.Sequential(Features(), mlp(40, 64, 8)), torch.randn(8, 8, 4000)
    return lambda: train(net, ((x,) for x in sounds))


@program("loading", "python", library="pandas")
def frames_joined_in_the_collator(fast):
    import pandas as pd

    users = pd.DataFrame(
        {"user": range(500), "age": np.arange(500) % 70 + 10.0, "region": [f"r{i % 9}" for i in range(500)]}
    )
    rows = [{"user": i * 37 % 500, "price": float(i % 90), "bought": float(i % 2)} for i in range(1024)]

    def collate(chosen):
        frame = pd.DataFrame(chosen).merge(users, on="user", how="left")
        frame["price"] = frame["price"] / frame.groupby("region")["price"].transform("mean").clip(lower=1.0)
        frame = pd.get_dummies(frame, columns=["region"])
        frame = frame.reindex(columns=["age", "price", "bought", *[f"region_r{i}" for i in range(9)]], fill_value=0.0)
        return torch.tensor(frame.to_numpy(dtype="float32"))

    ready = [collate(rows[i : i + 64]) for i in range(0, 1024, 64)]
    net = mlp(12, 64, 1)
    return lambda: train(net, ((x,) for x in (ready if fast else DataLoader(rows, batch_size=64, collate_fn=collate))))


@program("loading")
def loader_restarted_for_each_batch(fast):
    net, data = mlp(32, 64, 8), TensorDataset(torch.randn(60000, 32))
    loader = DataLoader(data, batch_size=32, shuffle=True)

    def work():
        if fast:
            batches = iter(loader)
            train(net, (next(batches) for _ in range(12)))
        else:
            train(net, (next(iter(loader)) for _ in range(12)))

    return work


@program("recompilation")
def model_compiled_for_each_length(fast):
    net = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 100_000
    compiled = torch.compile(net, backend="aot_eager", dynamic=bool(fast))
    lengths = iter(range(8, 100_000))

    def work():
        with torch.no_grad():
            for _ in range(3):
                length = next(lengths)
                compiled(torch.randn(1, 16 if fast else 8 + length % 4000, 32))

    return work


@program("launch")
def states_scanned_step_by_step(fast):
    rate, inwards, head = nn.Parameter(torch.rand(64)), nn.Linear(8, 64), nn.Linear(64, 1)
    optimizer = torch.optim.Adam([rate, *inwards.parameters(), *head.parameters()], 1e-3)
    x, y = torch.randn(16, 128, 8), torch.randn(16, 128, 1)

    def scanned(inputs):
        decay = rate.sigmoid()
        if fast:
            for distance in (1, 2, 4, 8, 16, 32, 64):
                moved = functional.pad(inputs[:, :-distance], (0, 0, distance, 0))
                inputs = torch.addcmul(inputs, moved, decay**distance)
            return inputs
        state, states = torch.zeros(16, 64), []
        for t in range(inputs.shape[1]):
            state = decay * state + inputs[:, t]
            states.append(state)
        return torch.stack(states, 1)

    def work():
        for _ in range(2):
            optimizer.zero_grad()
            functional.mse_loss(head(scanned(inwards(x))), y).backward()
            optimizer.step()

    return work


@program("optimizer", "launch", "eager")
def rates_set_for_each_parameter(fast):
    net, x = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(24)]), torch.randn(16, 32)
    if fast:
        kept = [each for name, each in net.named_parameters() if name.endswith("bias")]
        decayed = [each for name, each in net.named_parameters() if not name.endswith("bias")]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": kept, "weight_decay": 0.0}]
    else:
        groups = [
            {"params": [each], "weight_decay": 0.0 if name.endswith("bias") else 0.01}
            for name, each in net.named_parameters()
        ]
    optimizer = torch.optim.AdamW(groups, 1e-3, fused=True)

    def work():
        for _ in range(5):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    return work


class Mixed(nn.Module):
    """Convolutions over time between norms over channels."""

    def __init__(self, moves):
        super().__init__()
        self.moves = moves
        self.convolutions = nn.ModuleList([nn.Conv1d(64, 64, 3, padding=1, groups=64) for _ in range(6)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(64) for _ in range(6)])

    def forward(self, x):
        x = x if self.moves else x.transpose(1, 2).contiguous()
        for convolve, norm in zip(self.convolutions, self.norms, strict=True):
            if self.moves:
                x = convolve(x.transpose(1, 2).contiguous()).transpose(1, 2).contiguous()
                x = norm(x.transpose(1, 2).contiguous()).transpose(1, 2).contiguous().relu()
            else:
                x = norm(convolve(x)).relu()
        return x.mean(1 if self.moves else 2)


@program("layout")
def channels_moved_for_each_layer(fast):
    net, x = Mixed(not fast).eval(), torch.randn(16, 512, 64)

    def work():
        with torch.inference_mode():
            for _ in range(2):
                net(x)

    return work


@program("tokenize", library="transformers")
def text_decoded_again_for_each_token(fast):
    from transformers import BertTokenizerLegacy as Slow  # type: ignore[attr-defined]

    tokenizer, model = Slow(str(vocabulary())), llama().eval()
    prompt = torch.randint(5, 80, (1, 160))

    def work():
        ids, past, text = prompt, None, ""
        with torch.inference_mode():
            for _ in range(48):
                out = model(input_ids=ids if past is None else ids[:, -1:], past_key_values=past, use_cache=True)
                past = out.past_key_values
                ids = torch.cat([ids, out.logits[:, -1:, : len(LETTERS)].argmax(-1)], 1)
                if fast:
                    text += " " + tokenizer.decode(ids[0, -1:])
                else:
                    text = tokenizer.decode(ids[0], skip_special_tokens=True)
                    while text.endswith("  "):
                        text = text[:-1]

    return work


@program("launch", "small batch")
def ensemble_called_member_by_member(fast):
    members, x = nn.ModuleList([mlp(24, 32, 32, 4) for _ in range(24)]), torch.randn(8, 24)
    weights, _ = torch.func.stack_module_state(list(members))  # type: ignore[arg-type]

    def work():
        with torch.inference_mode():
            for _ in range(10):
                if fast:
                    y = x.expand(24, 8, 24)
                    for layer in ("0", "2", "4"):
                        y = torch.baddbmm(weights[f"{layer}.bias"][:, None], y, weights[f"{layer}.weight"].mT)
                        y = y.relu() if layer != "4" else y
                    y.softmax(-1).mean(0)
                else:
                    torch.stack([member(x).softmax(-1) for member in members]).mean(0)

    return work


class Stored(Dataset):
    """Rows of a database."""

    def __init__(self, path):
        self.path, self.connection = path, None

    def __len__(self):
        return 1024

    def __getitem__(self, i):
        if self.connection is None:
            self.connection = sqlite3.connect(self.path, check_same_thread=False)
        row = self.connection.execute("SELECT * FROM samples WHERE number = ?", (i,)).fetchone()
        return torch.tensor(row[1:-1]), torch.tensor(row[-1])


@program("loading", "file", "python", library="sqlite3")
def rows_fetched_from_a_database_one_by_one(fast):
    path = str(Path(tempfile.mkdtemp(), "samples.db"))
    table = np.random.default_rng(0).random((1024, 25))
    with sqlite3.connect(path) as connection:
        columns = ", ".join(f"c{i} REAL" for i in range(25))
        connection.execute(f"CREATE TABLE samples (number INTEGER PRIMARY KEY, {columns})")
        marks = ", ".join("?" * 26)
        connection.executemany(
            f"INSERT INTO samples VALUES ({marks})", [(i, *map(float, row)) for i, row in enumerate(table)]
        )
    net, whole = mlp(24, 48, 1), torch.tensor(table, dtype=torch.float32)
    data = Stored(path)

    def work():
        batches = whole[:, :24].split(64) if fast else (x for x, _ in DataLoader(data, batch_size=64))
        train(net, ((x,) for x in batches))

    return work


@program("sparse")
def graph_multiplied_as_a_dense_matrix(fast):
    places = torch.randint(0, 1500, (2, 6000))
    dense = torch.zeros(1500, 1500)
    dense[places[0], places[1]] = 0.25
    adjacency, layers = dense.to_sparse_csr() if fast else dense, [nn.Linear(32, 32) for _ in range(3)]
    x = torch.randn(1500, 32)

    def work():
        with torch.inference_mode():
            for _ in range(4):
                hidden = x
                for layer in layers:
                    hidden = layer(adjacency @ hidden).relu()

    return work


@program("loading", "launch", "small batch", "eager", "optimizer")
def batches_of_two_from_a_loader(fast):
    net, data = mlp(32, 64, 64, 4), TensorDataset(torch.randn(384, 32), torch.randint(0, 4, (384,)))
    loader = DataLoader(data, batch_size=64 if fast else 2, shuffle=True)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=True)

    def work():
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            optimizer.step()

    return work


@program(library="transformers Trainer")
def healthy_trainer(fast):
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    config = BertConfig(vocab_size=500, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=1024)  # fmt: skip
    model, ids = BertForSequenceClassification(config), torch.randint(3, 500, (96, 64))
    rows = [{"input_ids": row, "labels": i % 2} for i, row in enumerate(ids)]
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=16, num_train_epochs=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_steps=1000, optim="adamw_torch_fused",
    )  # fmt: skip
    return lambda: Trainer(model, arguments, train_dataset=rows).train()  # type: ignore[arg-type]


@program()
def healthy_autoencoder_training(fast):
    net, x = mlp(784, 512, 64, 512, 784), torch.rand(512, 784)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, fused=True)

    def work():
        for _ in range(4):
            optimizer.zero_grad()
            functional.mse_loss(net(x), x).backward()
            optimizer.step()

    return work


@program()
def healthy_features_of_sounds(fast):
    sounds, window, filters = torch.randn(32, 16000), torch.hann_window(400), torch.rand(64, 201)
    net = nn.Sequential(nn.Conv1d(64, 128, 3, 2), nn.ReLU(), nn.Conv1d(128, 128, 3, 2)).eval()

    def work():
        with torch.inference_mode():
            power = torch.stft(sounds, 400, 160, window=window, return_complex=True).abs().square_()
            net(filters @ power)

    return work


@program()
def healthy_table_of_categories(fast):
    tables = nn.EmbeddingBag(50_000, 64, mode="sum")
    net, optimizer = mlp(64, 512, 256, 1), None
    ids, labels = torch.randint(0, 50_000, (4, 512, 24)), torch.rand(512, 1)
    tables.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)

    def work():
        for rows in ids:
            optimizer.zero_grad()
            functional.binary_cross_entropy_with_logits(net(tables(rows)), labels).backward()
            optimizer.step()

    return work
