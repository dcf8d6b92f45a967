"""An engine process without a model: the shipping loop, scheduler and messages, and an executor that makes tokens up.

It starts in a tenth of the time that a real one takes, so that tests can kill many. The token at a position is a
function of seed, choice, position and the token before, so an answer continues like that of a model whose bits are
promised.

Run as ``python -m stub_engine ENDPOINT`` in place of ``transect.engine.frontends.process``. ``STUB_STEP_S`` of the
environment is the time of a step in seconds, ``STUB_VOCAB`` the vocabulary; with ``STUB_EXACT=0`` no bits are promised,
and with ``STUB_HANGS`` it is never ready. ``STUB_START_S`` are further seconds of its start, ``STUB_BLOCKS`` and
``STUB_SEQS`` its KV blocks and places. ``STUB_HOLD`` names a file that does not exist: the first engine with
``HOLD_AT`` tokens of an answer creates it and makes no more, so that a test can kill it before the answer ends.
"""

from __future__ import annotations

import os
import sys
import time
import types
from hashlib import blake2b
from pathlib import Path

from decision_logs import log_for

from transect.engine.frontends import process
from transect.engine.numerics import Numerics
from transect.engine.scheduling.batch import ScheduledBatch, StepResult, TokenLogprobs
from transect.engine.scheduling.clock import WallClock
from transect.engine.scheduling.core import EngineCore
from transect.engine.scheduling.scheduler import Scheduler
from transect.engine.scheduling.scheduler_config import SchedulerConfig

VOCAB, POISON = int(os.environ.get("STUB_VOCAB", "256")), 7
"""A prompt that ends with ``POISON`` twice kills the engine at the first step that computes its last token."""
HOLD_AT = 25


def token_at(seed: int, choice: int, position: int, before: int, penalty: float, used: int) -> int:
    key = f"{seed} {choice} {position} {before} {penalty} {used if penalty else 0}"
    return 32 + int.from_bytes(blake2b(key.encode(), digest_size=4).digest(), "little") % 95


def hold_once() -> None:
    """Sleep until killed, unless another engine has done so."""
    try:
        Path(os.environ["STUB_HOLD"]).touch(exist_ok=False)
    except FileExistsError:
        return
    time.sleep(3600)


class Handle:
    def __init__(self, batch: ScheduledBatch) -> None:
        self.batch = batch

    def draw(self) -> None:
        pass

    def result(self) -> StepResult:
        if STEP_S:
            time.sleep(STEP_S)
        result = StepResult({})
        for row in self.batch.rows:
            for draw in row.draws:
                prompt = draw.prompt_token_ids
                if prompt[-2:] == (POISON, POISON):
                    os._exit(3)
                if "STUB_HOLD" in os.environ and len(draw.output_token_ids) == HOLD_AT:
                    hold_once()
                before = (draw.output_token_ids or prompt)[-1]
                seed, used = draw.seed, len(set(draw.output_token_ids))
                token = token_at(seed, draw.choice, row.end, before, draw.params.presence_penalty, used)
                result.tokens[draw.seq_id] = token
                if draw.params.logprobs is not None:
                    result.logprobs[draw.seq_id] = TokenLogprobs(token, -1.0 - row.end / 1000, 1)
        return result


class StubExecutor:
    def submit(self, batch: ScheduledBatch) -> Handle:
        return Handle(batch)


def start_engine(config, compilers, began, children):  # type: ignore[no-untyped-def]
    if "STUB_HANGS" in os.environ:
        time.sleep(3600)
    time.sleep(float(os.environ.get("STUB_START_S", "0")))
    scheduler = SchedulerConfig(
        num_blocks=int(os.environ.get("STUB_BLOCKS", "4096")),
        max_num_seqs=int(os.environ.get("STUB_SEQS", "64")),
        max_num_batched_tokens=512,
        max_model_len=4096,
    )
    core = EngineCore(Scheduler(scheduler, WallClock()), StubExecutor())
    core.decisions = log_for(core)
    numerics = Numerics({"weights": "stub"}, os.environ.get("STUB_EXACT", "1") == "1")
    return types.SimpleNamespace(
        adapters=None,
        core=core,
        ranks=None,
        report=(),
        max_model_len=4096,
        vocab_size=VOCAB,
        eos_token_ids=(),
        kv_tokens=4096 * 16,
        kernels="none",
        numerics=numerics,
        source=types.SimpleNamespace(config=types.SimpleNamespace(dim=8)),
        grammars=lambda checked: types.SimpleNamespace(close=lambda: None, kept_bytes=0),
    )


STEP_S = float(os.environ.get("STUB_STEP_S", "0"))

if __name__ == "__main__":
    stub = types.ModuleType("transect.engine.ranks")
    stub.start_engine, stub.end = start_engine, lambda core, ranks: None  # type: ignore[attr-defined]
    sys.modules["transect.engine.ranks"] = stub
    process.main()
