"""More programs for a GPU, as users of libraries write them."""

import warnings
from functools import partial

import torch
from corpus import program as any_program
from on_gpu import HALF, llama
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

program = partial(any_program, device="cuda")


class Thumbnails(Dataset):
    def __init__(self, fast):
        from torchvision.transforms import v2

        self.pictures = torch.randint(0, 256, (192, 3, 160, 160), dtype=torch.uint8)
        self.change = v2.Compose([
            v2.RandomResizedCrop(128, antialias=True), v2.RandomHorizontalFlip(), v2.ColorJitter(0.2, 0.2, 0.2),
            v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.2] * 3),
        ])  # fmt: skip
        self.ready = [self.change(each) for each in self.pictures] if fast else None

    def __len__(self):
        return 192

    def __getitem__(self, i):
        return self.change(self.pictures[i]) if self.ready is None else self.ready[i]


@program("loading", library="torchvision")
def resnet_trained_without_workers(fast):
    from torchvision.models import resnet18

    model, data = resnet18(num_classes=10).cuda(), Thumbnails(fast)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

    def work():
        for x in DataLoader(data, batch_size=32, pin_memory=True):
            optimizer.zero_grad()
            labels = torch.zeros(len(x), dtype=torch.long, device="cuda")
            functional.cross_entropy(model(x.cuda(non_blocking=True)), labels).backward()
            optimizer.step()

    return work


@program("unused gradients", library="torchvision")
def head_trained_on_a_frozen_resnet_on_gpu(fast):
    from torchvision.models import resnet50

    model = resnet50(num_classes=10).cuda()
    if fast:
        model.requires_grad_(False)
        model.fc.requires_grad_(True)
    optimizer = torch.optim.SGD(model.fc.parameters(), 1e-3)
    x, labels = torch.randn(64, 3, 224, 224, device="cuda"), torch.zeros(64, dtype=torch.long, device="cuda")

    def work():
        for _ in range(8):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), labels).backward()
            optimizer.step()

    return work


@program("prefix", library="transformers")
def text_generated_without_a_cache_on_gpu(fast):
    model, prompt = llama(6), torch.randint(3, 200, (64, 512), device="cuda")

    def work():
        with torch.inference_mode():
            ids, cache, last = prompt, None, prompt
            for _ in range(24):
                given = {"past_key_values": cache, "use_cache": True} if fast else {"use_cache": False}
                out = model(input_ids=last if fast else ids, logits_to_keep=1, **given)
                cache = out.past_key_values if fast else None
                last = out.logits[:, -1].argmax(-1, keepdim=True)
                ids = torch.cat([ids, last], 1)

    return work


@program("recomputation")
def layers_checkpointed_without_need_on_gpu(fast):
    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True) for _ in range(6)
    ).to("cuda", HALF)
    x, optimizer = torch.randn(32, 512, 1024, device="cuda", dtype=HALF), torch.optim.SGD(layers.parameters(), 1e-3)

    def work():
        for _ in range(5):
            optimizer.zero_grad()
            y = x
            for layer in layers:
                y = layer(y) if fast else checkpoint(layer, y, use_reentrant=False)
            y.float().square().mean().backward()
            optimizer.step()

    return work


@program("dense gradients")
def items_embedded_with_dense_gradients_on_gpu(fast):
    items = nn.Embedding(2_000_000, 64, sparse=fast, device="cuda")
    optimizer = torch.optim.SGD(items.parameters(), 1e-2)
    pairs = torch.randint(0, 2_000_000, (16, 2, 4096), device="cuda")

    def work():
        for mine, theirs in pairs:
            optimizer.zero_grad()
            functional.softplus(-(items(mine) * items(theirs)).sum(1)).mean().backward()
            optimizer.step()

    return work


@program("broadcast")
def distances_of_all_pairs_by_broadcasting_on_gpu(fast):
    queries, support = torch.randn(2048, 128, device="cuda"), torch.randn(4096, 128, device="cuda")

    def work():
        with torch.inference_mode():
            for _ in range(10):
                if fast:
                    distances = torch.cdist(queries, support).square()
                else:
                    distances = ((queries.unsqueeze(1) - support.unsqueeze(0)) ** 2).sum(-1)
                distances.topk(5, largest=False)

    return work


@program("float32 products", library="Lightning", steady=True)
def lightning_in_full_float32(fast):
    import logging

    import pytorch_lightning as L

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(4)])

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    batches = [torch.randn(8192, 4096, device="cuda") for _ in range(2)] * 20

    def work():
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if fast else "highest")
        trainer = L.Trainer(
            max_epochs=1, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(batches, batch_size=None))
        torch.set_float32_matmul_precision(before)

    return work


@program("launch", "small batch", library="torch-geometric")
def molecules_one_by_one_on_gpu(fast):
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    first, second = GCNConv(16, 64).cuda(), GCNConv(64, 64).cuda()
    graphs = [Data(x=torch.randn(20, 16), edge_index=torch.randint(0, 20, (2, 48))).to("cuda") for _ in range(64)]
    whole = Batch.from_data_list(graphs)
    alone = torch.zeros(20, dtype=torch.long, device="cuda")

    def score(x, edges, batch, size):
        return global_mean_pool(second(first(x, edges).relu(), edges), batch, size)

    def work():
        with torch.inference_mode():
            if fast:
                score(whole.x, whole.edge_index, whole.batch, 64)
            else:
                for each in graphs:
                    score(each.x, each.edge_index, alone, 1)

    return work


@program(library="torchvision")
def healthy_resnet_in_channels_last(fast):
    from torchvision.models import resnet50

    model = resnet50().to("cuda", HALF, memory_format=torch.channels_last).eval()
    x = torch.randn(512, 3, 224, 224, device="cuda", dtype=HALF).to(memory_format=torch.channels_last)

    def work():
        with torch.inference_mode():
            for _ in range(6):
                model(x)

    return work
