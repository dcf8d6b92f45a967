"""Programs for a GPU that were held out when they were written; what explains programs has changed since."""

from functools import partial

import torch
from corpus import program as any_program
from on_gpu import HALF
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch_programs import mlp

program = partial(any_program, device="cuda")


@program("sync")
def layers_timed_with_synchronization_on_gpu(fast):
    layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda() for _ in range(16)]
    x = torch.randn(64, 256, device="cuda")

    def work():
        with torch.inference_mode():
            for _ in range(20):
                y = x
                for layer in layers:
                    y = layer(y)
                    if not fast:
                        torch.cuda.synchronize()
                torch.cuda.synchronize()

    return work


@program("loading", "launch", "pinned", "upload", "sync")
def samples_moved_one_by_one_to_gpu(fast):
    rows, net = list(torch.randn(2048, 512)), mlp(512, 1024, 8).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def collate(chosen):
        return torch.stack(chosen).cuda() if fast else torch.stack([each.cuda() for each in chosen])

    def work():
        for x in DataLoader(rows, batch_size=128, collate_fn=collate):  # type: ignore[arg-type]
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    return work


@program("launch")
def states_scanned_step_by_step_on_gpu(fast):
    rate, x = torch.rand(256, device="cuda"), torch.randn(32, 256, 256, device="cuda")

    def work():
        with torch.inference_mode():
            if fast:
                whole = x
                for distance in (1, 2, 4, 8, 16, 32, 64, 128):
                    moved = functional.pad(whole[:, :-distance], (0, 0, distance, 0))
                    whole = torch.addcmul(whole, moved, rate**distance)
                return whole
            state, states = torch.zeros(32, 256, device="cuda"), []
            for t in range(256):
                state = rate * state + x[:, t]
                states.append(state)
            return torch.stack(states, 1)

    return work


@program("float32 products")
def encoder_trained_without_mixed_precision_on_gpu(fast):
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
    net, x = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda(), torch.randn(16, 512, 1024).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True)

    def work():
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=fast):
                loss = net(x).float().square().mean()
            loss.backward()
            optimizer.step()

    return work


@program("layout")
def pictures_not_in_channels_last_on_gpu(fast):
    form = torch.channels_last if fast else torch.contiguous_format
    blocks = [nn.Sequential(nn.Conv2d(256, 256, 3, padding=1, bias=False), nn.BatchNorm2d(256), nn.ReLU())
              for _ in range(6)]  # fmt: skip
    net = nn.Sequential(*blocks).to("cuda", HALF, memory_format=form).eval()
    x = torch.randn(64, 256, 56, 56, device="cuda", dtype=HALF).to(memory_format=form)

    def work():
        with torch.inference_mode():
            for _ in range(4):
                net(x)

    return work


@program("optimizer", "launch", "eager")
def rates_set_for_each_parameter_on_gpu(fast):
    net = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(40)]).cuda()
    x = torch.randn(64, 128, device="cuda")
    every = list(net.parameters())
    groups = [{"params": every}] if fast else [{"params": [each], "lr": 1e-3} for each in every]
    optimizer = torch.optim.AdamW(groups, 1e-3)

    def work():
        for _ in range(6):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    return work


@program("attention")
def causal_mask_passed_as_a_tensor_on_gpu(fast):
    q = torch.randn(4, 16, 4096, 64, device="cuda", dtype=HALF)
    mask = torch.full((4096, 4096), float("-inf"), device="cuda", dtype=HALF).triu(1)

    def work():
        with torch.inference_mode():
            for _ in range(8):
                if fast:
                    functional.scaled_dot_product_attention(q, q, q, is_causal=True)
                else:
                    functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    return work


@program()
def healthy_encoder_training_on_gpu(fast):
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda().to(HALF)
    x = torch.randn(32, 512, 1024, device="cuda", dtype=HALF)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True)

    def work():
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    return work
