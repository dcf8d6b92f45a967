"""Predicted and obtained gains of each change that ``transect explain run --apply`` makes.

    python benchmarks/explain/apply.py [NAMES]                                              # on a CPU
    python benchmarks/explain/apply.py --device cuda --out benchmarks/results/h200/explain_apply.json

Small scripts, each slow for reasons that a change from outside can mend, go the way of the command: they are explained
under the profiler, and each change that a finding names is made and measured without it, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from transect.costs.ceilings import Ceilings
from transect.explain import Explain
from transect.explain.program.apply import Applied, applied, kept
from transect.explain.program.explain import explain_script, machine_ceilings
from transect.explain.program.script import Script

HEAD = "import sys\nimport torch\nfrom torch import nn\ntorch.manual_seed(0)\ndevice = sys.argv[1]\n"
SCRIPTS = {
    "float32 products": """
model = nn.Linear(4096, 4096, bias=False, device=device)
x = torch.randn(4096, 4096, device=device)
with torch.no_grad():
    for _ in range(20):
        y = model(x)
print(y.sum().item())
""",
    "one question at a time": """
model = nn.Linear(8192, 8192, bias=False, device=device, dtype=torch.bfloat16)
rows = torch.randn(96, 1, 8192, device=device, dtype=torch.bfloat16)
with torch.no_grad():
    print(torch.stack([model(row) for row in rows]).sum().item())
""",
    "pageable copies": """
host = torch.ones(64, 1 << 18)
for _ in range(20):
    y = host.to(device).sum()
print(y.item())
""",
    "small layers": """
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(16))).to(device).eval()
rows = torch.randn(300, 8, 256, device=device)
print(torch.stack([model(row) for row in rows]).sum().item())
""",
    "anomaly detection": """
torch.autograd.set_detect_anomaly(True)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
optimizer, x = torch.optim.SGD(model.parameters(), 1e-3), torch.randn(16, 64)
for _ in range(100):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
""",
    "collections": """
import gc
model, x = nn.Linear(256, 256), torch.randn(64, 256)
with torch.inference_mode():
    for _ in range(20):
        model(x)
        gc.collect()
""",
    "eager attention": """
from transformers import BertConfig, BertModel
model = BertModel(BertConfig(vocab_size=500, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
    intermediate_size=128, max_position_embeddings=1024, attn_implementation="eager")).eval()
ids = torch.randint(3, 500, (2, 768))
with torch.inference_mode():
    for _ in range(6):
        model(input_ids=ids)
""",
    "optimizer in a loop": """
model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(60)))
optimizer, x = torch.optim.AdamW(model.parameters(), foreach=False), torch.randn(8, 24)
for _ in range(60):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
""",
    "one core": """
x = torch.randn(1400, 1400)
for _ in range(6):
    y = x @ x
print(y.sum().item())
""",
}
ON_CPU = ("small layers", "one core", "anomaly detection", "collections", "eager attention", "optimizer in a loop")
"""Programs of a processor's table; the others need a GPU."""


def tried(name: str, device: str, limits: Ceilings) -> tuple[list[dict[str, Any]], str]:
    """Run one script: the predicted and obtained gain of each change, and a line about those that are kept."""
    before = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name.replace(' ', '_')}.py"
        path.write_text(HEAD + SCRIPTS[name])
        try:
            torch.set_num_threads(1 if name == "one core" else before)
            script = Script(path, (device,))
            explain_script(script, Explain(limits))  # the first time loads what it needs
            found = explain_script(script, Explain(limits, window_s=3.0), again_s=10.0)
            print(f"== {name}\n{found}", flush=True)
            done = []
            for each in applied(script, found):
                print(each, flush=True)
                done.append(each)
            line = kept(script, found, done)
            print(line, flush=True)
        finally:
            torch.set_num_threads(before)
    return [row(name, each) for each in done], line


def row(name: str, done: Applied) -> dict[str, Any]:
    """Format one change for JSON; seconds."""
    return {
        "script": name,
        "finding": done.finding.kind,
        "change": done.name,
        "before_s": None if done.failed else done.before,
        "predicted_s": done.predicted,
        "obtained_s": None if done.failed else done.obtained,
        "once_s": done.setup,
        "failed": done.failed,
    }


def table(result: dict[str, Any]) -> str:
    """Format the predicted and obtained gain of each change."""
    lines = [
        "| script | change | a step or the script, ms | predicted gain, ms | gain, ms | one-time cost, ms |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for each in result["rows"]:
        promised = f"{1e3 * each['predicted_s']:.1f}"
        if each["failed"]:
            lines.append(f"| {each['script']} | {each['change']} | | {promised} | left out: {each['failed']} | |")
            continue
        times = f"{1e3 * each['before_s']:.1f} | {promised} | {1e3 * each['obtained_s']:.1f}"
        lines.append(f"| {each['script']} | {each['change']} | {times} | {1e3 * each['once_s']:.0f} |")
    said = [f"{name}: {line}" for name, line in result.get("kept", {}).items() if line]
    lines += ["", "; ".join(said) + "."] if said else []
    machine = result["environment"]
    where = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores"
    return "\n".join(lines) + f"\n\n`{result['command']}` on {where}, {record.made_at([machine])}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="some of the scripts; all that the device can run if none is named")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "explain_apply.json")
    options = parser.parse_args()
    gpu = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
    if unknown := set(options.names) - set(SCRIPTS):
        parser.error(f"there is no script {sorted(unknown)[0]!r}: choose from {', '.join(SCRIPTS)}")
    on_gpu = [name for name in SCRIPTS if name not in ON_CPU[1:]]
    result: dict[str, Any] = {
        "command": f"python benchmarks/explain/apply.py --device {options.device}",
        "environment": record.environment() | gpu,
        "rows": [],
        "kept": {},
        "seconds": {},
    }
    names = options.names or (on_gpu if gpu else ON_CPU)
    if len(names) == 1:
        result["rows"], result["kept"][names[0]] = tried(names[0], options.device, machine_ceilings())
    for name in names if len(names) > 1 else ():
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "one.json"
            subprocess.run([sys.executable, __file__, name, "--device", options.device, "--out", path], check=False)
            if path.exists():  # one that cannot run must not hide the others
                found = json.loads(path.read_text())
                result["rows"] += found["rows"]
                result["kept"] |= found["kept"]
        result["seconds"][name] = time.perf_counter() - began
        record.write(options.out, result)
    record.write(options.out, result)


if __name__ == "__main__":
    main()
