"""Finds work that the result does not need: padding, prefixes and layers that are computed again, gradients without a
use or mostly of zeros, products with one-hot rows, and tensors of all pairs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .doing import doing_of
from .finding import MANY, Finding, Material, weighed
from .op_floor import FREE, PRODUCTS, cost, floor
from .split import IDLE, OpStat, Split
from .trace import KERNEL, OP, Key

RECORDING_S = 1e-6
"""Seconds that autograd adds to an operator, assumed if not measured."""
NODES = "autograd::engine::evaluate_function"
"""Beginning of the names of the ranges in which nodes of a backward pass run."""
SPARSE = 4
"""Rows of a table for each one that a step looks up, from which a dense gradient is mostly zeros."""
SPREAD = 16
"""Elements of a tensor of all pairs for each element of the larger of its two factors."""
REACHED = 0.5
"""Share of a device's rate that a product of some hundred rows roughly reaches."""
PAIRED = {f"aten::{name}" for name in ("sub", "mul", "sub_", "mul_")}
"""Operators that make a tensor of all pairs which a product or ``cdist`` replaces."""
SUMMED = {f"aten::{name}" for name in ("sum", "mean", "linalg_vector_norm", "norm")}
THEN = {*PAIRED, *SUMMED, "aten::pow", "aten::square", "aten::abs", "aten::sqrt"}
"""All operators on such a tensor, if one is to be replaced."""
FREE_MEMORY = 0.5
"""Largest used share of the memory with which layers need not be computed again."""


def padding(material: Material) -> Iterator[Finding]:
    """Find tokens that are padding."""
    seconds = material.split.parts["padding"]
    if seconds:
        share = float(material.facts.get("padding", 0.0))
        yield Finding(
            "padding",
            "most of the work is on padding" if share > 0.5 else "work on padding",
            f"{share:.0%} of the token ids are padding",
            seconds,
            "sort by length, pack sequences, or use variable-length attention",
        )


def gradients(material: Material) -> Iterator[Finding]:
    """Find recording by autograd whose gradients are never used."""
    if material.trains:
        return
    split = material.split
    calls = recorded_calls(split)
    forgotten = float(material.facts.get("forgetting_s", 0.0))
    seconds = calls * (float(material.facts.get("autograd_s", RECORDING_S)) - forgotten)
    seconds = min(seconds, (split.parts["launch"] + split.parts["inefficiency"]) / 2) + calls * forgotten
    if split.on_gpu:  # beside what the GPU computes recording costs nothing
        seconds = min(seconds, split.uncovered)
    if calls >= MANY:
        yield Finding(
            "autograd",
            "autograd records operators, and no backward pass runs",
            f"{calls} operators were recorded",
            seconds,
            "run inference under torch.inference_mode()",
            apply="inference mode",
        )


def recorded_calls(split: Split) -> int:
    """Return the number of operators that autograd recorded."""
    return min(split.trace.recorded, sum(op.calls for op in split.ops if op.key.nodes))


def unused_gradients(material: Material) -> Iterator[Finding]:
    """Find gradients of parameters that no optimizer updates, or that are dropped before its step."""
    share, before = material.facts.get("unused", (0.0, False))
    seconds = backward_seconds(material.split) * share
    if seconds:
        kind = "" if before else "weight "
        yield Finding(
            "unused gradients",
            "gradients are computed that no optimizer uses",
            f"{share:.0%} of the gradients are of parameters without an optimizer, or dropped before its step: "
            f"{1e3 * seconds:.1f} ms of the backward pass",
            seconds if before else seconds / 2,  # those of activations are needed to reach the parameters before them
            f"requires_grad_(False) for frozen parameters: their {kind}gradients are left out"
            + ("; or detach() what they return, or run them under torch.no_grad()" if before else ""),
        )


def backward_seconds(split: Split) -> float:
    """Return the seconds of the backward pass: on a host those of autograd's nodes, on a GPU those of the kernels that
    the nodes launched."""
    trace = split.trace
    nodes = np.flatnonzero((trace.kind == OP) & trace.having(lambda key: key.name.startswith(NODES)))
    if not split.on_gpu:
        whole = float(trace.dur[nodes].sum())
        return whole * split.own / split.wall if split.wall else 0.0
    launcher, kernels = trace.launchers, trace.where(KERNEL)
    ops = np.array([launcher.get(link, -1) for link in trace.link[kernels].tolist()], dtype=int)
    seconds = 0.0
    for lane in set(trace.lane[nodes].tolist()):
        mine = (ops >= 0) & (trace.lane[ops] == lane)
        inside = trace.during(nodes[trace.lane[nodes] == lane], trace.ts[ops[mine]])
        seconds += float(trace.dur[kernels[mine]][inside].sum())
    return min(seconds, split.busy)


def dense_gradients(material: Material) -> Iterator[Finding]:
    """Find tables of which a step reads a few rows, with gradients for all of them."""
    split = material.split
    if not split.named("aten::embedding_dense_backward"):
        return
    read: dict[tuple[int, ...], int] = {}
    for key in split.trace.keys:
        shapes = shapes_of(key)
        if key.name == "aten::embedding" and len(shapes) > 1 and len(shapes[0]) == 2:
            table = tuple(shapes[0])
            read[table] = max(read.get(table, 0), math.prod(shapes[1]))
    tables = {table: rows for table, rows in read.items() if SPARSE * rows <= table[0]}
    multiplied = {tuple(shape) for op in split.named(*PRODUCTS) for shape in shapes_of(op.key)}
    tables = {table: rows for table, rows in tables.items() if not {table, table[::-1]} & multiplied}  # tied to a head
    seconds = 0.0
    for op in split.ops:
        whole = [tuple(shape) for shape in shapes_of(op.key) if tuple(shape) in tables]
        if op.name == "aten::embedding_dense_backward":
            width = shapes_of(op.key)[0][-1:] if shapes_of(op.key) else []
            whole = [table for table in tables if [table[1]] == width]
        if whole and op.name != "aten::embedding":
            seconds += op.seconds * (1 - tables[whole[0]] / whole[0][0])
    if seconds:
        largest = max(tables, key=math.prod)
        yield Finding(
            "dense gradients",
            "whole embedding tables get gradients and updates, though a step reads a few rows",
            f"{tables[largest]} of {largest[0]} rows of {largest[1]} numbers are read in a call",
            seconds,
            "nn.Embedding(..., sparse=True) with SGD or SparseAdam",
        )


def shapes_of(key: Key) -> list[list[int]]:
    """Return the shapes of the inputs that are tensors, or lists of tensors."""
    found = key.shapes if isinstance(key.shapes, list) else []
    listed = [each for inputs in found if isinstance(inputs, list) for each in inputs if isinstance(each, list)]
    every = [*(each for each in found if isinstance(each, list)), *listed]
    return [each for each in every if each and all(isinstance(size, int) for size in each)]


def recomputation(material: Material) -> Iterator[Finding]:
    """Find layers that a backward pass computes again, to save memory that is left."""
    used = float(material.facts.get("memory", 0.0))
    samples = material.stacks
    if not samples or used > FREE_MEMORY:
        return
    split = material.split
    share = weighed(samples, lambda sample: doing_of(sample.stack).kind).get("recomputation", 0.0)
    if split.on_gpu:  # a thread of autograd computes them: layers take as long as in the forward pass
        first = sum(any(frame.function == "checkpoint" for frame in sample.stack) for sample in samples)
        forward = sum("backward" not in {frame.function for frame in sample.stack} for sample in samples)
        share = first / max(1, forward) * max(0.0, split.busy - backward_seconds(split)) / (split.own or 1.0)
        if split.idle > IDLE * split.own:  # the host decides: it calls their operators again, too
            share = max(share, first / len(samples))
    if share:
        yield Finding(
            "recomputation",
            "layers are computed again in the backward pass",
            f"{share:.0%} of the time; {used:.0%} of the memory is in use",
            share * split.own,
            "no activation checkpointing while memory is left (gradient_checkpointing=False), or of fewer layers",
        )


def prefix(material: Material) -> Iterator[Finding]:
    """Find calls of a module on the sequence of the call before and one more element."""
    length = float(material.facts.get("prefix", 0.0))
    if not length:
        return
    seconds = 0.0
    for op in material.split.ops:
        key = replace(op.key, name=op.name)
        spent = op.seconds - (0.0 if op.operator else op.launch)
        needed = spent / length
        if (rows := rows_of(key)) is not None:
            least = floor(with_rows(key, max(1, round(rows / length))), material.ceilings)
            needed = min(spent, max(needed, op.calls * (least or 0.0)))
        seconds += spent - needed
    yield Finding(
        "prefix",
        "each call computes the sequence of the previous call again",
        f"calls get one more element each, {length:.0f} on average",
        seconds,
        "keep keys and values of attention: use_cache=True and past_key_values, or generate(); only the new element is "
        "computed then",
    )


def rows_of(key: Key) -> int | None:
    """Return the rows of a product's first factor; None for other operators."""
    shapes = key.shapes
    if not isinstance(shapes, list) or len(shapes) < 2:
        return None
    left = shapes[1] if key.name == "aten::addmm" else shapes[0]
    return left[0] if key.name in ("aten::mm", "aten::addmm") and isinstance(left, list) and len(left) == 2 else None


def with_rows(key: Key, rows: int) -> Key:
    """Return a product with another number of rows in its first factor."""
    shapes = [list(each) for each in key.shapes]
    shapes[1 if key.name == "aten::addmm" else 0][0] = rows
    return replace(key, shapes=shapes)


def one_hot_products(material: Material) -> Iterator[Finding]:
    """Find products of one-hot rows with a table, which look its rows up."""
    split = material.split
    ids = {tuple(op.key.shapes[0]) for op in split.named("aten::one_hot") if op.key.shapes and op.key.shapes[0]}
    for product in split.named(*PRODUCTS):
        for left, right in itertools.pairwise(shapes_of(product.key)[-2:]):
            rows, (classes, width) = math.prod(left[:-1]), right[-2:] if len(right) > 1 else (0, 0)
            whole = next((each for each in ids if math.prod(each) == rows and left[-1] == classes > 1), None)
            if whole is None:
                continue
            made = [op for op in split.ops if {(*whole, classes), (rows, classes)} & {*map(tuple, shapes_of(op.key))}]
            if not any(op.name == "aten::scatter_" for op in made):
                continue
            spent = sum(op.seconds for op in made)
            needed = product.calls * 8 * rows * width / material.ceilings.copy_bytes_per_second
            yield Finding(
                "one-hot",
                "rows of a table are looked up by products with one-hot rows",
                f"{product.name} {product.key.shapes} {product.calls} times, and the rows before it: "
                f"{1e3 * spent:.1f} ms",
                max(0.0, spent - needed),
                "table[ids], or nn.Embedding: they read only the rows of these ids",
            )
            return


def pairs(material: Material) -> Iterator[Finding]:
    """Find tensors with an element for each pair of rows and each column, which are then summed over the columns."""
    split = material.split
    made: dict[tuple[int, ...], OpStat] = {}
    for op in split.ops:
        shapes = shapes_of(op.key)
        if op.name in PAIRED and len(shapes) == 2 and len(shapes[0]) == len(shapes[1]):
            whole = tuple(map(max, *shapes))
            if SPREAD * max(map(math.prod, shapes)) <= math.prod(whole) and shapes[0][-1] == shapes[1][-1] > 1:
                made[whole] = op
    for whole, op in made.items():
        users = [each for each in split.ops if list(whole) in shapes_of(each.key)]
        if not any(each.name in SUMMED for each in users) or any(each.name not in THEN | FREE for each in users):
            continue
        spent = op.seconds + sum(each.seconds for each in users)
        *batch, rows, columns, width = (1, *whole)
        key = replace(
            op.key, name="aten::bmm", shapes=[[math.prod(batch), rows, width], [math.prod(batch), width, columns]]
        )
        needed = (floor(key, material.ceilings) or 0.0) / REACHED if cost(key) is not None else 0.0
        yield Finding(
            "broadcast",
            "a tensor with an element for each pair of rows is written, and then summed",
            f"{op.name} makes {list(whole)} of {shapes_of(op.key)}, {op.calls} times: {1e3 * spent:.1f} ms in all",
            spent - op.calls * needed,
            "torch.cdist for distances, a matrix product for sums of products",
        )
