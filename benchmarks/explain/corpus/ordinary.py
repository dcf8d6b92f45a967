"""Programs as users of libraries write them. They were held out when they were written; see ``unseen.py``."""

import itertools
import queue
import tempfile
import threading
import warnings

import numpy as np
import torch
from corpus import program
from hugging_face import bert
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torch_programs import mlp, train


class Photos(Dataset):
    def __init__(self, fast):
        from torchvision import transforms

        random = np.random.default_rng(0)
        self.photos = [Image.fromarray(random.integers(0, 255, (120, 160, 3), dtype=np.uint8)) for _ in range(96)]
        self.transform = transforms.Compose([
            transforms.Resize(64), transforms.RandomCrop(56), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
            transforms.Normalize([0.48, 0.46, 0.4], [0.23, 0.22, 0.22]),
        ])  # fmt: skip
        self.ready = [self.transform(each) for each in self.photos] if fast else None

    def __len__(self):
        return 96

    def __getitem__(self, i):
        return self.transform(self.photos[i]) if self.ready is None else self.ready[i]


@program("loading", library="torchvision")
def photos_resized_by_pillow(fast):
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.Flatten(), nn.LazyLinear(8))
    net(torch.zeros(1, 3, 56, 56))
    data = Photos(fast)
    return lambda: train(net, ((x,) for x in DataLoader(data, batch_size=16, shuffle=True)))


@program("loading")
def sentences_padded_by_a_python_collate(fast):
    sentences = [[(7 * i + j) % 900 + 1 for j in range(40 + i % 60)] for i in range(640)]
    rows = [torch.tensor(each) for each in sentences]
    net = nn.Sequential(nn.Embedding(1000, 16, padding_idx=0), nn.Flatten(), nn.LazyLinear(4))
    net(torch.zeros(1, 100, dtype=torch.long))

    def collate(batch):
        longest, padded = 100, []
        for sentence in batch:
            line = []
            for word in sentence:
                line.append(word if word < 1000 else 0)
            while len(line) < longest:
                line.append(0)
            padded.append(line)
        return torch.tensor(padded)

    def collate_fast(batch):
        padded = torch.zeros(len(batch), 100, dtype=torch.long)
        for row, sentence in zip(padded, batch, strict=True):
            row[: len(sentence)] = sentence
        return padded

    data, together = (rows, collate_fast) if fast else (sentences, collate)
    return lambda: train(net, ((x,) for x in DataLoader(data, batch_size=32, collate_fn=together)))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(100, 32), nn.GRU(32, 48, batch_first=True), nn.Linear(48, 100)

    def forward(self, ids, state=None):
        y, state = self.rnn(self.words(ids), state)
        return self.head(y), state


@program("launch", "small batch")
def language_model_trained_word_by_word(fast):
    model, ids = Words(), torch.randint(0, 100, (16, 49))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def work():
        for _ in range(5):
            optimizer.zero_grad()
            if fast:
                logits, _ = model(ids[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            else:
                loss, state = 0.0, None
                for t in range(48):
                    logits, state = model(ids[:, t : t + 1], state)
                    loss = loss + functional.cross_entropy(logits[:, 0], ids[:, t + 1])
                loss = loss / 48
            loss.backward()
            optimizer.step()

    return work


@program("logging", "python", library="tensorboard")
def histograms_written_every_step(fast):
    from torch.utils.tensorboard import SummaryWriter

    net, x = mlp(64, 128, 128, 8), torch.randn(64, 64)
    writer, step = SummaryWriter(tempfile.mkdtemp()), itertools.count()

    def log(y):
        number = next(step)
        if number % 50 == 0 or not fast:
            for name, each in net.named_parameters():
                writer.add_histogram(f"weights/{name}", each, number)
                writer.add_histogram(f"gradients/{name}", each.grad, number)

    return lambda: train(net, [(x,)] * 50, after=log)


@program("python", "loading", "convert", library="numpy")
def batches_made_of_lists_of_arrays(fast):
    frames, net = [np.random.default_rng(i).random(128, dtype=np.float32) for i in range(512)], mlp(128, 64, 4)
    random = np.random.default_rng(0)
    warnings.filterwarnings("ignore", message="Creating a tensor from a list of numpy.ndarrays")

    def sample():
        chosen = [frames[i] for i in random.integers(0, 512, 64)]
        return torch.from_numpy(np.stack(chosen)) if fast else torch.tensor(chosen)

    return lambda: train(net, ((sample(),) for _ in range(40)))


@program("unused gradients", library="timm")
def head_trained_on_a_frozen_backbone(fast):
    import timm

    model = timm.create_model("resnet18", num_classes=10)
    if fast:
        model.requires_grad_(False)
        model.fc.requires_grad_(True)
    optimizer = torch.optim.SGD(model.fc.parameters(), 1e-3)
    x, labels = torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))

    def work():
        for _ in range(5):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), labels).backward()
            optimizer.step()

    return work


@program("dense gradients")
def items_embedded_with_dense_gradients(fast):
    items, users = nn.Embedding(60_000, 32, sparse=fast), nn.Embedding(40_000, 32, sparse=fast)
    optimizer = torch.optim.SGD([*items.parameters(), *users.parameters()], 1e-2)
    pairs = torch.randint(0, 40_000, (16, 2, 256))

    def work():
        for mine, theirs in pairs:
            optimizer.zero_grad()
            scores = (users(mine) * items(theirs)).sum(1)
            functional.softplus(-scores).mean().backward()
            optimizer.step()

    return work


@program("recomputation")
def layers_checkpointed_without_need(fast):
    layers = nn.ModuleList(nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(3))
    x, optimizer = torch.randn(8, 64, 128), torch.optim.SGD(layers.parameters(), 1e-3)

    def work():
        for _ in range(5):
            optimizer.zero_grad()
            y = x
            for layer in layers:
                y = layer(y) if fast else checkpoint(layer, y, use_reentrant=False)
            y.square().mean().backward()
            optimizer.step()

    return work


@program("launch", "small batch")
def requests_answered_one_by_one(fast):
    net = mlp(128, 256, 256, 16)

    def work():
        waiting, answers = queue.Queue(), queue.Queue()

        def clients():
            for i in range(1500):
                waiting.put((i, torch.full((128,), float(i % 7))))
            waiting.put(None)

        sender = threading.Thread(target=clients)
        sender.start()
        sender.join()
        with torch.inference_mode():
            while (request := waiting.get()) is not None:
                batch = [request]
                while fast and len(batch) < 128 and waiting.queue[0] is not None:
                    batch.append(waiting.get())
                scores = net(torch.stack([features for _, features in batch]))
                for (number, _), score in zip(batch, scores, strict=True):
                    answers.put((number, score))

    return work


@program("loading", "python", library="datasets")
def rows_of_a_dataset_read_one_by_one(fast):
    import datasets

    datasets.disable_progress_bars()
    columns = {"features": np.random.default_rng(0).random((400, 32)).tolist(), "label": list(range(400))}
    data, net = datasets.Dataset.from_dict(columns).with_format("torch"), mlp(32, 32, 4)
    ready = data[:]["features"] if fast else None

    def work():
        if fast:
            return train(net, ((x,) for x in ready.split(8)))
        return train(net, ((batch["features"],) for batch in DataLoader(data, batch_size=8)))

    return work


class Squares(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.full((32,), float(i))


@program("process", "loading", "wait")
def workers_started_for_each_epoch(fast):
    net = mlp(32, 64, 4)
    loader = DataLoader(Squares(), batch_size=8, num_workers=2, persistent_workers=fast)

    def work():
        for _ in range(3):
            train(net, ((x,) for x in loader))

    return work


@program("broadcast")
def distances_of_all_pairs_by_broadcasting(fast):
    queries, support = torch.randn(256, 64), torch.randn(300, 64)

    def work():
        with torch.inference_mode():
            for _ in range(6):
                if fast:
                    distances = torch.cdist(queries, support).square()
                else:
                    distances = ((queries.unsqueeze(1) - support.unsqueeze(0)) ** 2).sum(-1)
                distances.topk(5, largest=False)

    return work


@program("building", "file", "loading", "python", library="transformers")
def model_loaded_for_each_request(fast):
    from transformers import BertModel

    folder = tempfile.mkdtemp()
    bert().save_pretrained(folder)
    model, ids = BertModel.from_pretrained(folder), torch.randint(3, 500, (8, 4, 16))

    def answer(rows):
        used = model if fast else BertModel.from_pretrained(folder).eval()
        with torch.inference_mode():
            return used(input_ids=rows).pooler_output

    return lambda: [answer(rows) for rows in ids]


@program("prefix", library="transformers")
def text_generated_without_a_cache(fast):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_embd=192, n_layer=3, n_head=4)).eval()
    prompt = torch.randint(0, 500, (4, 96))

    def work():
        with torch.no_grad():
            ids, cache, last = prompt, None, prompt
            for _ in range(32):
                out = model(last, past_key_values=cache, use_cache=True) if fast else model(ids, use_cache=False)
                cache = out.past_key_values if fast else None
                last = out.logits[:, -1].argmax(-1, keepdim=True)
                ids = torch.cat([ids, last], 1)

    return work


@program("launch")
def mask_written_element_by_element(fast):
    layer, x = nn.MultiheadAttention(32, 2, batch_first=True), torch.randn(4, 24, 32)

    def mask():
        if fast:
            return torch.triu(torch.full((24, 24), float("-inf")), 1)
        made = torch.zeros(24, 24)
        for i in range(24):
            for j in range(24):
                if j > i:
                    made[i, j] = float("-inf")
        return made

    def work():
        with torch.inference_mode():
            for _ in range(30):
                layer(x, x, x, attn_mask=mask(), need_weights=False)

    return work


@program("python", library="scikit-learn")
def metrics_of_sklearn_every_step(fast):
    from sklearn.metrics import f1_score, roc_auc_score

    net, x, labels = mlp(32, 64, 2), torch.randn(128, 32), torch.arange(128) % 2

    def work():
        seen = []

        def measure(y):
            seen.append(y.detach())
            if not fast or len(seen) == 30:
                scores = torch.cat(seen[-1:]).softmax(1)[:, 1].numpy()
                roc_auc_score(labels.numpy(), scores)
                f1_score(labels.numpy(), scores > 0.5)

        train(net, [(x,)] * 30, after=measure)

    return work
