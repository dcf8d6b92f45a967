"""Cost of `transect explain run`: how much longer programs take under it, and how long its answer takes.

    python benchmarks/explain/overhead.py [NAMES]
    python benchmarks/explain/overhead.py --device cuda --out benchmarks/results/h200/explain_overhead.json

Each script runs alone and under the command, in turns, each in a process of its own. A script prints the time of its
loop, so that imports do not count as the program's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import _paths
from benchmarks import record

LONGEST_S = 100.0
"""Longest run of a process in seconds."""
HEAD = "import time\nimport torch\nfrom torch import nn\ntorch.set_num_threads(1)\nbegan = time.perf_counter()\n"
TAIL = """
if torch.cuda.is_initialized():
    torch.cuda.synchronize()
print("loop", time.perf_counter() - began, flush=True)
"""
SCRIPTS = {
    "two seconds of training": """
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self):
        return 6000
    def __getitem__(self, i):
        return torch.tensor([float(i * k % 7) for k in range(512)])
net = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for x in DataLoader(Rows(), batch_size=16):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
""",
    "training": """
net = nn.Sequential(*[nn.Sequential(nn.Linear(384, 384), nn.ReLU()) for _ in range(8)])
optimizer, x = torch.optim.AdamW(net.parameters(), 1e-3), torch.randn(256, 384)
for step in range(400):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
""",
    "generation": """
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2)).eval()
began = time.perf_counter()
ids = torch.randint(3, 1000, (1, 16))
for _ in range(60):
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, min_new_tokens=40, do_sample=False)
""",
    "a million operators": """
x = torch.ones(64)
for _ in range(60_000):  # 17 operators each, with those that they call
    x = x * 1.0
    x = x + 0.5
    x = x - 0.5
    x = x.relu()
""",
}
ON_GPU = {
    "training on a GPU": """
net = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(8)]).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(net.parameters(), 1e-3, fused=True)
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
began = time.perf_counter()
for step in range(1000):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
""",
    "generation on a GPU": SCRIPTS["generation"]
    .replace(".eval()", ".eval().cuda()")
    .replace("(1, 16))", "(1, 16), device='cuda')\nmodel.generate(ids, attention_mask=torch.ones_like(ids))"),
}


def timed(command: list[str]) -> tuple[float, float]:
    """Run a command; return its seconds, and those of the script's loop when it first ran."""
    began = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_paths.ROOT / "src"), *sys.path[2:]])}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, timeout=LONGEST_S)
    whole = time.perf_counter() - began
    found = re.search(r"^loop ([\d.]+)", done.stdout, re.M)
    assert found is not None, done.stdout
    print(f"{whole:.1f} s, of which the loop {found[1]}", flush=True)
    return whole, float(found[1])


def judged(body: str, rounds: int) -> dict[str, Any]:
    """Return seconds of a script's loop alone and explained, and of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(HEAD + body + TAIL)
        plain = [sys.executable, str(script)]
        explain = [sys.executable, "-m", "transect", "explain", "run", "--", "python", str(script)]
        runs = [(timed(plain), timed(explain)) for _ in range(rounds)]
    alone, inside = (min(each[side][1] for each in runs) for side in (0, 1))
    return {
        "loop_s": alone,
        "explained_loop_s": inside,
        "overhead": inside / alone - 1,
        "process_s": min(each[0][0] for each in runs),
        "command_s": min(each[1][0] for each in runs),
        "runs": [[a[1], b[1], b[0]] for a, b in runs],
    }


def table(result: dict[str, Any]) -> str:
    """Format times alone and explained."""
    lines = ["| program | alone, s | explained, s | overhead | whole command, s |", "|---|---:|---:|---:|---:|"]
    for name, row in result["programs"].items():
        times = f"{row['loop_s']:.1f} | {row['explained_loop_s']:.1f} | {row['overhead']:.0%} | {row['command_s']:.1f}"
        lines.append(f"| {name} | {times} |")
    machine = result["environment"]
    where = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores"
    return "\n".join(lines) + f"\n\n`{result['command']}` on {where}, {record.made_at([machine])}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="some of the programs; all if none is named")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "explain_overhead.json")
    options = parser.parse_args()
    scripts = ON_GPU if options.device == "cuda" else SCRIPTS
    gpu = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
    result: dict[str, Any] = {
        "command": f"python benchmarks/explain/overhead.py --device {options.device} --rounds {options.rounds}",
        "environment": record.environment() | gpu,
        "programs": {},
    }
    for name in options.names or scripts:
        try:
            result["programs"][name] = judged(scripts[name], options.rounds)
        except subprocess.TimeoutExpired:  # one that hangs must not hide the others
            print(f"{name} was not done after {LONGEST_S:.0f} s", flush=True)
            continue
        print(name, json.dumps(result["programs"][name]), flush=True)
        record.write(options.out, result)


if __name__ == "__main__":
    main()
