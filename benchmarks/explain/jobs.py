"""Jobs of several ranks, of which one is slow for a known reason: does the comparison name the rank and the reason.

    python benchmarks/explain/jobs.py [NAMES]
    python benchmarks/explain/jobs.py --device cuda --ranks 4 --out benchmarks/results/h100/explain_jobs.json

Takes about 20 s a job. Each is started as its users do (``torchrun``, ``accelerate launch`` on GPUs, Lightning in
``torchrun``) under `transect explain run`. The last job has no slow rank, and none may be named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import _paths
from benchmarks import record

SLOW = 1
"""Rank that is slow."""
HEAD = """
import os, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)
DEVICE, RANK = "{device}", int(os.environ["RANK"])
WIDTH, ROWS, STEPS = (2048, 512, 150) if DEVICE == "cuda" else (192, 64, 120)
def network():
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)])
"""
PLAIN = """
import torch.distributed as dist
if DEVICE == "cuda":
    torch.cuda.set_device(RANK)
dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
net = nn.parallel.DistributedDataParallel(network().to(DEVICE))
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
def train(batches):
    for x in batches:
        optimizer.zero_grad()
        net(x.to(DEVICE)).square().mean().backward()
        optimizer.step()
"""
JOBS: dict[str, tuple[str, str, str]] = {
    "a slow dataset": ("torchrun", "data loading", PLAIN + """
class Rows(Dataset):
    def __len__(self):
        return 8 * STEPS
    def __getitem__(self, i):
        if RANK == 1:
            sum(k * k for k in range(20_000))
        return torch.full((WIDTH,), float(i % 5))
train(DataLoader(Rows(), batch_size=8))
dist.destroy_process_group()
"""),
    "longer inputs": ("accelerate", "kernels, the floor", """
from accelerate import Accelerator
helper = Accelerator(cpu=DEVICE == "cpu")
net, optimizer = network(), None
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
net, optimizer = helper.prepare(net, optimizer)
rows = ROWS * 16 * (3 if RANK == 1 else 1)
for _ in range(STEPS):
    optimizer.zero_grad()
    helper.backward(net(torch.ones(rows, WIDTH, device=helper.device)).square().mean())
    optimizer.step()
helper.end_training()
"""),
    "metrics in Python": ("Lightning", "host-bound", """
import logging, warnings
warnings.filterwarnings("ignore")
import pytorch_lightning as L
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()
    def training_step(self, batch, index):
        y = self.net(batch)
        if RANK == 1:
            seen = [i * i % 7 for i in range(300_000)]
        return y.square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)
options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
options |= dict(max_epochs=1, strategy="ddp", use_distributed_sampler=False)
options |= dict(accelerator="gpu" if DEVICE == "cuda" else "cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]))
trainer = L.Trainer(**options)
trainer.fit(Module(), DataLoader(torch.ones(ROWS * STEPS // 2, WIDTH), batch_size=ROWS))
"""),
    "equal ranks": ("torchrun", "", PLAIN + """
train(torch.ones(ROWS, WIDTH) for _ in range(STEPS))
dist.destroy_process_group()
"""),
}  # fmt: skip
"""Launcher, reason, and script of each job."""
REASONS = {"kernels, the floor": ("at the floor", "kernels above their floor")}
"""Names of parts that are right for a reason."""


def judged(name: str, device: str, ranks: int) -> dict[str, Any]:
    """Run one job, and return what the comparison said."""
    launcher, reason, body = JOBS[name]
    with tempfile.TemporaryDirectory() as folder:
        script, figures = Path(folder, "train.py"), Path(folder, "found.json")
        script.write_text(HEAD.format(device=device) + body)
        words = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if launcher == "accelerate" and device == "cuda":  # on CPUs it needs MPI to start several processes
            words = ["python", "-m", "accelerate.commands.launch", "--num_processes", str(ranks), "--num_machines", "1"]
            words += ["--mixed_precision", "no", "--dynamo_backend", "no", "--multi_gpu"]
        explain = [sys.executable, "-m", "transect", "explain", "run", "--window", "1.5", "--json", str(figures), "--"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_paths.ROOT / "src"), *sys.path[2:]])}
        began = time.perf_counter()
        done = subprocess.run(
            [*explain, *words, str(script)], capture_output=True, text=True, env=environment, timeout=150
        )
        took = time.perf_counter() - began
        if not figures.exists():
            raise RuntimeError(done.stdout[-1500:] + done.stderr[-1500:])
        found = json.loads(figures.read_text())
    said = [each for each in found["findings"] if each["kind"] == "straggler"]
    parts = REASONS.get(reason, (reason,))
    named = [each for each in said if each["ranks"] == [f"rank {SLOW}"]]
    right = bool(named) and any(part in named[0]["evidence"] for part in parts) if reason else not said
    return {
        "launcher": launcher,
        "reason": reason,
        "right": right,
        "straggler": said[0]["ranks"][0] if said else "",
        "evidence": said[0]["evidence"] if said else "",
        "share": said[0]["share"] if said else 0.0,
        "steps": [rank["steps"] and rank["steps"]["kind"] for rank in found["ranks"]],
        "step_s": [rank["step_s"] for rank in found["ranks"]],
        "waiting_s": [rank["waiting_s"] for rank in found["ranks"]],
        "seconds": took,
        "said": done.stdout,
    }


def table(result: dict[str, Any]) -> str:
    """Format the rank that each job's comparison named, and why."""
    lines = ["| job | launcher | named | right | gain | evidence |", "|---|---|---|---|---:|---|"]
    for name, row in result["jobs"].items():
        right = "yes" if row["right"] else "no"
        cells = [name, row["launcher"], row["straggler"] or "none", right, f"{row['share']:.0%}", row["evidence"]]
        lines.append(f"| {' | '.join(cells)} |")
    machine = result["environment"]
    where = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores"
    return (
        "\n".join(lines) + f"\n\n{result['ranks']} ranks; `{result['command']}` on {where}, "
        f"{record.made_at([machine])}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="some of the jobs; all if none is named")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--say", action="store_true", help="print whole comparisons")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "explain_jobs.json")
    options = parser.parse_args()
    gpu = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
    result: dict[str, Any] = {
        "command": f"python benchmarks/explain/jobs.py --device {options.device} --ranks {options.ranks}",
        "environment": record.environment() | gpu,
        "ranks": options.ranks,
        "jobs": {},
        "failed": {},
    }
    for name in options.names or JOBS:
        try:
            row = judged(name, options.device, options.ranks)
        except Exception as error:  # one that cannot run must not hide the others
            result["failed"][name] = f"{type(error).__name__}: {error}"
            print(f"{name} failed: {result['failed'][name]}", flush=True)
            continue
        said = row.pop("said")
        result["jobs"][name] = row
        print(
            f"{name:20} {row['straggler'] or 'none'}: {row['evidence']}{'' if row['right'] else '   <--'}", flush=True
        )
        if options.say or not row["right"]:
            print(said, flush=True)
        record.write(options.out, result)


if __name__ == "__main__":
    main()
