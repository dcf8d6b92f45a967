"""From XOR to a language model: what fraction of the machine each example uses, and why not more.

    python examples/explain/xor_to_llm.py [--only xor,digits]

Four examples of this project train, and an engine generates. Each is explained: the FLOPs that its operators needed,
as a share of what the machine multiplies in that time, the share of the time that is at the floor (FLOPs or bytes,
whichever binds), and the two largest parts of the rest. Small models spend their time on calling operators; a language
model that decodes reads its weights for each token, which bytes bind and not FLOPs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch

from transect import LLM, SamplingParams
from transect.bench.floors import Rates
from transect.explain import Explain
from transect.explain.log import build
from transect.explain.op_floor import cost
from transect.explain.program import Explanation, explain_script, machine_ceilings
from transect.explain.split import PARTS
from transect.explain.work import StepWork
from transect.hardware.ceilings import Ceilings
from transect.hardware.environment import environment

FOLDER = Path(__file__).resolve().parents[1]
SCRIPTS = {"line": 100, "xor": 100, "digits": 200, "characters": 6}
"""Steps of each example: some hundred milliseconds."""
TOKENS = 16


def of_operators(found: Explanation) -> float:
    """FLOPs of the operators in a trace."""
    costs = ((op.calls, cost(op.key)) for op in found.split.ops)
    return sum(calls * each.flops for calls, each in costs if each is not None)


def row(name: str, found: Explanation, flops: float, ceilings: Ceilings, dtype: str) -> dict[str, Any]:
    """What is printed and kept of one example."""
    split = found.split
    parts = {part: seconds / split.own for part, seconds in split.parts.items() if part not in ("floor", "profiler")}
    chief = sorted(parts, key=lambda part: -parts[part])[:2]
    result = {
        "name": name,
        "seconds": split.own,
        "of_peak": flops / split.own / ceilings.rate(dtype),
        "at_the_floor": split.parts["floor"] / split.own,
        "chief": {part: parts[part] for part in chief},
    }
    why = ", ".join(f"{parts[part]:.0%} {PARTS[part].partition(':')[0]}" for part in chief)
    print(
        f"{name:12} {result['of_peak']:7.2%} of the peak, {result['at_the_floor']:6.1%} at the floor; {why}", flush=True
    )
    return result


def script(name: str, ceilings: Ceilings) -> dict[str, Any]:
    """One of the training examples."""
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in range(2):  # the first time imports what it needs
            found = explain_script(FOLDER / f"{name}.py", ["--steps", str(SCRIPTS[name])], Explain(ceilings))
    return row(name, found, of_operators(found), ceilings, "float32")


def model(ceilings: Ceilings) -> list[dict[str, Any]]:
    """An engine: one sequence that decodes, and a prompt."""
    llm = LLM("smollm2-135m", max_model_len=640, max_num_seqs=1)
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
        rows.append(row(name, run.result, flops, ceilings, dtype))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join([*SCRIPTS, "llm"]), help="some of them, separated by commas")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - {*SCRIPTS, "llm"}:
        parser.error(f"there is no example {sorted(unknown)[0]!r}: choose from {', '.join([*SCRIPTS, 'llm'])}")
    ceilings = machine_ceilings()
    rows = [script(name, ceilings) for name in SCRIPTS if name in wanted]
    if "llm" in wanted:
        rows += model(ceilings)
    if options.json:
        gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
        result = {"command": "python examples/explain/xor_to_llm.py", "environment": environment() | gpu, "rows": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
