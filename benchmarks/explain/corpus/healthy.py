"""Programs with nothing to mend: batched, in place, with large operators. No finding may promise more than 5%."""

import torch
from corpus import program
from hugging_face import bert, llama
from torch import nn
from torch.nn import functional
from torch_programs import mlp

WIDE = 768


@program()
def healthy_mlp_training(fast):
    net, x = mlp(WIDE, WIDE, WIDE), torch.randn(512, WIDE)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def work():
        for _ in range(6):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    return work


@program()
def healthy_mlp_inference(fast):
    net, x = mlp(WIDE, WIDE, WIDE), torch.randn(1024, WIDE)

    def work():
        with torch.inference_mode():
            for _ in range(6):
                net(x)

    return work


@program()
def healthy_fused_adamw(fast):
    net, x = mlp(WIDE, WIDE, WIDE), torch.randn(512, WIDE)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    def work():
        for _ in range(6):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    return work


@program()
def healthy_convolutions(fast):
    net = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3)).eval()
    x = torch.randn(8, 32, 64, 64)

    def work():
        with torch.inference_mode():
            for _ in range(4):
                net(x)

    return work


@program()
def healthy_sdpa(fast):
    q, k, v = torch.randn(3, 2, 8, 512, 64).unbind()

    def work():
        with torch.inference_mode():
            for _ in range(8):
                functional.scaled_dot_product_attention(q, k, v)

    return work


@program()
def healthy_lstm(fast):
    net, x = nn.LSTM(256, 256), torch.randn(64, 64, 256)

    def work():
        with torch.inference_mode():
            for _ in range(3):
                net(x)

    return work


@program(library="transformers")
def healthy_bert_batches(fast):
    model, ids = bert(), torch.randint(3, 500, (32, 128))
    mask, types = torch.ones_like(ids), torch.zeros_like(ids)

    def work():
        with torch.inference_mode():
            for _ in range(4):
                model(input_ids=ids, attention_mask=mask, token_type_ids=types)

    return work


@program(library="transformers")
def healthy_llama_prompts(fast):
    model, ids = llama(), torch.randint(3, 200, (16, 128))

    def work():
        with torch.inference_mode():
            for _ in range(4):
                model(input_ids=ids, use_cache=False)

    return work


@program()
def healthy_embedding_bag(fast):
    bag, head = nn.EmbeddingBag(20000, 256), nn.Linear(256, 1024)
    ids = torch.randint(0, 20000, (1024, 16))

    def work():
        with torch.inference_mode():
            for _ in range(10):
                head(bag(ids))

    return work


@program()
def healthy_bmm(fast):
    a, b, out = torch.randn(8, 384, 384), torch.randn(8, 384, 384), torch.empty(8, 384, 384)

    def work():
        for _ in range(10):
            torch.bmm(a, b, out=out)

    return work
