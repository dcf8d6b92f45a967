"""Objectives that ``learn new`` makes a rung from, beside operators and policies: what to excerpt, and how to drive it.

A driver takes a module, the student's or the shipped one, and plain arguments. It stands alone: imports are inside.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Source:
    """One class of the package that a rung can be about.

    Attributes:
        file: its file in the package; the page is taken from there.
        names: its excerpt, helpers first. preamble: what the excerpt needs above it; None for the definitions and
            imports of the file that the names need.
        holes: methods that the student writes.
        drive: plays random arguments. arguments: source of a function that draws them from ``rng``.
    """

    file: str
    names: tuple[str, ...]
    preamble: str | None
    holes: tuple[str, ...]
    drive: Callable[..., Any]
    arguments: str
    road: str
    kind: str = "python"
    allows: tuple[str, ...] = ()
    """Modules of this package that the preamble imports."""


def _preferred(module, gains, lengths, beta, smoothing, loss):  # type: ignore[no-untyped-def]
    """Compute the loss of pairs from their gains [pairs, 2] and the lengths of the answers."""
    from types import SimpleNamespace

    objective = module.DPO.__new__(module.DPO)
    objective._config = SimpleNamespace(dpo=SimpleNamespace(beta=beta, label_smoothing=smoothing, loss=loss))
    objective.gains, objective.answer_tokens = lambda batch: gains, lambda batch: lengths
    return objective.examples_loss(None)[0]


def _rated(module, gains, good, beta, desirable, undesirable):  # type: ignore[no-untyped-def]
    """Compute the loss of answers from their gains [answers, 2], beside their own and other prompts."""
    from types import SimpleNamespace

    objective = module.KTO.__new__(module.KTO)
    weights = {"desirable_weight": desirable, "undesirable_weight": undesirable}
    objective._config = SimpleNamespace(kto=SimpleNamespace(beta=beta, **weights))
    objective.gains = lambda batch: gains
    return objective.examples_loss(SimpleNamespace(good=good))[0]


def _apart(module, student, teacher, kind, mixture):  # type: ignore[no-untyped-def]
    """Compute the divergence and its gradient from logits [rows, words]."""
    return module.Divergence(kind, mixture).of(student.log_softmax(-1), teacher.log_softmax(-1))


def _odds(module, hidden, head, lengths, prompts, beta, train_prompt):  # type: ignore[no-untyped-def]
    """Compute the loss of pairs of documents: hidden states [tokens, D], a head [words, D], prompts' lengths."""
    from types import SimpleNamespace

    import torch

    ends = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.arange(int(ends[-1])) * 7 % len(head)
    labels = torch.full_like(tokens, -100)
    for start, end, prompt in zip(ends[:-1].tolist(), ends[1:].tolist(), prompts, strict=True):
        labels[start + prompt - 1 : end - 1] = tokens[start + prompt : end]
    starts = ends.int()
    batch = SimpleNamespace(tokens_T=tokens, labels_T=labels, positions_T=tokens, cu_seqlens=starts)

    parts = {"ops": SimpleNamespace(), "head": SimpleNamespace(dense=lambda: head), "__call__": lambda *given: hidden}
    model = type("Model", (), parts)()
    objective = module.ORPO.__new__(module.ORPO)
    objective._config = SimpleNamespace(orpo=SimpleNamespace(beta=beta, train_prompt=train_prompt))
    objective._trainable = SimpleNamespace(model=model)
    return objective.examples_loss(batch)[0]


def _reinforced(module, hidden, head, labels, old, advantage, weight, reference, clip, beta):  # type: ignore[no-untyped-def]
    """Compute the loss of answers [tokens] from hidden states [tokens, D] and a head [words, D]."""
    from types import SimpleNamespace

    import torch

    from transect.train.objectives.answers import AnswerBatch

    parts = {"ops": SimpleNamespace(), "head": SimpleNamespace(dense=lambda: head), "__call__": lambda *given: hidden}
    model = type("Model", (), parts)()
    objective = module.GRPO.__new__(module.GRPO)
    settings = {"temperature": 0.8, "clip": clip, "clip_high": 0.0, "beta": beta, "unbiased_kl": False}
    objective._config = SimpleNamespace(grpo=SimpleNamespace(**settings))
    objective._trainable, objective._seen = SimpleNamespace(model=model), []
    starts = torch.tensor([0, len(labels)], dtype=torch.int32)
    answers = (old, advantage, weight, reference, None)
    return objective.loss(AnswerBatch(labels, labels, labels, starts, len(labels), len(labels), *answers))


def _drafted(module, lengths, labels, steps):  # type: ignore[no-untyped-def]
    """Find the rows of each step of documents of these lengths; labels [tokens] are -100 where nothing is trained."""
    from types import SimpleNamespace

    import torch

    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    batch = SimpleNamespace(num_tokens=len(labels), cu_seqlens=starts, tokens_T=labels, labels_T=labels)
    return [[each.chosen_R, each.at_R] for each in module.rows_of(batch, steps)]


SOURCES: dict[str, Source] = {
    "objective:kto": Source(
        "train/objectives/kto.py", ("KTO",),
        "from __future__ import annotations\n\nimport torch\n\n\nclass Preferences:\n"
        "    # has gains(batch) [answers, 2]\n    pass\n",
        ("KTO.examples_loss",), _rated,
        """[normal(rng, 9, 2), normal(rng, 9) > 0, 0.4, 1.0, 1.3]""", "training", "torch",
    ),
    "objective:distill": Source(
        "train/objectives/divergence.py", ("Divergence",), None, ("Divergence.of",), _apart,
        """[normal(rng, 5, 11), normal(rng, 5, 11), str(rng.choice(["forward", "reverse", "jsd"])), 0.3]""",
        "training", "torch",
    ),
    "objective:orpo": Source(
        "train/objectives/orpo.py", ("ORPO",), None, ("ORPO.examples_loss",), _odds,
        """[normal(rng, 22, 6), normal(rng, 13, 6), [5, 7, 6, 4], [2, 3, 2, 2], 0.3, bool(rng.integers(2))]""",
        "training", "torch",
    ),
    "objective:grpo": Source(
        "train/objectives/grpo.py", ("GRPO.loss",),
        "from __future__ import annotations\n\nimport torch\n\nfrom transect.train.data.batches import IGNORE\n"
        "from transect.train.objectives.answers import AnswerBatch\n"
        "from transect.train.objectives.logprobs import batch_hidden, token_logprobs\n\n\nclass GRPO:\n",
        ("GRPO.loss",), _reinforced,
        """[
        normal(rng, 12, 6), normal(rng, 13, 6), torch.from_numpy(rng.integers(0, 13, 12)), normal(rng, 12) - 2.5,
        normal(rng, 12), normal(rng, 12).abs(), normal(rng, 12) - 2.5, 0.2, 0.1
    ]""", "training", "torch", ("transect.train.data.batches", "transect.train.objectives.answers",
                               "transect.train.objectives.logprobs"),
    ),
    "objective:eagle3": Source(
        "train/objectives/head_loss.py", ("rows_of",), None, ("rows_of",), _drafted,
        """[
        [5, 3, 4], torch.from_numpy(rng.integers(3, 9, 12)).masked_fill(torch.from_numpy(rng.random(12)) < 0.2, -100), 3
    ]""",
        "training", "torch",
    ),
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
