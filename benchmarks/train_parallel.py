"""Full training on several GPUs of one host: tokens per second, exposed communication and peak memory of each rank.

    python benchmarks/train_parallel.py OUT.json [--only WORK,...] [--ways WAY,...] [--ranks 2] [--seconds 6]

Every way trains on 2 x 4096 random tokens a rank and step, in processes of its own, one way after another: bfloat16
weights and AdamW state, random weights of the true shapes, no gradient clipping. ``one`` is a single GPU; the others
are named by what is spread. Rates are medians over steps, by the slowest rank.

Communication is *exposed* where a GPU runs nothing but NCCL's kernels: the profiler's records of two steps, the time in
those kernels less the time in which another kernel runs beside them, the smallest of the ranks (the others wait for
them meanwhile). Losses of the first steps are those of the same global batch, and stand beside those of one GPU.

The peer is torch's FSDP2 (``fully_shard``) over transformers' model with Liger-Kernel and ``torch.compile``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

SEQUENCE, ROWS = 4096, 2
SHAPES = {"1b": "llama-3.2-1b", "3b": "llama-3.2-3b", "8b": "llama-3.1-8b"}
WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "ddp": {"parallel": {"zero": 0, "reduce": "bfloat16"}},
    "ddp float32 sums": {"parallel": {"zero": 0}},
    "zero 1": {"parallel": {"zero": 1, "reduce": "bfloat16"}},
    "zero 2": {"parallel": {"zero": 2, "reduce": "bfloat16"}},
    "zero 3": {"parallel": {"zero": 3, "reduce": "bfloat16"}},
    "ddp few": {"parallel": {"zero": 0, "reduce": "bfloat16"}},
    "ddp spare": {"parallel": {"zero": 0, "reduce": "bfloat16"}},
    "ddp late": {"parallel": {"zero": 0, "reduce": "bfloat16"}},
    "tensor": {"parallel": {"tensor": 2}},
    "tensor sequence": {"parallel": {"tensor": 2, "sequence": True}},
    "mixed zero 3": {"precision": "mixed", "parallel": {"zero": 3, "reduce": "bfloat16"}},
    "fsdp2": {},
    "fsdp2 compiled": {},
}
VARIABLES = {"ddp few": {"NCCL_MAX_CTAS": "4"}, "ddp spare": {"NCCL_MAX_CTAS": "8"}}
"""Variables of the environment: sums on few multiprocessors, which are slower and leave more to the products."""
SPARED = 8
"""Multiprocessors that persistent products leave to the sums, with ``ddp spare``: one that finds its place taken would
wait for all others, and a product take twice as long."""
CHECKED = 4
"""Steps whose losses are shown."""
MOST = 40
"""Steps that are timed, at most."""


def configuration(work: str, way: str, ranks: int, folder: str, smallest: bool = False) -> dict[str, Any]:
    """The run of a way, as ``TrainConfig.from_dict`` takes it; ``smallest``: for a rehearsal on a CPU."""
    changes = dict(WAYS[way])
    tokens = 64 if smallest else SEQUENCE
    parallel = changes.pop("parallel", {})
    cut = "tensor" in parallel  # ranks that share matrices have the same tokens
    found: dict[str, Any] = {
        "model": smallest_model(folder) if smallest else SHAPES[work],
        "load_format": "auto" if smallest else "dummy",
        "task": "finetune" if smallest else "pretrain",
        "steps": 10**6,
        "precision": "float32" if smallest else "bfloat16",
        "checkpointing": "none",
        "data": {
            "train": [text(folder) if smallest else random_tokens(folder, tokens)],
            "seq_len": tokens,
            "micro_batch": tokens * ROWS * (ranks if cut else 1),
        },
        "optimizer": {"learning_rate": 1e-5, "clip": 0.0},
    }
    if parallel:
        found["parallel"] = {"data": 1 if cut else ranks, **parallel, **({"tensor": ranks} if cut else {})}
        found["accumulate"] = found["parallel"]["data"]
    return found | changes


def smallest_model(folder: str) -> str:
    """A model that a CPU trains in no time."""
    sys.path.append(str(HERE.parent / "tests" / "helpers"))
    from tiny_llm import save_tiny_llm

    path = Path(folder) / "model"
    path.mkdir()
    save_tiny_llm(path)
    return str(path)


def text(folder: str) -> str:
    """Some lines of text for it."""
    path = Path(folder) / "text.txt"
    path.write_text("".join(f"{i} times {j} is {i * j}.\n" for i in range(60) for j in range(20)))
    return str(path)


def random_tokens(folder: str, length: int) -> str:
    """Documents of ``length`` tokens, in the format of ``transect data``."""
    import numpy as np

    from transect.train.tokens import token_dtype, write_meta

    path = Path(folder) / "random.tokens"
    path.mkdir()
    count, vocabulary = 100 * length * ROWS, 128256
    tokens = np.random.default_rng(0).integers(0, 10000, count).astype(token_dtype(vocabulary))
    tokens.tofile(path / "tokens.bin")
    np.arange(length, count + 1, length, dtype=np.uint64).tofile(path / "ends.bin")
    write_meta(path, count, count // length, vocabulary, "none")
    return str(path)


def predicted(work: str, way: str, ranks: int) -> dict[str, float] | None:
    """What the planner expects of a way on H200s, before anything runs; None: of the peers."""
    import torch

    from transect.hardware.presets import preset
    from transect.models.presets import PRESETS
    from transect.plan.machine import Machine
    from transect.plan.step import predict
    from transect.train.config import TrainConfig
    from transect.train.memory import fit, plan_of, spread_of

    if way.startswith("fsdp2"):
        return None
    config, gpu = TrainConfig.from_dict(configuration(work, way, ranks, tempfile.mkdtemp())), torch.device("cuda")
    model, machine = PRESETS[SHAPES[work]], Machine.of(preset("h200"))
    plan, spread = plan_of(config, model, gpu), spread_of(config, gpu)
    memory = fit(config, model, gpu, free=machine.memory_bytes)
    return {**predict(model, plan, spread, machine).to_dict(), "peak_bytes": memory.estimate.peak}


# One way, on all its ranks


def measure(given: dict[str, Any], world: Any) -> dict[str, Any] | None:
    """Warm up, time steps, and watch two of them. All ranks call it; what comes back is the first one's."""
    import torch

    gpu = torch.cuda.is_available() and not given["smallest"]
    begin = time.perf_counter()
    facts: dict[str, Any] = {}
    if given["way"].startswith("fsdp2"):
        step = fsdp2(given["work"], compiled="compiled" in given["way"])
    else:
        from transect.parallel import replicas
        from transect.train.config import TrainConfig
        from transect.train.trainer import Trainer

        if given["way"] == "ddp late":  # one bucket, which is full when the backward pass is done
            replicas.BUCKET_BYTES = 2**50
        if given["way"] == "ddp spare":
            from transect.ops.linear.many_rows import matmul

            count = matmul.multiprocessors
            matmul.multiprocessors = lambda device: count(device) - SPARED

        trainer = Trainer(TrainConfig.from_dict(given["config"]), world=world)
        facts["predicted_bytes"] = trainer.memory.estimate.peak

        def step() -> Any:
            return trainer.step().loss

    wait: Callable[[], object] = torch.cuda.synchronize if gpu else (lambda: None)
    wait()
    built = time.perf_counter() - begin
    losses = [float(step()) for _ in range(CHECKED)]
    for _ in range(2):
        step()
    wait()
    warm = time.perf_counter() - begin - built
    times: list[float] = []
    end = time.perf_counter() + given["seconds"]
    while len(times) < 6 or (len(times) < MOST and not stop(world, time.perf_counter() > end)):
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    if not len(times) % 2:
        times.pop()
    mine = {
        "times": times,
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved() if gpu else 0,
        "communication": watched(step) if gpu else None,
    }
    everybody = [mine] if world is None else world.exchange(mine)
    if world is not None and world.rank:
        return None
    slowest = [max(rank["times"][i] for rank in everybody) for i in range(min(len(r["times"]) for r in everybody))]
    median = statistics.median(slowest)
    length = 64 if given["smallest"] else SEQUENCE
    seen = [rank["communication"] for rank in everybody if rank["communication"]]
    return {
        "work": given["work"],
        "way": given["way"],
        "ranks": len(everybody),
        "tokens_per_second": length * ROWS * len(everybody) / median,
        "step_seconds": {"median": median, "min": min(slowest), "max": max(slowest), "runs": len(slowest)},
        "peak_bytes": [rank["peak_bytes"] for rank in everybody],
        "reserved_bytes": [rank["reserved_bytes"] for rank in everybody],
        "exposed_ms": min((found["exposed_ms"] for found in seen), default=None),
        "communication_ms": min((found["communication_ms"] for found in seen), default=None),
        "computing_ms": [found["computing_ms"] for found in seen],
        "idle_ms": [found["idle_ms"] for found in seen],
        "first_losses": losses,
        "build_seconds": built,
        "warm_up_seconds": warm,
        **facts,
    }


def stop(world: Any, mine: bool) -> bool:
    """Whether any rank has timed for long enough."""
    return mine if world is None else any(world.exchange(mine))


def watched(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of a step in NCCL's kernels, those of them in which no other kernel runs, and those of the GPU in
    other kernels and in none."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    links, work = merged(spans[True]), merged(spans[False])
    busy = merged([*links, *work])
    times = {name: sum(b - a for a, b in spans) for name, spans in (("links", links), ("work", work), ("busy", busy))}
    return {
        "communication_ms": times["links"] / 2e3,
        "exposed_ms": (times["links"] - overlap(links, work)) / 2e3,
        "computing_ms": times["work"] / 2e3,
        "idle_ms": (busy[-1][1] - busy[0][0] - times["busy"]) / 2e3 if busy else 0.0,
    }


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time as ones that do not touch, in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def overlap(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """The time that is in both of two lists of ``merged``."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def fsdp2(work: str, *, compiled: bool) -> Callable[[], Any]:
    """One step of transformers' model with Liger-Kernel under torch's FSDP2; it returns the loss, on the GPU."""
    import torch
    import torch.distributed as dist
    import transformers
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from transect.models.config_hf import to_hf
    from transect.models.presets import PRESETS

    apply_liger_kernel_to_llama()
    values = to_hf(PRESETS[SHAPES[work]])
    values.pop("architectures", None)
    config = transformers.LlamaConfig(**{k: v for k, v in values.items() if k != "model_type"})
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.train()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for index, layer in enumerate(model.model.layers):
        if compiled:
            layer.compile()
        last = index + 1 == len(model.model.layers)
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not last)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    data = torch.randint(0, 10000, (40, ROWS, SEQUENCE), generator=generator).cuda()
    count = 0

    def step() -> Any:
        nonlocal count
        ids = data[count % len(data)]
        count += 1
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def job(world: Any, given: dict[str, Any]) -> None:
    """What the other ranks do."""
    measure(given, world)


def one_way(out: Path, given: dict[str, Any]) -> None:
    """In this process: start the ranks and measure."""
    from transect.parallel.launch import Ranks

    if given["ranks"] == 1:
        out.write_text(json.dumps(measure(given, None)))
        return
    ranks = Ranks.start(given["ranks"], "cpu" if given["smallest"] else "cuda")
    try:
        ranks.call("train_parallel:job", given)
        out.write_text(json.dumps(measure(given, ranks.world)))
    except Exception as error:
        raise ranks.explain(error) from error
    finally:
        ranks.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="1b,3b", help="which models: " + ", ".join(SHAPES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--limit", type=float, default=90, help="seconds for one way, all in all")
    parser.add_argument("--until", type=float, default=1e9, help="seconds after which no further way begins")
    parser.add_argument("--smallest", action="store_true", help="a rehearsal on a CPU")
    parser.add_argument("--one", default="", help="for itself")
    arguments = parser.parse_args()
    if arguments.one:
        one_way(arguments.out, json.loads(arguments.one))
        return
    race(arguments)


def race(arguments: argparse.Namespace) -> None:
    """All ways, one after another; the file is written anew whenever something is known."""
    import torch

    from transect.hardware.environment import environment

    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    before: dict[str, Any] = {}
    if not arguments.smallest:
        for work, way in itertools.product(arguments.only.split(","), arguments.ways.split(",")):
            try:
                before[f"{work} {way}"] = predicted(work, way, 1 if way == "one" else arguments.ranks)
            except Exception as error:  # the run will say it as well, and others go on
                print(f"no prediction for {work} {way}: {type(error).__name__}: {error}", flush=True)
        print("predicted:", json.dumps(before), flush=True)
        arguments.out.write_text(json.dumps({"predictions": before}, indent=1) + "\n")
    for work, way in itertools.product(arguments.only.split(","), arguments.ways.split(",")):
        if time.perf_counter() - began > arguments.until:
            print("no time left for", work, way, flush=True)
            continue
        row = in_process(work, way, arguments)
        alone = next((r for r in rows if r["work"] == work and r["way"] == "one" and "error" not in r), None)
        if alone is not None and "error" not in row:
            row["times_one"] = row["tokens_per_second"] / alone["tokens_per_second"]
        if (expected := before.get(f"{work} {way}")) is not None and "error" not in row:
            row["predicted_seconds"] = expected["seconds"]
            row["prediction_off"] = expected["seconds"] / row["step_seconds"]["median"] - 1
            row["memory_off"] = expected["peak_bytes"] / max(row["peak_bytes"]) - 1
        rows.append(row)
        shown = {key: value for key, value in row.items() if key not in ("step_seconds", "reserved_bytes")}
        print(json.dumps(shown), flush=True)
        result = {
            "command": "python benchmarks/train_parallel.py OUT.json",
            "method": "each way in processes of its own, 2 x 4096 random tokens a rank and step, bfloat16 weights and "
            "AdamW state; medians of a step's time on the slowest rank; exposed: only NCCL's kernels run",
            "predictions": before,
            "rows": rows,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "environment": environment(("torch", "triton", "transformers", "liger-kernel")),
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def in_process(work: str, way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A row of the result, made in processes of their own; or why there is none."""
    folder = tempfile.mkdtemp()
    ranks = 1 if way == "one" else arguments.ranks
    given = {"work": work, "way": way, "ranks": ranks, "seconds": arguments.seconds, "smallest": arguments.smallest}
    if not way.startswith("fsdp2"):
        given["config"] = configuration(work, way, ranks, folder, arguments.smallest)
    part = Path(folder) / "part.json"
    command = [sys.executable, __file__, str(part), "--one", json.dumps(given)]
    search = os.pathsep.join([str(HERE), str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": search, **VARIABLES.get(way, {})}
    try:
        done = subprocess.run(
            command, stderr=subprocess.PIPE, text=True, timeout=arguments.limit, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        words = error.stderr.decode() if isinstance(error.stderr, bytes) else str(error.stderr or "")
        print(words[-2000:], file=sys.stderr, flush=True)
        return {"work": work, "way": way, "error": f"not done within {arguments.limit:.0f} s"}
    if part.exists():
        found: dict[str, Any] = json.loads(part.read_text())
        return found
    print(done.stderr[-3000:], file=sys.stderr, flush=True)
    return {"work": work, "way": way, "error": (done.stderr.strip().splitlines() or ["nothing said"])[-1]}


if __name__ == "__main__":
    main()
