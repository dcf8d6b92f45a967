"""Losses to explain: that of a model on one packed batch, or that of a Python file."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ...train.config import TrainConfig
from ...train.data.batches import pack
from ...train.data.tokens import TokenStream
from ...train.model.build import build
from ...train.objectives.loss import batch_loss, token_loss
from .graph import Backward, ForwardRecord, check, explain, leaves_of

RUN_NAME = "__explain__"
"""``__name__`` in an explained file, so that its code under ``if __name__ == "__main__"`` does not run."""


def explain_model(config: TrainConfig, tokens: int) -> Backward:
    """Explain the backward pass of the training loss of ``config.model``, on ``tokens`` random tokens in two documents.

    It runs once before it is measured: first calls set things up.

    Raises:
        ValueError: the model cannot be found, or there are fewer than 4 tokens.
    """
    if tokens < 4:
        raise ValueError(
            f"two documents with something to predict need at least 4 tokens, not {tokens}: raise --tokens"
        )
    trainable = build(config)
    ids = np.random.Generator(np.random.Philox(config.seed)).integers(trainable.source.config.vocab_size, size=tokens)
    half = tokens // 2
    batch = pack(TokenStream(ids, np.array([half, tokens])), [(0, half, False), (half, tokens, False)])
    batch = batch.to(trainable.device)
    loss = token_loss(trainable.device, trainable.source.config.logit_softcap)
    return explain_function(lambda: batch_loss(trainable.model, batch, loss))


def explain_function(loss: Callable[[], Tensor]) -> Backward:
    """Explain the backward pass of the result of ``loss()``, the second time it is called.

    Raises:
        ValueError: it returns no loss.
    """
    first = loss()
    check(first)
    first.backward()  # type: ignore[no-untyped-call]
    for leaf in leaves_of(first):
        leaf.grad = None
    del first
    with ForwardRecord() as record:
        again = loss()
    return explain(again, record)


def explain_script(path: Path) -> Backward:
    """Explain the backward pass of the loss that a Python file makes.

    The file is run with ``__name__`` set to ``__explain__``. It leaves ``loss``: a scalar, or a function without
    arguments that returns one (which is called twice, and measured the second time).

    Raises:
        ValueError: no such file, it fails, or it leaves no loss.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give a Python file or a model")
    with _as_script(path):
        with ForwardRecord() as record:
            values = _run(path, lambda: runpy.run_path(str(path), run_name=RUN_NAME))
        if "loss" not in values:
            raise ValueError(
                f"{path} defines no loss: assign a scalar to `loss`, or define a function `loss()` that returns one, "
                'outside of `if __name__ == "__main__"`'
            )
        loss = values["loss"]
        try:
            if callable(loss) and not isinstance(loss, Tensor):
                return explain_function(lambda: _run(path, loss))
            return explain(loss, record)
        except ValueError as error:
            raise error if str(path) in str(error) else ValueError(f"{path}: {error}") from error


def _run(path: Path, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise ValueError(f"{where} failed with {type(error).__name__}: {error}") from error


@contextmanager
def _as_script(path: Path) -> Iterator[None]:
    """Set the arguments and the import path of ``python PATH``; its imports remain possible afterwards."""
    arguments = sys.argv
    sys.argv = [str(path)]
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = arguments
        sys.path.remove(folder)
