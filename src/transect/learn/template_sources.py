"""Policies and objectives that ``learn new`` makes a rung from, beside operators: what to excerpt, and how to drive it.

A driver takes a module, the student's or the shipped one, and plain arguments. It stands alone: imports are inside.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

POLICIES = "engine/scheduling/policies/"


@dataclass(frozen=True, slots=True)
class Source:
    """One class of the package that a rung can be about.

    Attributes:
        file: its file in the package; the page is taken from there.
        names: its excerpt, helpers first. preamble: what the excerpt needs above it.
        holes: methods that the student writes.
        drive: plays random arguments. arguments: source of a function that draws them from ``rng``.
    """

    file: str
    names: tuple[str, ...]
    preamble: str
    holes: tuple[str, ...]
    drive: Callable[..., Any]
    arguments: str
    road: str
    kind: str = "python"


def _scaled(module, policy, looks):  # type: ignore[no-untyped-def]
    """Ask a scaling policy at each look (at, ready, starting, waiting, running, share of KV, rate)."""
    made = getattr(module, policy)()
    return [float(made.wanted(module.Seen(*look))) for look in looks]


def _ordered(module, requests):  # type: ignore[no-untyped-def]
    """Let requests (client, weight, priority, prompt, outputs) arrive, and serve the first key now and then."""
    order = module.Order("priority", patience=500.0)
    waiting, served = [], []
    for number, (client, weight, priority, prompt, outputs) in enumerate(requests):
        waiting.append((order.enter(client, weight, priority, prompt, outputs, 1), number))
        if number % 3 == 2:
            turn, first = min(waiting, key=lambda each: (each[0].key, each[1]))
            waiting.remove((turn, first))
            order.admitted(turn)
            order.ended(turn, prompt)
            served.append(first)
    return served


def _preferred(module, gains, lengths, beta, smoothing, loss):  # type: ignore[no-untyped-def]
    """Compute the loss of pairs from their gains [pairs, 2] and the lengths of the answers."""
    from types import SimpleNamespace

    objective = module.DPO.__new__(module.DPO)
    objective._config = SimpleNamespace(dpo=SimpleNamespace(beta=beta, label_smoothing=smoothing, loss=loss))
    objective.gains, objective.answer_tokens = lambda batch: gains, lambda batch: lengths
    return objective.examples_loss(None)[0]


_LOOKS = """[
        [15.0 * i, int(rng.integers(1, 5)), int(rng.integers(0, 2)), int(rng.integers(0, 40)), int(rng.integers(0, 60)),
         float(rng.uniform(0, 1)), float(rng.uniform(0, 9))]
        for i in range(20)
    ]"""


def _scaling(name: str) -> Source:
    return Source(
        POLICIES + "scaling.py", ("Seen", name), "from dataclasses import dataclass\nfrom typing import NamedTuple\n",
        (f"{name}.wanted",), _scaled, f"[{name!r}, {_LOOKS}]", "fleet",
    )  # fmt: skip


SOURCES: dict[str, Source] = {
    "policy:order": Source(
        POLICIES + "order.py", ("Key", "MOST_CLIENTS", "Turn", "Order"),
        "from dataclasses import dataclass\n\nTYPICAL_OUTPUT = 256\n\n\nclass ByPriority:\n"
        "    level = staticmethod(lambda priority, outputs: priority)\n\n\ndef order_policy(name):\n"
        "    # every policy has levels by priority here\n    return ByPriority\n",
        ("Order.enter", "Order.key", "Order._start", "Order.admitted", "Order.ended"), _ordered,
        """[[
        [f"client {rng.integers(3)}", float(rng.integers(1, 4)), int(rng.integers(-2, 3)), int(rng.integers(1, 900)),
         int(rng.integers(1, 400))]
        for _ in range(40)
    ]]""", "serving",
    ),
    "policy:concurrency": _scaling("Concurrency"),
    "policy:queue": _scaling("Queue"),
    "policy:forecast": _scaling("Forecast"),
    "objective:dpo": Source(
        "train/objectives/dpo.py", ("DPO",),
        "from __future__ import annotations\n\nimport torch\nimport torch.nn.functional as F\n"
        "from torch import Tensor\n\n\nclass Preferences:\n"
        "    # has gains(batch) [pairs, 2] and answer_tokens(batch) [pairs, 2]\n    pass\n",
        ("DPO.examples_loss",), _preferred,
        """[
        normal(rng, 6, 2), 5 + normal(rng, 6, 2).abs(), 0.3, 0.1, str(rng.choice(["sigmoid", "ipo", "hinge", "robust"]))
    ]""", "training", "torch",
    ),
}  # fmt: skip
"""By the name that ``learn new`` takes."""


def driver(source: Source) -> str:
    """Write the driver as a function ``_drive`` of the rung's file."""
    text = inspect.getsource(source.drive).replace("  # type: ignore[no-untyped-def]", "")
    return text.replace(f"def {source.drive.__name__}(", "def _drive(", 1)
