"""From XOR to a language model: what fraction of the machine each example uses, and why not more.

    python examples/explain/xor_to_llm.py [--only xor,digits]
    python examples/explain/xor_to_llm.py --model llama-3.1-8b --train llama-3.2-1b --dummy     # shapes, on a GPU

Four examples of this project train, and an engine generates. Each is explained: the FLOPs that its operators needed,
as a share of what the machine multiplies in that time, the share of the time that is at the floor (FLOPs or bytes,
whichever binds), and the two largest parts of the rest. Small models spend their time on calling operators; a language
model that decodes reads its weights for each token, which bytes bind and not FLOPs.

Where there is a GPU, XOR and the digits run on it too, and ``--train`` explains steps of training a shape.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from transect import LLM, SamplingParams
from transect.costs.ceilings import Ceilings
from transect.costs.floors import Rates
from transect.explain import Explain
from transect.explain.engine.log import build
from transect.explain.engine.work import StepWork
from transect.explain.program.explain import Explanation, explain_script, machine_ceilings
from transect.explain.program.op_floor import cost
from transect.explain.program.script import Script
from transect.explain.program.split import PARTS
from transect.hardware.device import detect
from transect.hardware.environment import environment
from transect.ops.cpu.ceilings import device_measurement

FOLDER = Path(__file__).resolve().parents[1]
SCRIPTS = {"line": 100, "xor": 100, "digits": 200, "characters": 6}
"""Steps of each example: some hundred milliseconds."""
ON_GPU = ("xor", "digits")
TOKENS = 16
SEQUENCE, ROWS, STEPS = 4096, 2, 2
"""Tokens of a document, documents of a step, and steps that are looked at, where a GPU trains a shape."""


def of_operators(found: Explanation) -> float:
    """FLOPs of the operators in a trace; a kernel has those of the operator that launched it."""
    flops = 0.0
    for op in found.split.ops:
        each = cost(dataclasses.replace(op.key, name=op.name))
        flops += op.calls * each.flops if each is not None else 0.0
    return flops


def row(name: str, found: Explanation, flops: float, ceilings: Ceilings, dtype: str, device: str) -> dict[str, Any]:
    """What is printed and kept of one example."""
    split = found.split
    parts = {part: seconds / split.own for part, seconds in split.parts.items() if part not in ("floor", "profiler")}
    of_peak, least = flops / split.own / ceilings.rate(dtype), split.parts["floor"] / split.own
    if of_peak > least:  # some kernels' shapes are not in the trace, but these FLOPs alone take that long
        parts["inefficiency"], least = parts["inefficiency"] + least - of_peak, of_peak
    chief = sorted(parts, key=lambda part: -parts[part])[:2]
    result = {
        "name": name,
        "device": device,
        "dtype": dtype,
        "seconds": split.own,
        "of_peak": of_peak,
        "at_the_floor": least,
        "chief": {part: parts[part] for part in chief},
    }
    why = ", ".join(f"{parts[part]:.0%} {PARTS[part].partition(':')[0]}" for part in chief)
    print(
        f"{name:16} {device:4} {result['of_peak']:9.4%} of the peak, {result['at_the_floor']:6.2%} at the floor; {why}",
        flush=True,
    )
    return result


def script(name: str, ceilings: Ceilings, device: str) -> dict[str, Any]:
    """One of the training examples."""
    arguments = ("--steps", str(SCRIPTS[name]), *(("--device", device) if device != "cpu" else ()))
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in range(2):  # the first time imports what it needs
            found = explain_script(Script(FOLDER / f"{name}.py", arguments), Explain(ceilings))
    return row(name, found, of_operators(found), ceilings, "float32", device)


def engine(model: str, dummy: bool, ceilings: Ceilings, device: str) -> list[dict[str, Any]]:
    """An engine: one sequence that decodes, and a prompt."""
    llm = LLM(model, load_format="dummy" if dummy else "auto", max_model_len=640, max_num_seqs=1)
    assert llm.decisions is not None
    rows = []
    for name, prompt, tokens in (("LLM, decode", 8, TOKENS), ("LLM, prompt", 512, 1)):
        ids, params = [list(range(10, 10 + prompt))], SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
        llm.generate(ids, params)
        llm.reset_prefix_cache()
        before = len(build(llm.decisions.records()).steps)
        with Explain(ceilings, decisions=llm.decisions) as run:
            llm.generate(ids, params)
        log = build(llm.decisions.records())
        dtype = str(log.header.device["dtype"])
        work = StepWork.of(log.header, Rates.of(ceilings, dtype))
        flops = sum(work.floor(step.rows).flops for step in log.steps[before:])
        assert run.result is not None
        rows.append(row(name, run.result, flops, ceilings, dtype, device))
    return rows


def training(model: str, ceilings: Ceilings) -> dict[str, Any]:
    """Steps of pretraining a shape in bfloat16 on random tokens."""
    from transect.costs.training import flops_per_token
    from transect.train.config import TrainConfig
    from transect.train.data.tokens import token_dtype, write_meta
    from transect.train.loop.trainer import Trainer

    tokens = torch.randint(0, 10_000, (20 * ROWS * SEQUENCE,)).numpy()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "random.tokens"
        folder.mkdir()
        tokens.astype(token_dtype(128256)).tofile(folder / "tokens.bin")
        torch.arange(SEQUENCE, len(tokens) + 1, SEQUENCE).numpy().astype("uint64").tofile(folder / "ends.bin")
        write_meta(folder, len(tokens), len(tokens) // SEQUENCE, 128256, "none")
        settings = {
            "model": model,
            "load_format": "dummy",
            "task": "pretrain",
            "steps": 1000,
            "precision": "bfloat16",
            "data": {"train": [str(folder)], "seq_len": SEQUENCE, "micro_batch": SEQUENCE * ROWS},
        }
        trainer = Trainer(TrainConfig.from_dict(settings))
        for _ in range(3):
            trainer.step()
        flops = STEPS * ROWS * SEQUENCE * flops_per_token(trainer.trainable.source.config, SEQUENCE, frozen=False)
        with Explain(ceilings, floor_s=flops / ceilings.rate("bfloat16")) as run:
            for _ in range(STEPS):
                trainer.step()
        assert run.result is not None
    return row(f"{model}, training", run.result, flops, ceilings, "bfloat16", "cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join([*SCRIPTS, "llm"]), help="some of them, separated by commas")
    parser.add_argument("--model", default="smollm2-135m", help="what the engine runs")
    parser.add_argument("--dummy", action="store_true", help="random weights in the shape of the model")
    parser.add_argument("--train", default="", help="on a GPU: a shape whose training is explained, in bfloat16")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - {*SCRIPTS, "llm"}:
        parser.error(f"there is no example {sorted(unknown)[0]!r}: choose from {', '.join([*SCRIPTS, 'llm'])}")
    on_gpu = torch.cuda.is_available()
    if options.train and not on_gpu:
        parser.error("--train needs a GPU")
    device, ceilings = "cuda" if on_gpu else "cpu", machine_ceilings()
    of_host = device_measurement(detect("cpu")).ceilings if on_gpu else ceilings
    gpu = {"gpu": torch.cuda.get_device_name()} if on_gpu else {}
    command = f"python examples/explain/xor_to_llm.py --model {options.model}" + " --dummy" * options.dummy
    command += f" --train {options.train}" if options.train else ""
    rows: list[dict[str, Any]] = []

    def keep(*found: dict[str, Any]) -> None:
        rows.extend(found)
        order = list(SCRIPTS)
        rows.sort(key=lambda each: order.index(each["name"]) if each["name"] in order else len(order))
        if options.json:
            result = {"command": command, "environment": environment() | gpu, "rows": rows}
            options.json.write_text(json.dumps(result, indent=2) + "\n")

    if "llm" in wanted:
        keep(*engine(options.model, options.dummy, ceilings, device))
        gc.collect()
    if options.train:
        keep(training(options.train, ceilings))
        gc.collect()
    for name in (name for name in SCRIPTS if name in wanted):
        keep(script(name, of_host, "cpu"))
        if on_gpu and name in ON_GPU:
            keep(script(name, ceilings, "cuda"))


if __name__ == "__main__":
    main()
