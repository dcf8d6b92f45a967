r"""A row of memory for each sequence, as long as it may become, wastes most of it: a user who may write 8,192 tokens
writes 200. Before 2023 servers used a fifth to a third of their cache for real tokens. *PagedAttention* does what
operating systems do with memory. The cache is one pool of *blocks* of B tokens (16, say). Each sequence has a
*block table*: the numbers of its blocks in order. Position p lives in block table[p // B], at slot p % B. Blocks
lie anywhere, and at most B - 1 slots of a sequence are unused.

Two operations. *Write*: put the keys and values of new tokens into their slots. The pool seen as rows of tokens
has slot table[p // B] * B + p % B, so all of a step's tokens, of all sequences, are one indexed copy. *Attend*:
gather a sequence's blocks in the order of its table, cut off at its length, and do attention.

A whole step is *ragged*: some sequences bring a prompt chunk, most bring one token. They are laid end to end (no
padding), with `starts` saying where each begins. The shipped kernel reads through the block table as it goes and
never gathers. In torch, gathering is fine, but only the blocks that are needed: gathering the whole pool for every
sequence is right too, and reads gigabytes.
"""

import math
from itertools import pairwise

import torch

from ...record import Case, Live, Rung, Slip, Speed
from ..inputs import normal

SOLUTION = '''import math

import torch


def write(pool, new, tables, starts, lengths):
    """Put new tokens into the pool [blocks, B, heads, d], in place, and return it. new [tokens, heads, d]: those of
    sequence s are new[starts[s] : starts[s + 1]], the last of its lengths[s] tokens. tables[s]: its blocks in order."""
    size = pool.shape[1]
    places = []
    for s, table in enumerate(tables):
        count = starts[s + 1] - starts[s]
        places += [table[p // size] * size + p % size for p in range(lengths[s] - count, lengths[s])]
    pool.view(-1, *pool.shape[2:])[torch.tensor(places, dtype=torch.long)] = new
    return pool


def attend(q, k_pool, v_pool, tables, starts, lengths):
    """Causal attention of new tokens q [tokens, heads, d] through the block tables -> like q."""
    size = k_pool.shape[1]
    outputs = []
    for s, table in enumerate(tables):
        length, rows = lengths[s], q[starts[s] : starts[s + 1]].transpose(0, 1)
        blocks = torch.tensor(table[: -(-length // size)], dtype=torch.long)
        k = k_pool[blocks].flatten(0, 1)[:length].permute(1, 2, 0)
        v = v_pool[blocks].flatten(0, 1)[:length].transpose(0, 1)
        scores = (rows / math.sqrt(q.shape[2])) @ k
        n = rows.shape[1]
        if n > 1:
            later = torch.ones(n, length, dtype=torch.bool).triu(length - n + 1)
            scores = scores.masked_fill(later, -math.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)
'''


def _compact(batch):
    """List the blocks that a ``PagedBatch`` uses, its block tables as places in that list, its starts and lengths."""
    tables, starts, lengths = batch.block_tables.tolist(), batch.query_starts.tolist(), batch.seq_lens.tolist()
    size = batch.block_size
    tables = [table[: -(-length // size)] for table, length in zip(tables, lengths, strict=True)]
    used = sorted({block for table in tables for block in table})
    places = {block: place for place, block in enumerate(used)}
    return used, [[places[block] for block in table] for table in tables], starts, lengths


def _live_write(mine, shipped):
    def kv_cache_write(k, v, k_cache, v_cache, batch):
        used, *where = _compact(batch)
        for new, cache in ((k, k_cache), (v, v_cache)):
            pool = cache[used].transpose(1, 2).contiguous()
            cache[used] = mine.write(pool, new.to(cache.dtype), *where).transpose(1, 2)

    return kv_cache_write


def _live_attend(mine, shipped):
    def paged_attention(q, k_cache, v_cache, batch, scale, window=None, **how):
        if window is not None or how:
            return shipped(q, k_cache, v_cache, batch, scale, window, **how)
        group = q.shape[1] // k_cache.shape[1]
        used, *where = _compact(batch)
        pools = [cache[used].transpose(1, 2).repeat_interleave(group, 2).float() for cache in (k_cache, v_cache)]
        return mine.attend(q.float() * (scale * math.sqrt(q.shape[2])), *pools, *where).to(q.dtype)

    return paged_attention


def _places(pool, tables, starts, lengths):
    size = pool.shape[1]
    for s, table in enumerate(tables):
        count = starts[s + 1] - starts[s]
        for i, p in enumerate(range(lengths[s] - count, lengths[s])):
            yield starts[s] + i, table[p // size], p % size


def _write(pool, new, tables, starts, lengths):
    out = pool.clone()
    for row, block, slot in _places(pool, tables, starts, lengths):
        out[block, slot] = new[row]
    return out


def _from_front(pool, new, tables, starts, lengths):
    counts = [b - a for a, b in pairwise(starts)]
    return _write(pool, new, tables, starts, counts)


def _attend(q, k_pool, v_pool, tables, starts, lengths, causal=True, shift=0):
    outputs = []
    for s, table in enumerate(tables):
        length, rows = lengths[s], q[starts[s] : starts[s + 1]].transpose(0, 1)
        k = torch.cat([k_pool[block] for block in table])[: length + shift].transpose(0, 1)
        v = torch.cat([v_pool[block] for block in table])[: length + shift].transpose(0, 1)
        n = rows.shape[1]
        scores = rows @ k.transpose(1, 2) / math.sqrt(q.shape[2])
        if causal and n > 1:
            scores = scores.masked_fill(torch.ones(n, k.shape[1], dtype=torch.bool).triu(length - n + 1), -math.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def _batch(rng, lengths, counts, size=4, blocks=40):
    order, tables, taken = rng.permutation(blocks), [], 0
    for length in lengths:
        need = -(-length // size)
        tables.append([int(each) for each in order[taken : taken + need]])
        taken += need
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return tables, starts, list(lengths), size, blocks


def _written(rng, lengths, counts):
    tables, starts, lengths, size, blocks = _batch(rng, lengths, counts)
    return [normal(rng, blocks, size, 2, 8), normal(rng, starts[-1], 2, 8), tables, starts, lengths]


def _attended(rng, lengths, counts, blocks=40):
    tables, starts, lengths, size, blocks = _batch(rng, lengths, counts, blocks=blocks)
    pools = [normal(rng, blocks, size, 2, 8) for _ in range(2)]
    return [normal(rng, starts[-1], 2, 8), *pools, tables, starts, lengths]


def _drive(module, pool, new, tables, starts, lengths):
    return module.write(pool.clone(), new, tables, starts, lengths)


RUNG = Rung(
    name="paged_attention",
    title="Paged attention through block tables",
    road="serving",
    place=4,
    kind="torch",
    minutes=60,
    after=("kv_cache",),
    solution=SOLUTION,
    holes=("write", "attend"),
    answers={"write": _write, "attend": _attend},
    drives={"write": _drive},
    forbids=("scaled_dot_product_attention",),
    cases=(
        Case("write a prompt", lambda rng: _written(rng, [6], [6]),
             "Position p goes to block table[p // B], slot p % B."),
        Case("write a decode", lambda rng: _written(rng, [6], [1]),
             "New tokens are the last of the sequence: positions length - count on."),
        Case("write a ragged batch", lambda rng: _written(rng, [6, 9, 4, 1], [1, 3, 4, 1]),
             "Each sequence has its own part of the new tokens, starts[s] to starts[s + 1]."),
        Case("one query", lambda rng: _attended(rng, [7], [1]),
             "Gather the blocks in the order of the table, and cut off at the length.",
             entry="attend"),
        Case("a whole block", lambda rng: _attended(rng, [8], [1]),
             "8 tokens are exactly two blocks: round up, and no further.",
             entry="attend"),
        Case("a prompt chunk", lambda rng: _attended(rng, [11], [5]),
             "Chunk tokens see all before them, and not those after.",
             entry="attend"),
        Case("a ragged batch", lambda rng: _attended(rng, [7, 12, 5, 1], [1, 4, 1, 1]),
             "Each sequence sees its own blocks only.", entry="attend"),
    ),
    slips=(
        Slip(_from_front, "New tokens are written at the front of the sequence: they belong at its end."),
        Slip(lambda *a: _attend(*a, causal=False), "Tokens of a chunk see later ones of the same chunk.", "attend"),
        Slip(lambda *a: _attend(*a, shift=3), "Slots behind the length are read: cut off at the length.", "attend"),
    ),
    speed=Speed(lambda rng: _attended(rng, [20, 33, 9, 15], [1, 1, 1, 1], 300),
                "More of the pool is read than the sequences' own blocks: index the pool with the table first.",
                entry="attend", ratio=1.3),
    hints=("Slots as one flat index: table[p // B] * B + p % B, into pool.view(-1, heads, d).",
           "k_pool[blocks] with a tensor of block numbers copies just those.",
           "Attention itself is that of the rung kv_cache."),
    differences=
        "The shipped kernel walks over the block table with an online softmax and gathers nothing; long sequences are "
    "split between programs, and prefill chunks and decodes share a launch.",
    live=Live("serve", {"transect.ops.attention.paged.kv_cache_write:reference": _live_write,
                        "transect.ops.attention.paged.paged_attention:tiled": _live_attend}, ("--no-native",)),
    shipped="ops/attention/paged/paged_attention.py",
)  # fmt: skip
