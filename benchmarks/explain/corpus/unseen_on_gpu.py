"""Programs for a GPU that were held out when they were written; what explains programs has changed since."""

from functools import partial

import torch
from corpus import program as any_program
from on_gpu import HALF
from torch import nn
from torch.nn import functional
from torch_programs import mlp

program = partial(any_program, device="cuda")


@program("launch", "small batch", library="torchvision")
def crops_scored_one_by_one_on_gpu(fast):
    from torchvision.models import mobilenet_v3_small

    model, picture = mobilenet_v3_small(num_classes=20).cuda().eval(), torch.randn(3, 512, 512, device="cuda")
    corners = [(y, x) for y in range(0, 384, 96) for x in range(0, 384, 48)]

    def work():
        with torch.inference_mode():
            crops = [picture[:, y : y + 128, x : x + 128] for y, x in corners]
            if fast:
                model(torch.stack(crops)).argmax(1).tolist()
            else:
                [model(crop[None]).argmax(1).item() for crop in crops]

    return work


@program("sync", "launch")
def confusions_counted_pair_by_pair_on_gpu(fast):
    net, labels = mlp(64, 512, 6).cuda(), torch.randint(0, 6, (256,), device="cuda")
    x = torch.randn(256, 64, device="cuda")

    def work():
        counts = torch.zeros(6, 6, dtype=torch.long, device="cuda")
        with torch.inference_mode():
            predicted = net(x).argmax(1)
            if fast:
                counts += torch.bincount(labels * 6 + predicted, minlength=36).view(6, 6)
            else:
                for label, prediction in zip(labels, predicted, strict=True):
                    counts[label, prediction] += 1

    return work


@program("launch")
def histories_averaged_user_by_user_on_gpu(fast):
    histories = [torch.randint(0, 50_000, (20 + i % 60,), device="cuda") for i in range(512)]
    items, bag = nn.Embedding(50_000, 64, device="cuda"), nn.EmbeddingBag(50_000, 64, device="cuda")
    together = torch.cat(histories)
    starts = torch.tensor([0, *(len(each) for each in histories[:-1])], device="cuda").cumsum(0)

    def work():
        with torch.inference_mode():
            bag(together, starts) if fast else torch.stack([items(each).mean(0) for each in histories])

    return work


@program("attention")
def causal_attention_written_by_hand_on_gpu(fast):
    q, k, v = torch.randn(3, 4, 16, 2048, 64, device="cuda", dtype=HALF).unbind()
    mask = torch.full((2048, 2048), float("-inf"), device="cuda", dtype=HALF).triu(1)

    def work():
        with torch.inference_mode():
            for _ in range(20):
                if fast:
                    functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                else:
                    (q @ k.transpose(-1, -2) / 8 + mask).softmax(-1) @ v

    return work


@program("sync", "logging")
def losses_and_norms_read_each_step_on_gpu(fast):
    net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(16)]).cuda()
    optimizer, x = torch.optim.AdamW(net.parameters(), fused=True), torch.randn(512, 256, device="cuda")

    def work():
        for step in range(20):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            if not fast or step == 19:
                [loss.item(), *(each.grad.norm().item() for each in net.parameters())]
            optimizer.step()

    return work


@program()
def healthy_convolutions_in_training_on_gpu(fast):
    net = nn.Sequential(nn.Conv2d(64, 128, 3), nn.ReLU(), nn.Conv2d(128, 128, 3)).to(
        "cuda", HALF, memory_format=torch.channels_last
    )
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, fused=True)
    x = torch.randn(128, 64, 128, 128, device="cuda", dtype=HALF).to(memory_format=torch.channels_last)

    def work():
        for _ in range(10):
            optimizer.zero_grad()
            net(x).float().square().mean().backward()
            optimizer.step()

    return work
