r"""A language model of characters: the project's decoder, small and from random weights, taught the manual of Python.

The text is what ``help()`` shows on the language (466 KB, part of every Python). A token is a byte, so the vocabulary
has 256 entries and there is no tokenizer. From the bytes so far the model gives a probability to each possible next
one; the loss is its surprise at the one that came, on average over all places t at once:

    L = -1/T sum_t log p(x_t+1 | x_1 ... x_t)        bits per byte = L / log 2

A guess at random needs 8 bits. What ``zlib`` needs for the text is printed for comparison: a model that predicts well
compresses well, they are one thing (Shannon 1948).

Everything is what a large model uses: ``models.decoder.Decoder`` (RMSNorm, rotary positions, attention, SwiGLU),
windows of text packed so that they do not see each other, the fused loss, warm-up and cosine, the gradient clipped to a
norm, Muon for the matrices and AdamW for the rest. At the end the engine that serves models draws text from it, one
byte after another: x ~ softmax(z / temperature).

    python examples/characters.py
"""

import argparse
import math
import pydoc_data.topics
import zlib
from pathlib import Path

import numpy as np
import torch
from curve import show
from torch import Tensor

from transect.engine.scheduling.sampling_params import SamplingParams
from transect.models.decoder import Decoder
from transect.spec.model import ModelConfig
from transect.train.config import DataConfig, OptimizerConfig, ScheduleConfig
from transect.train.data.loader import Loader
from transect.train.data.tokens import TokenStream
from transect.train.loop.schedule import factor
from transect.train.objectives.loss import batch_loss, evaluate, token_loss
from transect.train.objectives.rollout import roll_out
from transect.train.optim import build as build_optimizer

CONFIG = ModelConfig(
    architecture="llama", vocab_size=256, dim=128, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=352,
    max_position=512, tied_embeddings=True,
)  # fmt: skip
CPU = torch.device("cpu")
LOSS = token_loss(CPU)


def text() -> bytes:
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def loader(data: bytes, seq_len: int = 128, micro_batch: int = 1024) -> Loader:
    """Batches of windows of ``data``, in a random order."""
    tokens = np.frombuffer(data, dtype=np.uint8).astype(np.uint16)
    stream = TokenStream(tokens, np.array([len(tokens)], dtype=np.uint64))
    return Loader(stream, DataConfig(seq_len=seq_len, micro_batch=micro_batch), seed=0)


def new_model(seed: int = 0) -> Decoder:
    return Decoder(CONFIG).init_weights(generator=torch.Generator().manual_seed(seed))


def loss() -> Tensor:
    """The loss of one small batch, for ``transect explain backward examples/characters.py``."""
    return batch_loss(new_model(), next(loader(text()[:4096], seq_len=32, micro_batch=64)), LOSS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model of bytes, and sample from it.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=3e-3, help="AdamW's learning rate")
    parser.add_argument("--plot", type=Path, help="draw the curve into this file")
    options = parser.parse_args()

    torch.set_num_threads(1)  # matrices this small are not worth a second

    data = text()
    cut = len(data) * 97 // 100
    train, held_out = loader(data[:cut]), list(loader(data[cut:]).one_epoch())
    model = new_model()
    parameters = dict(model.named_parameters())
    print(f"{sum(p.numel() for p in parameters.values()):,} weights, {cut:,} bytes to learn from")
    print(f"zlib needs {8 * len(zlib.compress(data, 9)) / len(data):.2f} bits a byte")
    rates = OptimizerConfig(name="muon", learning_rate=options.rate, muon_learning_rate=0.02, weight_decay=0.01)
    optimizer = build_optimizer(rates, parameters)
    schedule = ScheduleConfig(kind="cosine", warmup=min(10, options.steps - 1), final=0.05)
    bits = []
    for step in range(options.steps):
        loss = batch_loss(model, next(train), LOSS)
        loss.backward()
        scale = optimizer.clip_scale(optimizer.gradient_norm(), rates.clip)
        optimizer.step(factor(schedule, step, options.steps), scale)
        optimizer.zero_grad()
        bits.append(loss.item() / math.log(2))
        if step == 0 or (step + 1) % 50 == 0:
            print(f"step {step + 1:4}: {bits[-1]:.2f} bits a byte")
    nats, bytes_seen = evaluate(model, held_out, LOSS)
    print(f"on {bytes_seen:,} bytes held out: {nats / math.log(2):.3f} bits a byte")

    prompt = "The class statement"
    params = SamplingParams(temperature=0.7, max_tokens=200)
    (answer,) = roll_out(model, [list(prompt.encode())], params, eos_token_ids=(), seed=1)
    print(f"\n{prompt}{bytes(answer.token_ids).decode(errors='replace')}")
    show({"bits a byte": bits}, options.plot)


if __name__ == "__main__":
    main()
