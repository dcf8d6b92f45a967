"""``transect tune MODEL``: find the fastest kernel for each product of a model's decode steps, and keep it."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..ops.linear.few_rows.search import Product, ProductTimes
    from ..spec.model import ModelConfig


def products(config: ModelConfig) -> list[Product]:
    """List the products of a decode step in 16 bits, each size once: those of the layers, and the head. Experts are
    excluded; their kernels have rules of their own."""
    from ..ops.linear.few_rows.search import Product
    from ..spec.weights import PROJECTIONS, linear_shapes

    found: dict[tuple[int, int, bool], Product] = {}
    for layer in range(config.n_layers):
        shapes = linear_shapes(config, layer)
        for name, parts in PROJECTIONS.items():
            sizes = [shapes[part][0] for part in parts if part in shapes]
            if sizes:
                n, k, gated = sum(rows for rows, _ in sizes), sizes[0][1], name == "gate_up" and len(sizes) == 2
                found.setdefault((n, k, gated), Product(name, n, k, gated))
    head = (config.vocab_size, config.dim, False)
    found.setdefault(head, Product("head", *head))
    return list(found.values())


def tune(
    config: ModelConfig, rows: list[int], seconds: float, load: bool, keep: bool, ship: bool, out: Path | None
) -> None:
    """Measure kernels (the fastest again under ``load``), show and keep them; start no measurement after ``seconds``.
    Without ``rows`` those of ``choices.ROWS`` are measured.

    Raises:
        ValueError: no Hopper GPU, or rows out of range.
    """
    import torch

    from ..hardware.device import target_of
    from ..ops.linear.few_rows import search
    from ..ops.linear.few_rows.choices import FOLDER, MOST_ROWS, ROWS
    from ..ops.tools.timing import time_graph
    from ..ops.tools.under_load import race

    rows = rows or list(ROWS)
    if not all(1 <= each <= MOST_ROWS for each in rows):
        raise ValueError(
            f"--rows takes numbers from 1 to {MOST_ROWS} with commas between them; more rows need no tuning"
        )
    if not target_of().hopper:
        raise ValueError("the products of a model are tuned on a Hopper GPU, and torch finds none here")
    device, name = torch.device("cuda", torch.cuda.current_device()), torch.cuda.get_device_name()
    units = torch.cuda.get_device_properties(device).multi_processor_count
    multiply, found = search.multiplier(), list[search.ProductTimes]()
    end, path = time.monotonic() + seconds, None
    for product in products(config):
        waiting = list(rows)
        while waiting and time.monotonic() < end:
            for each in search.search(
                product, [waiting.pop(0)], multiply, time_graph, race if load else None, device, units
            ):
                found.append(each)
                _show(each)
                if keep:
                    path = search.save(name, search.entries([each]), FOLDER if ship else None)
                if out is not None:
                    _write(out, name, found)
        if waiting:
            missing = ", ".join(map(str, waiting))
            print(f"no time was left for {product.name} with {missing} rows: --seconds")
        torch.cuda.empty_cache()
    _sum(config, found)
    if path is not None:
        print(f"kept in {path}")


def _show(each: ProductTimes) -> None:
    product = each.product
    kind = ", with the gate" if product.gated else ""
    gained = each.before_seconds / each.seconds
    change = "" if each.choice == each.before else f", by {each.choice.by}: {gained:.2f} times as fast"
    times = f"{each.before_seconds * 1e6:7.1f} us ({each.before.by}) -> {each.seconds * 1e6:7.1f} us"
    tried = f"{each.tried} tried" + (f", {len(each.finals)} under load" if each.finals else "")
    print(f"{product.name}, {product.k} by {product.n}{kind}, {each.rows:3} rows: {times}{change}; {tried}", flush=True)


def _sum(config: ModelConfig, found: list[ProductTimes]) -> None:
    """Print the total time of a decode step's products, before and after, if all of them were measured."""
    times: dict[int, list[float]] = {}
    counted = Counter(each.rows for each in found)
    for each in found:
        if counted[each.rows] < len(products(config)):
            continue
        count = 1 if each.product.name == "head" else config.n_layers
        both = times.setdefault(each.rows, [0.0, 0.0])
        both[0] += count * each.before_seconds
        both[1] += count * each.seconds
    for rows, (before, now) in times.items():
        gained = f"{before * 1e3:.2f} -> {now * 1e3:.2f} ms ({before / now - 1:.1%} gained)"
        print(f"products of a step of {rows} rows: {gained}")


def _write(path: Path, device: str, found: list[ProductTimes]) -> None:
    from dataclasses import asdict
    from json import dumps

    from ..hardware.environment import commit, environment

    rows: list[dict[str, Any]] = [asdict(each) for each in found]
    where = environment(("torch", "triton"))
    path.write_text(
        dumps({"device": device, "environment": where, "commit": commit(), "products": rows}, indent=1) + "\n"
    )
