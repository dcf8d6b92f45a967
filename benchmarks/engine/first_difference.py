"""The first operator of a deterministic engine whose bits depend on the batch, on one GPU.

    python benchmarks/engine/first_difference.py engine [--weights fp8] [--cache fp8] [--way graphs]
    python benchmarks/engine/first_difference.py products
    python benchmarks/engine/first_difference.py attention

``engine`` runs prompts alone and in one batch and compares the results of every operator of every layer, and the bytes
of the cache, token by token. It prints the first that differs for each prompt. Copies of results keep kernels from
overlapping, so other ways to run compare only the answers: if these alone differ, a kernel reads too early.
``products`` compares every kind of weight for 1 to 300 rows, ``attention`` the rotation, the write to the cache and
attention for prompts of 1 to 300 tokens and for rows that decode. Each takes 20 to 60 s. All lines should begin with
"ok".
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import _paths  # noqa: F401
from transect.engine.executors.gpu import setup
from transect.engine.executors.gpu.options import GPUOptions
from transect.models.fused_stack import FusedStack
from transect.models.weights.int4_serving import Int4Products, served_codes
from transect.models.weights.scaled8 import Products8
from transect.ops.attention.paged.batch import PagedBatch
from transect.ops.attention.paged.cache_codes import stored_width
from transect.ops.linear.packed.eight_bit.scaled8_rounding import rounded
from transect.ops.linear.packed.int4.int4_packing import arrange_codes

LENGTHS = (3, 40, 700, 17, 300, 1, 128, 33, 64, 65, 127, 129, 256, 257)
"""Prompts: their numbers of tokens."""
DRAWS = 8
MODEL, HEADS, KV_HEADS, SIZE = "qwen3-0.6b", 16, 8, 128
SHAPES = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
Answer = tuple[list[int], Any]
WAYS = {
    "recorded": "record operators, whose launches then follow one another",
    "eager": "compare answers alone",
    "graphs": "the same, with CUDA graphs",
    "apart": "the same, without dependent launch",
}


# ------------------------------------------------------------------------------------------------------------- engine


class Recorder:
    """Keeps the results of all operators of a stack, step by step."""

    def __init__(self, stack: FusedStack) -> None:
        self.steps: list[dict[str, Any]] = []
        self.on = False
        hidden, attend, add_norm, write = stack.hidden, stack._attend_to, stack._add_norm, stack._ops.rotary_kv_write

        def begin(tokens: Tensor, positions: Tensor, context: Any, places: Tensor | None = None) -> Tensor:
            if self.on:
                batch, wanted = context.batch, context.wanted
                step = {"starts": batch.query_starts.tolist(), "lengths": batch.seq_lens.tolist()}
                step |= {"wanted": None if wanted is None else wanted.tokens_R.tolist(), "stages": []}
                self.steps.append(step | {"tokens": len(positions)})
            return self.kept("norm of the model", hidden(tokens, positions, context, places))

        def attended(layer: Any, *arguments: Any) -> Tensor:
            return self.kept(f"attention {layer.index}", attend(layer, *arguments))

        def normed(*arguments: Any) -> tuple[Tensor, Tensor]:
            total, norm = add_norm(*arguments)
            self.kept("sum", total)
            return total, self.kept("norm", norm)

        def written(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Tensor:
            turned = self.kept("turned q", write(q, k, v, cos, sin, *more, **named))
            self.keep_cache(*more[:3])
            return turned

        stack.hidden, stack._attend_to, stack._add_norm = begin, attended, normed  # type: ignore[method-assign]
        stack._ops = dataclasses.replace(stack._ops, rotary_kv_write=written)
        for layer in stack._layers:
            for name in ("qkv", "o", "gated", "down"):
                if (product := getattr(layer, name)) is not None:
                    setattr(layer, name, partial(self._multiplied, f"{name} {layer.index}", product))

    def _multiplied(self, name: str, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return self.kept(name, product(x))

    def kept(self, name: str, result: Tensor) -> Tensor:
        if self.on:
            self.steps[-1]["stages"].append((name, result.clone()))
        return result

    def keep_cache(self, keys: Tensor, values: Tensor, batch: PagedBatch) -> None:
        """Keep the bytes of all rows' keys and values."""
        if not self.on:
            return
        rows = {}
        for row, length in enumerate(self.steps[-1]["lengths"]):
            if not length:
                continue
            blocks = batch.block_tables[row, : -(-length // batch.block_size)].long()
            both = [cache[blocks].transpose(1, 2).flatten(0, 1)[:length].clone() for cache in (keys, values)]
            rows[row] = torch.stack([each.view(torch.uint8) for each in both], 1)
        self.steps[-1]["stages"].append(("cache", rows))

    def taken(self) -> dict[tuple[int, int], list[tuple[str, Tensor]]]:
        """Return the stages of every (prompt's length, step), and forget them."""
        torch.cuda.synchronize()
        found = {}
        for index, step in enumerate(self.steps):
            starts, wanted = step["starts"], step["wanted"]
            for row, length in enumerate(step["lengths"]):
                if not length or starts[row + 1] == starts[row]:
                    continue
                own = slice(starts[row], starts[row + 1])
                stages = []
                for name, result in step["stages"]:
                    if isinstance(result, dict):
                        stages.append((name, result[row]))
                    elif len(result) == step["tokens"]:
                        stages.append((name, result[own]))
                    elif own.stop - 1 in wanted:
                        stages.append((name, result[wanted.index(own.stop - 1)][None]))
                found[length - index, index] = stages
        self.steps = []
        return found


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    return [random.Random(length).choices(range(100, 50_000), k=length) for length in lengths]


def engine(weights: str | None, cache: str, way: str) -> None:
    from transect import LLM, SamplingParams  # needs packages that the other parts do not

    llm = LLM(
        MODEL, enable_prefix_caching=False, max_num_seqs=64, load_format="dummy", device="cuda", deterministic=True,
        seed=0, max_model_len=1024, quantization=weights, kv_cache_dtype=cache, kv_cache_tokens=16384,
        cuda_graphs="on" if way == "graphs" else "off", gpu=GPUOptions(dependent_launch=way != "apart"),
    )  # fmt: skip
    params = SamplingParams(max_tokens=DRAWS, seed=1, temperature=0.8, logprobs=3, ignore_eos=True)
    stack = next(each for each in gc.get_objects() if isinstance(each, FusedStack))
    recorder = Recorder(stack) if way == "recorded" else None

    def run(given: Sequence[list[int]]) -> tuple[list[Answer], dict[tuple[int, int], Any]]:
        if recorder is not None:
            recorder.on = True
        outputs = llm.generate(given, params)
        answers = [(list(each.outputs[0].token_ids), each.outputs[0].logprobs) for each in outputs]
        return answers, {} if recorder is None else recorder.taken()

    label = f"weights {weights or 'bf16'}, cache {cache}, {way}"
    alone: list[Answer] = []
    stages: dict[tuple[int, int], Any] = {}
    for prompt in prompts(LENGTHS):
        answers, found = run([prompt])
        alone += answers
        stages |= found
    for name, order in (("in the order of the test", LENGTHS[:8]), ("all", LENGTHS), ("backwards", LENGTHS[::-1])):
        answers, found = run(prompts(order))
        for length, answer in zip(order, answers, strict=True):
            expected = alone[LENGTHS.index(length)]
            first = next((i for i in range(DRAWS) if answer[0][i] != expected[0][i] or
                          str(answer[1][i]) != str(expected[1][i])), None)  # fmt: skip
            print("ok  " if first is None else "DIFF", label, name, f"prompt {length}: answer differs from {first}")
            for step in range(DRAWS):
                if recorder is not None and (line := difference(stages, found, length, step)):
                    print("    ", f"DIFF step {step}: {line}", flush=True)
                    break
    repeated, _ = run([prompts([128])[0]])
    print(
        "ok  " if str(repeated[0]) == str(alone[LENGTHS.index(128)]) else "DIFF", label, "prompt 128 again", flush=True
    )


def difference(one: dict, other: dict, length: int, step: int) -> str | None:
    """Describe the first stage that differs, and how many more do; None if none does."""
    key = length, step
    if key not in one or key not in other:
        return f"not recorded (alone {key in one}, together {key in other})"
    pairs = list(zip(one[key], other[key], strict=False))
    unlike = [(name, a, b) for (name, a), (_, b) in pairs if a.shape != b.shape or not torch.equal(bits(a), bits(b))]
    if not unlike:
        return None if len(one[key]) == len(other[key]) else "other stages"
    name, a, b = unlike[0]
    names = [each for each, _, _ in unlike[1:6]]
    if a.shape != b.shape:
        return f"{name}: shapes {list(a.shape)} and {list(b.shape)}"
    at = (bits(a) != bits(b)).nonzero()
    tokens = sorted(set(at[:, 0].tolist()))
    gap = (a.float() - b.float()).abs().max().item()
    more = (
        f"tokens {tokens[:12]}, first at {at[:4].tolist()}, most apart {gap:.3g} of {a.float().abs().max().item():.3g}"
    )
    return f"{name}: {len(at)} of {a.numel()} in {len(tokens)} tokens; {more}; {len(unlike) - 1} stages after: {names}"


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(
        torch.uint8 if x.element_size() == 1 else torch.int16 if x.element_size() == 2 else torch.int32
    )


# ----------------------------------------------------------------------------------------------------------- products


def weight_of(kind: str, n: int, k: int) -> Callable[[Tensor], Tensor]:
    """Return a product with random weights, as an engine resolves it."""
    values = torch.randn(n, k, device="cuda") / k**0.5
    if kind == "bf16":
        ops, dense = setup.gpu_ops(torch.device("cuda"), deterministic=True), values.bfloat16()
        return lambda x: ops.linear(x, dense)
    if kind == "int4":
        product = Int4Products.on("cuda", dependent=True, batch_invariant=True).product
        codes, scale, zero = served_codes(values)
        arranged = arrange_codes(codes, scale, zero)
        return lambda x: product(x, arranged, n)
    fp8, blocks = kind != "int8", kind == "blocks"
    many = Products8.on("cuda", dependent=True, fp8=fp8, blocks=blocks, batch_invariant=True).many
    assert many is not None
    codes, scale = rounded(values, fp8)
    codes = codes.view(torch.int8)
    if blocks:
        scale = torch.rand(n // 128, k // 128, device="cuda") / 64 + 1e-3
    return lambda x: many(x, codes, scale, None, fp8)


def products() -> Iterator[tuple[str, list[Any]]]:
    sizes = [*range(1, 301), 320, 384, 448, 512, 513, 704, 1024]
    for kind in ("fp8", "int4", "int8", "blocks", "bf16"):
        for name, (n, k) in SHAPES.items():
            product, x = weight_of(kind, n, k), torch.randn(1280, k, device="cuda").bfloat16()
            whole = product(x)
            wrong: list[Any] = []
            for m in sizes:
                for first in sorted({0, min(1061, 1280 - m)}):
                    y = product(x[first : first + m].contiguous())
                    if not torch.equal(y, whole[first : first + m]):
                        unlike = (y != whole[first : first + m]).nonzero()
                        wrong.append((m, first, len(unlike), unlike[0].tolist()))
            yield f"{kind} {name}: rows, their first, outputs that differ, the first", wrong
            twice = [m for m in sizes if not torch.equal(product(x[:m].contiguous()), product(x[:m].contiguous()))]
            yield f"{kind} {name}: rows for which two runs differ", twice


# ---------------------------------------------------------------------------------------------------------- attention


def one_prompt(tokens: int, rows: int, first: int = 0) -> PagedBatch:
    """Make a batch of ``rows`` with a prompt in row ``first``, whose blocks are those from 0 on."""
    counts = torch.zeros(rows, dtype=torch.int32)
    counts[first] = tokens
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)))
    tables = torch.arange(64, dtype=torch.int32).repeat(rows, 1)
    return PagedBatch(tables, starts, counts, 16, max_query_len=max(2, tokens)).to("cuda")


def joined(lengths: Sequence[int], rows: int) -> PagedBatch:
    """Make one batch of all prompts, each in blocks of its own."""
    counts = torch.tensor([*lengths, *[0] * (rows - len(lengths))], dtype=torch.int32)
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)))
    tables = torch.arange(64 * rows, dtype=torch.int32).view(rows, 64)
    return PagedBatch(tables, starts, counts, 16, max_query_len=max(lengths)).to("cuda")


def attention() -> Iterator[tuple[str, list[Any]]]:
    ops = setup.gpu_ops(torch.device("cuda"), deterministic=True)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    weights = draw(SIZE), draw(SIZE)
    longest = 700
    both = draw(longest, HEADS + 2 * KV_HEADS, SIZE)
    angles = torch.rand(longest, SIZE // 2, device="cuda", generator=generator) * 100

    def written(tokens: int, batch: PagedBatch, dtype: torch.dtype, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Write prompts, all the first tokens of one; returns turned q, and the caches."""
        width = stored_width(SIZE, dtype)
        caches = [torch.zeros(64 * batch.num_rows, KV_HEADS, 16, width, device="cuda").to(dtype) for _ in range(2)]
        spare = torch.zeros(tokens - sum(lengths), dtype=torch.int64)
        at = torch.cat([*(torch.arange(length) for length in lengths), spare]).cuda()
        qkv = both[at].flatten(1).view(tokens, -1, SIZE)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
        cos, sin = angles.cos()[at], angles.sin()[at]
        turned = ops.rotary_kv_write(q, k, v, cos, sin, *caches, batch, *weights, 1e-6)
        return turned, *caches

    for name, dtype in CACHES.items():
        group = (3, 40, 700, 17, 300, 128, 33)
        batch = joined(group, 64)
        turned, keys, values = written(1280, batch, dtype, group)
        together = ops.paged_attention(turned, keys, values, batch, SIZE**-0.5, None)
        long, held = turned[43:743], together[43:743]
        slots = [cache.view(64, 64, KV_HEADS, 16, -1)[2] for cache in (keys, values)]
        wrong: dict[str, list[Any]] = {"turned q": [], "keys": [], "values": [], "attention": [], "two runs": []}
        for length in [*range(2, 301), 448, 700]:
            for rows in (1, 40):  # never as many as tokens, which would be a step that only decodes
                own = one_prompt(length, rows)
                tokens = -(-length // 16) * 16
                q, *caches = written(tokens, own, dtype, [length])
                if not torch.equal(q[:length], long[:length]):
                    wrong["turned q"].append((length, rows, int((q[:length] != long[:length]).sum())))
                blocks = -(-length // 16)
                for label, cache, all_slots in zip(("keys", "values"), caches, slots, strict=True):
                    mine, other = ((each[:blocks].transpose(1, 2).flatten(0, 1)[:length]).contiguous().view(torch.uint8)
                                   for each in (cache, all_slots))  # fmt: skip
                    if not torch.equal(mine, other):
                        wrong[label].append((length, rows, int((mine != other).sum())))
                y, again = (ops.paged_attention(q, *caches, own, SIZE**-0.5, None)[:length] for _ in range(2))
                if not torch.equal(y, held[:length]):
                    wrong["attention"].append((length, rows, int((y != held[:length]).sum())))
                if not torch.equal(y, again):
                    wrong["two runs"].append((length, rows))
        for label, found in wrong.items():
            yield f"cache {name}, prompts of 2 to 700: {label}", found
        # Rows that decode, alone and together, against the same positions of a prompt.
        ends = [*range(1, 301, 7), 127, 128, 129, 130, 131, 132, 133, 134, 135, 256, 257, 699, 700]
        unlike: list[Any] = []
        for count in (1, 2, 3, 8, len(ends)):
            for first in range(0, len(ends), count):
                some = ends[first : first + count]
                table = batch.block_tables[2].repeat(len(some), 1)
                starts = torch.arange(len(some) + 1, dtype=torch.int32, device="cuda")
                lengths = torch.tensor(some, dtype=torch.int32, device="cuda")
                decode = PagedBatch(table, starts, lengths, 16, max_query_len=1)
                at = lengths.long() - 1
                y = ops.paged_attention(long[at], keys, values, decode, SIZE**-0.5, None)
                differs = (bits(y) != bits(held[at])).flatten(1).any(1).tolist()
                unlike += [(count, end) for end, bad in zip(some, differs, strict=True) if bad]
        yield f"cache {name}, rows that decode and a prompt: rows, position", unlike


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("engine", "products", "attention"))
    parser.add_argument("--weights", help="quantization of the engine's weights")
    parser.add_argument("--cache", default="auto", help="data type of the engine's KV cache")
    parser.add_argument("--way", choices=WAYS, default="recorded", help="; ".join(map(": ".join, WAYS.items())))
    options = parser.parse_args()
    if options.part == "engine":
        engine(options.weights, options.cache, options.way)
        return
    with torch.inference_mode():
        torch.manual_seed(0)
        for name, wrong in products() if options.part == "products" else attention():
            print("DIFF" if wrong else "ok  ", f"{name}: {len(wrong)} {wrong[:10]}", flush=True)


if __name__ == "__main__":
    main()
