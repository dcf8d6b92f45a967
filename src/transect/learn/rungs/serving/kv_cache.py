r"""A model writes one token at a time. To make token 1,000 it needs the keys and values of tokens 0 to 999, and those
are the same numbers as a step ago: attention is causal, so nothing that comes later changes them. Computing them
again makes an answer of n tokens cost n² / 2 tokens of work. *Keeping* them makes it n. That is the KV cache, the
reason why serving is about memory.

How much memory? For each token 2 (k and v) * layers * KV heads * head size * bytes. Llama-3 8B: 2 * 32 * 8 * 128 *
2 = 131,072 bytes, 128 KB a token, 1 GB for 8,192 tokens of one user.

Write a cache with room for a fixed number of tokens, made once. Appending copies the new keys and values into
their places, and nothing else. `torch.cat((old, new))` is right as well, and copies everything in every step: that
is n² again, in bytes. The grader counts bytes.

A *prefill* appends many tokens at once (the prompt), a *decode* one. Both are the same call: queries of the last n
tokens against all keys so far, with the causal mask for the n among themselves: query i (of n) sees length - n + i
+ 1 keys.
"""

import math

import torch

from ...record import Case, Rung, Slip, Speed
from ..inputs import normal

SOLUTION = '''import math

import torch


class KVCache:
    """Keys and values of one sequence, for one layer, with room for ``most`` tokens."""

    def __init__(self, most, heads, d):
        self.k = torch.empty(heads, most, d)
        self.v = torch.empty(heads, most, d)
        self.length = 0

    def append(self, k, v):
        """Keep k and v [heads, n, d] of the next n tokens. ValueError if they do not fit."""
        end = self.length + k.shape[1]
        if end > self.k.shape[1]:
            raise ValueError("the cache is full")
        self.k[:, self.length : end].copy_(k)
        self.v[:, self.length : end].copy_(v)
        self.length = end

    def attend(self, q):
        """Attention of the last n tokens' queries q [heads, n, d] over all tokens so far, causal -> [heads, n, d]."""
        n = q.shape[1]
        k, v = self.k[:, : self.length], self.v[:, : self.length]
        scores = (q / math.sqrt(q.shape[2])) @ k.transpose(1, 2)
        if n > 1:
            later = torch.ones(n, self.length, dtype=torch.bool).triu(self.length - n + 1)
            scores = scores.masked_fill(later, -math.inf)
        return scores.softmax(-1) @ v
'''


def _drive(module, q, k, v, pieces):
    """Feed a sequence in pieces; the outputs side by side, or "full" where the cache refuses."""
    import torch

    heads, tokens, d = q.shape
    cache = module.KVCache(tokens, heads, d)
    outputs, start = [], 0
    for count in pieces:
        piece = slice(start, start + count)
        try:
            cache.append(k[:, piece], v[:, piece])
        except ValueError:
            return "full"
        outputs.append(cache.attend(q[:, piece]))
        start += count
    return torch.cat(outputs, 1)


def _over(module, q, k, v, pieces):
    cache = module.KVCache(q.shape[1] - 1, q.shape[0], q.shape[2])
    try:
        cache.append(k, v)
    except ValueError:
        return "full"
    return "kept"


def _exact(q, k, v, pieces, causal=True):
    tokens = q.shape[1]
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[2])
    if causal:
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v


def _top_left(q, k, v, pieces):
    """Use the mask of a square matrix on pieces that begin later."""
    outputs, start = [], 0
    for count in pieces:
        seen = start + count
        scores = q[:, start:seen] @ k[:, :seen].transpose(1, 2) / math.sqrt(q.shape[2])
        scores = scores.masked_fill(torch.ones(count, seen, dtype=torch.bool).triu(1), -math.inf)
        outputs.append(scores.softmax(-1) @ v[:, :seen])
        start = seen
    return torch.cat(outputs, 1)


def _make(rng, heads, d, *pieces):
    tokens = sum(pieces)
    return [*(normal(rng, heads, tokens, d) for _ in range(3)), list(pieces)]


RUNG = Rung(
    name="kv_cache",
    title="The KV cache: compute each token once",
    road="serving",
    place=3,
    kind="torch",
    minutes=40,
    after=("attention",),
    solution=SOLUTION,
    holes=("KVCache.__init__", "KVCache.append", "KVCache.attend"),
    answers={"decode": _exact, "overfull": lambda *a: "full"},
    drives={"decode": _drive, "overfull": _over},
    forbids=("scaled_dot_product_attention",),
    cases=(
        Case("one token", lambda rng: _make(rng, 1, 8, 1), "One token sees itself: the result is its value."),
        Case("a prompt of 6", lambda rng: _make(rng, 2, 16, 6), "Within a prompt token i sees tokens 0 to i."),
        Case("6 single tokens", lambda rng: _make(rng, 2, 16, *[1] * 6),
             "Keep what came before: each new query sees all keys so far."),
        Case("a prompt and 5 tokens", lambda rng: _make(rng, 2, 16, 7, 1, 1, 1, 1, 1),
             "The new keys belong behind those of the prompt."),
        Case("two chunks", lambda rng: _make(rng, 2, 16, 5, 4, 1),
             "The second chunk's query i sees length - n + i + 1 keys: the mask begins at the right end, not at "
             "the left."),
        Case("too many tokens", lambda rng: _make(rng, 2, 16, 6),
             "Refuse with ValueError what does not fit, before anything is written.", entry="overfull"),
    ),
    slips=(
        Slip(lambda *a: _exact(*a, causal=False), "Tokens of a prompt see later ones: mask them."),
        Slip(_top_left, "The mask belongs to the right end: query i of a chunk sees length - n + i + 1 keys."),
    ),
    speed=Speed(lambda rng: _make(rng, 4, 32, 40, *[1] * 12),
                "Every step copies the whole cache: make room once, and copy only the new tokens into their places.",
                ratio=1.3),
    hints=("torch.empty(heads, most, d) once; self.k[:, start:end].copy_(k) in append.",
           "Slices are views: self.k[:, : self.length] copies nothing.",
           "torch.ones(n, length, dtype=torch.bool).triu(length - n + 1) marks what comes later."),
    differences="The engine's cache is one pool for all sequences, cut into blocks: the next rung.",
    apart="the engine has one pool for all sequences, which your next rung, paged_attention, runs in",
    shipped="models/context.py",
)  # fmt: skip
