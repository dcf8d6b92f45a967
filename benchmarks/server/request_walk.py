"""One request through the code, stage by stage, with the time of each: what a token costs and where.

Everything that ``transect serve`` does with a request happens here in one process and one thread, in its order, so that
each stage can be timed by itself. Decode steps are timed with 1 request and with several, all of about the same length.
Times are medians over the steps of a round, of the quickest round.

    python benchmarks/server/request_walk.py [--model smollm2-135m] [--batches 1,8,32] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

PROMPT = "Continuous batching lets a request join the batch that is running, instead of waiting for it to end. " * 6
WARM, STEPS = 8, 48
STAGES = {
    "parse": ("`server/openai/protocol.py`", "parse and validate the JSON body"),
    "tokenize": ("`text/tokenizer.py`", "tokenize"),
    "to engine": ("`engine/frontends/wire.py`", "encode and decode the request message"),
    "add": ("`engine/scheduling/scheduler.py`", "check and queue"),
    "schedule": ("`engine/scheduling/scheduler.py`", "choose rows, token counts and KV blocks"),
    "inputs": ("`engine/executors/runner.py`", "batch tensors, embedding, last norm"),
    "layers": ("`models/decoder.py`", "all layers"),
    "head": ("`models/decoder.py`", "logits of the last token"),
    "sample": ("`engine/executors/sampler.py`", "draw a token per request, split the batch"),
    "commit": ("`engine/scheduling/scheduler.py`", "append tokens, detect ends, free or cache blocks"),
    "from engine": ("`engine/frontends/wire.py`", "encode and decode the output message"),
    "detokenize": ("`text/output_processor.py`", "detokenize, check stop strings"),
    "event": ("`server/http/sse.py`", "write a server-sent event"),
}
ONCE = ("parse", "tokenize", "to engine", "add")
IN_STEP = ("schedule", "inputs", "layers", "head", "sample", "commit")
PER_TOKEN = ("from engine", "detokenize", "event")


class Watch:
    """Seconds by name; nested stages are taken off the one around them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._inner.append(0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - start
            self.seconds[name] += taken - self._inner.pop()
            self._inner[-1] += taken

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with self.stage(name):
                return work(*arguments)

        return run

    def take(self) -> dict[str, float]:
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


class Walk:
    """The parts of the server and the engine, without the process border between them."""

    def __init__(self, model: str, threads: int, most: int) -> None:
        from transect.engine.build import build_engine
        from transect.engine.config import EngineConfig
        from transect.server.http.sse import PLACE, TextEvents
        from transect.server.openai.replies import CompletionChoice, CompletionResponse
        from transect.text.output_processor import OutputProcessor
        from transect.text.sampling_defaults import SamplingDefaults
        from transect.text.tokenizer import Tokenizer

        config = EngineConfig(
            model=model, device="cpu", threads=threads, max_num_seqs=most, enable_prefix_caching=False, seed=0
        )
        self.built = build_engine(config)
        self.watch = Watch()
        runner: Any = self.built.core.executor
        decoder = runner._model
        runner._forward = self.watch.timed("inputs", runner._forward)
        decoder.stack = self.watch.timed("layers", decoder.stack)
        decoder.logits = self.watch.timed("head", decoder.logits)
        self.tokenizer = Tokenizer.from_source(self.built.source)
        self.processor = OutputProcessor(self.tokenizer)
        self.defaults = SamplingDefaults()
        choice = CompletionChoice(index=0, text=PLACE)
        self.events = TextEvents(CompletionResponse(id="cmpl-0", created=0, model=model, choices=[choice]))

    def arrive(self, name: str, new: int) -> int:
        """Accept a request, and return its length in tokens."""
        import msgspec

        from transect.engine.frontends import wire
        from transect.engine.scheduling.request import Request
        from transect.engine.scheduling.sampling_params import SamplingParams
        from transect.server.openai.protocol import CompletionRequest

        body = msgspec.json.encode({"prompt": PROMPT, "max_tokens": new, "temperature": 0.7, "ignore_eos": True})
        stage = self.watch.stage
        with stage("parse"):
            params = CompletionRequest.model_validate_json(body).sampling_params(self.defaults)
        with stage("tokenize"):
            ids = self.tokenizer.encode(PROMPT, add_special_tokens=True)
        with stage("to engine"):
            fields = {"max_tokens": params.max_tokens, "temperature": params.temperature, "ignore_eos": True}
            message = wire.decode_to_engine(wire.encode(wire.Submit(name, ids, fields)))
        with stage("add"):
            request = Request(name, tuple(message.prompt_token_ids), SamplingParams(**message.params))
            self.built.core.add(request)
        self.processor.add(name, PROMPT, ids)
        return len(ids)

    def step(self) -> tuple[int, int]:
        """Run one engine step and the work that follows for its tokens; returns (tokens computed, tokens drawn)."""
        from transect.engine.frontends import wire

        core, stage = self.built.core, self.watch.stage
        with stage("schedule"):
            batch = core.scheduler.schedule()
        with stage("sample"):
            result = core.executor.submit(batch).result()
        with stage("commit"):
            outputs = core.scheduler.commit(batch, result)
        with stage("from engine"):
            outputs = wire.decode_from_engine(wire.encode(wire.Outputs(outputs))).outputs
        with stage("detokenize"):
            updates = [self.processor.process(output) for output in outputs]
        with stage("event"):
            for update in updates:
                self.events.event(update.text)
        return sum(row.num_tokens for row in batch.rows), len(outputs)


def medians(taken: list[dict[str, float]], names: tuple[str, ...]) -> dict[str, float]:
    return {name: statistics.median(each.get(name, 0.0) for each in taken) for name in names}


def floors(walk: Walk, threads: int) -> Callable[[list[tuple[int, int]]], float]:
    """Return a function from (new, length) rows to the floor of a step in seconds."""
    import torch

    from transect.checkpoints.layouts import storage_of
    from transect.costs.floors import Rates, step_floor
    from transect.costs.model import Row
    from transect.hardware.device import detect
    from transect.ops.cpu.ceilings import device_measurement

    torch.set_num_threads(threads)
    rates = Rates.of(device_measurement(detect("cpu")).ceilings, "float32")
    torch.set_num_threads(1)
    source = walk.built.source
    storage = storage_of(source, "auto", keeps_quantized=True)
    return lambda rows: step_floor(source.config, [Row(*row) for row in rows], rates, storage).seconds


def table(result: dict[str, Any]) -> str:
    """Format stages down, the request's arrival, its prefill and decode steps across."""

    def cell(seconds: float | None) -> str:
        if seconds is None:
            return ""
        return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"

    columns = result["columns"]
    lines = ["| stage | where | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for name, (where, what) in STAGES.items():
        lines.append(
            f"| {what} | {where} | " + " | ".join(cell(c["stages"].get(name)) for c in columns.values()) + " |"
        )
    for title, key in (("the engine's step", "step"), ("its floor", "floor")):
        lines.append(f"| **{title}** | | " + " | ".join(cell(c.get(key)) for c in columns.values()) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "request_walk.json")
    options = parser.parse_args()
    batches = [int(each) for each in options.batches.split(",")]
    walk = Walk(options.model, options.threads, max(batches))
    floor = floors(walk, options.threads)
    rounds = [measure(walk, batches, floor) for _ in range(options.rounds)]
    result = {
        "command": "python benchmarks/server/request_walk.py",
        "environment": record.environment(),
        "model": options.model,
        "kernels": walk.built.kernels,
        "rounds": options.rounds,
        "steps": STEPS,
        "columns": {name: combined([columns[name] for columns in rounds]) for name in rounds[0]},
    }
    record.write(options.out, result)
    print(table(result))


def measure(
    walk: Walk, batches: Sequence[int], floor: Callable[[list[tuple[int, int]]], float]
) -> dict[str, dict[str, Any]]:
    """Measure a request's arrival, its prefill, and decode steps of batches of requests."""
    watch = walk.watch
    arrivals, prefills, length = [], [], 0
    for number in range(WARM):  # one token each: the way in, and a prefill step by itself
        length = walk.arrive(f"first-{number}", 1)
        arrivals.append(watch.take())
        walk.step()
        prefills.append(watch.take())
    columns: dict[str, Any] = {
        "arrival": {"stages": medians(arrivals[2:], ONCE)},
        f"prefill of {length} tokens": _column(prefills[2:], floor([(length, length)])),
    }
    for batch in batches:
        steps = []
        for number in range(batch):
            walk.arrive(f"{batch}-{number}", WARM + STEPS + batch + 8)
        while any(sequence.first_token_time is None for sequence in _all(walk)):
            walk.step()
        lengths = [sequence.length for sequence in _all(walk)]
        watch.take()
        for _ in range(STEPS):
            tokens, drawn = walk.step()
            assert tokens == drawn == batch, "not a step of decodes alone"
            steps.append(watch.take())
        columns[f"decode step of {batch}"] = _column(steps, floor([(1, each + STEPS // 2) for each in lengths]))
        for sequence in _all(walk):
            walk.built.core.abort(sequence.request.spec.request_id)
            walk.processor.finish(sequence.request.spec.request_id)
        walk.built.core.step()
        watch.take()
    return columns


def combined(columns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the round with the least disturbance from other work, the fastest, with the spread over rounds."""
    totals = [sum(column["stages"].values()) for column in columns]
    return {**columns[totals.index(min(totals))], "spread": record.summary(totals)}


def _column(taken: list[dict[str, float]], floor: float) -> dict[str, Any]:
    step = statistics.median(sum(each.get(name, 0.0) for name in IN_STEP) for each in taken)
    return {"stages": medians(taken, IN_STEP + PER_TOKEN), "step": step, "floor": floor}


def _all(walk: Walk) -> list[Any]:
    scheduler = walk.built.core.scheduler
    return [choice for request in scheduler.requests.values() for choice in request.choices]


if __name__ == "__main__":
    main()
