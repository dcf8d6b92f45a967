"""Programs for a GPU, in sizes that keep one busy: transformers with random weights, and plain PyTorch."""

import time
from functools import partial

import numpy as np
import torch
from corpus import program as any_program
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

program = partial(any_program, device="cuda")
HALF = torch.bfloat16


def bert(kind=HALF, **options):
    config = BertConfig(vocab_size=30000, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, **options)
    with torch.device("cuda"):
        return BertModel(config).to(kind).eval()


def llama(layers=12):
    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(HALF).eval()


def images(net, batches, after=lambda loss: None):
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for x in batches:
        optimizer.zero_grad()
        loss = net(x).float().square().mean()
        loss.backward()
        optimizer.step()
        after(loss)


def convolutions(width=64):
    layers = [nn.Conv2d(3, width, 3, 2, 1)]
    for _ in range(6):
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)).cuda()


@program("float32 products", library="transformers")
def bert_in_float32(fast):
    model, ids = bert(HALF if fast else torch.float32), torch.randint(3, 30000, (32, 256), device="cuda")
    mask = torch.ones_like(ids)

    def work():
        with torch.inference_mode():
            for _ in range(4):
                model(input_ids=ids, attention_mask=mask, token_type_ids=torch.zeros_like(ids))

    return work


@program("launch", "small batch", library="transformers")
def sentences_encoded_one_by_one_on_gpu(fast):
    model, ids = bert(), torch.randint(3, 30000, (48, 24), device="cuda")

    def work():
        with torch.inference_mode():
            for rows in ids.split(48 if fast else 1):
                model(input_ids=rows).last_hidden_state.mean(1).cpu()

    return work


@program("launch", "small batch", library="transformers")
def answers_generated_one_by_one_on_gpu(fast):
    model, ids = llama(6), torch.randint(3, 200, (8, 32), device="cuda")
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}

    def work():
        for rows in ids.split(8 if fast else 1):
            model.generate(rows, attention_mask=torch.ones_like(rows), **options)

    return work


@program("padding", library="transformers")
def bert_padded_to_the_longest_possible_on_gpu(fast):
    model, ids = bert(), torch.zeros(64, 512, dtype=torch.long, device="cuda")
    mask = torch.zeros_like(ids)
    ids[:, :128], mask[:, :128] = torch.randint(3, 30000, (64, 128), device="cuda"), 1
    cut = 128 if fast else 512

    def work():
        with torch.inference_mode():
            for _ in range(6):
                model(input_ids=ids[:, :cut], attention_mask=mask[:, :cut])

    return work


@program("attention", library="transformers")
def eager_attention_of_long_texts_on_gpu(fast):
    model = bert(attn_implementation="sdpa" if fast else "eager", max_position_embeddings=2048)
    ids = torch.randint(3, 30000, (8, 2048), device="cuda")

    def work():
        with torch.inference_mode():
            for _ in range(4):
                model(input_ids=ids, attention_mask=torch.ones_like(ids))

    return work


class Pictures(Dataset):
    def __init__(self, fast):
        self.ready = [self._picture(i) for i in range(128)] if fast else None

    def _picture(self, i):
        x = np.random.default_rng(i).random((96, 96, 3), dtype=np.float32)
        for _ in range(6):
            x = np.roll(x, 1, 0) * 0.9 + np.flip(x, 1) * 0.1
        return torch.from_numpy(np.ascontiguousarray(x.transpose(2, 0, 1)))

    def __len__(self):
        return 128

    def __getitem__(self, i):
        return self._picture(i) if self.ready is None else self.ready[i]


@program("loading", "python")
def pictures_augmented_in_the_main_process(fast):
    net, data = convolutions(), Pictures(fast)
    return lambda: images(net, (x.cuda() for x in DataLoader(data, batch_size=32)))


@program("sync")
def hits_counted_one_by_one(fast):
    net, x = convolutions(32), torch.randn(256, 3, 48, 48, device="cuda")
    labels = torch.randint(0, 10, (256,), device="cuda")
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def work():
        right = 0
        for _ in range(20):
            optimizer.zero_grad()
            scores = net(x)
            functional.cross_entropy(scores, labels).backward()
            optimizer.step()
            hits = scores.argmax(1) == labels
            right += hits.sum() if fast else sum(each.item() for each in hits)

    return work


@program("optimizer", "launch")
def adamw_parameter_by_parameter_on_gpu(fast):
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(100)]).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False, fused=fast)
    x = torch.randn(256, 256, device="cuda")

    def work():
        for _ in range(5):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    return work


@program("pinned", "upload")
def batches_from_pageable_memory(fast):
    batches = [torch.randn(64, 3, 256, 256) for _ in range(4)]
    batches = [each.pin_memory() for each in batches] if fast else batches
    scale = torch.ones(3, 1, 1, device="cuda")

    def work():
        for step in range(24):
            (batches[step % 4].cuda(non_blocking=fast) * scale).sum()

    return work


@program("float64")
def simulation_in_double(fast):
    kind = torch.float32 if fast else torch.float64
    x, weight = torch.randn(2, 6144, 6144, device="cuda", dtype=kind).unbind()

    def work():
        for _ in range(40):
            (x * 0.5 + weight).tanh_()

    return work


@program("launch")
def lstm_cell_by_cell_on_gpu(fast):
    cell, lstm = nn.LSTMCell(256, 256).cuda(), nn.LSTM(256, 256).cuda()
    x = torch.randn(128, 64, 256, device="cuda")

    def work():
        with torch.inference_mode():
            for _ in range(4):
                if fast:
                    lstm(x)
                    continue
                h = c = torch.zeros(64, 256, device="cuda")
                for t in range(128):
                    h, c = cell(x[t], (h, c))

    return work


@program("launch")
def graph_messages_edge_by_edge_on_gpu(fast):
    nodes, edges = torch.randn(400, 64, device="cuda"), torch.randint(0, 400, (1200, 2))
    pairs, there = edges.tolist(), edges.cuda()

    def work():
        out = torch.zeros_like(nodes)
        if fast:
            out.index_add_(0, there[:, 1], nodes[there[:, 0]])
            return
        for a, b in pairs:
            out[b] += nodes[a]

    return work


@program("allocation")
def cache_emptied_each_step(fast):
    x = torch.randn(4096, 4096, device="cuda")

    def work():
        for _ in range(30):
            ((x * 2.0).relu() + x).sum()
            if not fast:
                torch.cuda.empty_cache()

    return work


@program("sleep")
def agent_waits_between_steps(fast):
    net, x = convolutions(32), torch.randn(32, 3, 96, 96, device="cuda")
    return lambda: images(net, [x] * 20, after=lambda loss: None if fast else time.sleep(0.01))


@program("fallback", "python", "sync", "host")
def labels_counted_on_the_host(fast):
    x = torch.randn(1 << 20, 8, device="cuda")

    def work():
        for _ in range(10):
            if fast:
                torch.bincount(x.argmax(1), minlength=8)
            else:
                torch.bincount(x.cpu().argmax(1), minlength=8)

    return work


@program()
def healthy_bert_in_bfloat16(fast):
    model, ids = bert(), torch.randint(3, 30000, (256, 256), device="cuda")

    def work():
        with torch.inference_mode():
            for _ in range(6):
                model(input_ids=ids)

    return work


@program()
def healthy_products_in_bfloat16(fast):
    x = torch.randn(8192, 8192, device="cuda", dtype=HALF)

    def work():
        with torch.inference_mode():
            for _ in range(30):
                torch.mm(x, x)

    return work


@program()
def healthy_training_with_fused_adamw(fast):
    net = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(6)]).to("cuda", HALF)
    optimizer, x = torch.optim.AdamW(net.parameters(), fused=True), torch.randn(8192, 4096, device="cuda", dtype=HALF)

    def work():
        for _ in range(10):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    return work


@program()
def healthy_fused_attention(fast):
    q, k, v = torch.randn(3, 8, 16, 4096, 64, device="cuda", dtype=HALF).unbind()

    def work():
        with torch.inference_mode():
            for _ in range(40):
                functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return work


@program(library="transformers")
def healthy_llama_prompts_on_gpu(fast):
    model, ids = llama(), torch.randint(3, 200, (64, 1024), device="cuda")

    def work():
        with torch.inference_mode():
            for _ in range(4):
                model(input_ids=ids, use_cache=False, logits_to_keep=1)

    return work
