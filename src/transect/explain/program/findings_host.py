"""Finds changes on the host: Python between operators, other threads, the garbage collector, idle cores."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from .doing import WHOLE, doing_of, in_loader, whole_kind
from .finding import ENOUGH, Finding, Material, weighed
from .gaps import Named
from .sampler import Sample
from .split import SLOW_CALL_S, SMALL_S, SYNC, Split
from .trace import OP

HOST_ADVICE = {
    "tokenize": ("text is tokenized between steps", "tokenize once, before the loop, or in a worker process"),
    "logging": ("logging holds up the loop", "log every N steps, buffer the output, or write from another thread"),
    "sleep": ("the program sleeps", "remove the wait, or wait for the event itself"),
    "file": ("files are read in the loop", "read them once, or in a DataLoader with workers"),
    "parse": ("text is parsed in the loop", "parse it once, before the loop, or in a DataLoader with workers"),
    "collection": ("the garbage collector is called in the loop", "call gc.collect() outside of it, or not at all"),
    "wait": (
        "the main thread waits for another thread, a process or a socket",
        "hand work over earlier, wait for several at once, or do it in this thread",
    ),
    "process": ("processes are started", "start them once and keep them: a pool, DataLoader(persistent_workers=True)"),
    "stacks": (
        "anomaly detection records the Python stack of each operator",
        "switch it off: torch.autograd.set_detect_anomaly(False)",
    ),
    "printing": ("tensors are printed in the loop", "print a few numbers every N steps, not whole tensors"),
    "saving": (
        "files are written in the loop: checkpoints, pictures or tables",
        "save every N steps, or copy the data and write it in a thread",
    ),
    "building": ("models are built or loaded in the loop", "build and load them once, before the loop"),
    "copying": ("objects are deep-copied in the loop", "keep one copy and write into it: tensor.copy_()"),
    "optimizer": (
        "the optimizer updates one parameter at a time",
        "fused=True, or foreach=True, and one group for all parameters with the same options",
    ),
    "hooks": (
        "hooks of modules compute in each call of the model",
        "remove them (handle.remove()), or compute only every N steps",
    ),
    "preparing": (
        "inputs are prepared in the training loop",
        "prepare them once before the loop, or in the workers of a DataLoader",
    ),
    "adapters": ("adapters are not merged into the weights", "model.merge_and_unload() for inference"),
    "evaluation": (
        "the model is evaluated every few steps of training",
        "evaluate once an epoch or every N steps (eval_steps=500, val_check_interval)",
    ),
    "python": (
        "Python computes between operators",
        "vectorize it with torch (numpy's work shows as Python's here), or move it out of the loop",
    ),
}
EVERYWHERE = ("tokenize", "logging", "sleep", "file", "parse", "wait", "process")
"""Kinds that a stack shows wherever it was sampled, between operators or inside of one."""
RESTARTS = 0.1
"""Least share of the time, spent on starting a loader or its workers, that is a finding of its own."""
SAMPLED = (*EVERYWHERE, *WHOLE, "loading", "collection", "attention", "padding")
"""Kinds of findings whose gain comes from samples, or from elsewhere than the times of operators."""
CHECKS = ("isnan", "ne", "any", "is_nonzero", "item", "_local_scalar_dense")
"""Operators by which anomaly detection checks each gradient."""
EACH = {"zero_grad", "_init_group"}
"""Functions of optimizers that go through all parameters, in one group or in many."""
FEW_UPDATES = 32
"""Most calls of fused or foreach operators in a step of an optimizer with few groups of parameters."""
RARELY = 4
"""Steps for each evaluation from which evaluation is rare enough."""
UPDATES = ("addcdiv_", "addcmul_", "lerp_", "mul_", "add_", "sqrt", "div_")
"""Operators of an optimizer update."""
IDLE_CORE = 0.7
"""Share of the time for which a core must be idle to count as free."""
IDLE = ("wait", "sleep")
"""Kinds in which the main thread has nothing to do."""


def host(material: Material) -> Iterator[Finding]:
    """Find work of the host in gaps, by kind and line."""
    totals: dict[str, list[Named]] = {}
    for each in material.named:
        totals.setdefault(each.doing.kind, []).append(each)
    plain, split = material.shares(_kind), material.split
    for kind, (title, advice) in HOST_ADVICE.items():
        if kind in WHOLE:
            continue  # ``library`` has them
        every = totals.get(kind, [])
        seconds = sum(each.seconds for each in every)
        if plain and kind in EVERYWHERE:
            shown = plain.get(kind, 0.0) * split.own
            # A GPU may compute meanwhile: the rest of its time is needed in any case.
            seconds = max(seconds, min(shown, split.idle)) if split.on_gpu else shown
        where = max(every, key=lambda each: each.seconds).doing.frame if every else None
        place = f"in {where}" if where else "outside of its own lines"
        evidence = f"{1e3 * seconds:.1f} ms between operators, most of it {place}"
        if not every:
            evidence = f"{plain.get(kind, 0.0):.0%} of the samples without profiling"
        # Beside a thread that holds the lock it is unknown how long the same Python would take.
        alone = 1.0 - _thread_share(material) if kind == "python" else 1.0
        apply = "no collection" if kind == "collection" else ""
        # Samples show Python too seldom: what they show is certain.
        least = plain.get(kind, 0.0) * split.own if plain and kind == "python" else math.inf
        yield Finding(kind, title, evidence, seconds * alone, advice, apply, least=least)


def restarted(found: list[Finding], material: Material) -> list[Finding]:
    """Make one finding of all that starting a loader costs: processes of workers, the waits for their first batches and
    for their ends, and the order of all samples, which an epoch needs once."""

    def name(sample: Sample) -> str:
        inside = any(frame.file.endswith("/utils/data/dataloader.py") for frame in sample.stack)
        order = inside and sample.stack[0].file.endswith("/utils/data/sampler.py")
        return "order" if order else doing_of(sample.stack).kind if inside else ""

    shares = weighed(material.stacks, name)
    order, starting = shares.get("order", 0.0), shares.get("process", 0.0)
    kinds: tuple[str, ...] = ("loading",)
    if order >= RESTARTS:
        share, title = order, "a DataLoader starts again and again"
        evidence = f"{order:.0%} of the time is spent on the order of all samples, which an epoch needs once"
        advice = "keep the iterator of a DataLoader for an epoch: for batch in loader, not next(iter(loader))"
    elif starting >= RESTARTS:
        kinds, share = ("process", "loading", "wait"), 1.0 - shares.get("", 0.0)
        title = "a DataLoader starts its workers again and again"
        evidence = f"{starting:.0%} of the time is spent on starting them; the rest on waiting for them"
        advice = "DataLoader(..., persistent_workers=True), and one loader for all passes over the data"
    else:
        return found
    gain = max(share * material.split.own, *(each.gain for each in found if each.kind == kinds[0]), 0.0)
    return [Finding(kinds[0], title, evidence, gain, advice), *(each for each in found if each.kind not in kinds)]


def _kind(sample: Sample) -> str:
    """Return the kind of a sample's work; empty for a loader's, which is a finding of its own."""
    return "" if in_loader(sample.stack) else doing_of(sample.stack).kind


def library(material: Material) -> Iterator[Finding]:
    """Find work of library functions, including the operators that they call."""
    split = material.split
    for kind, (count, line) in whole_shares(material).items():
        if kind == "adapters" and material.trains:
            continue
        if kind == "building" and not material.facts.get("steps"):
            continue  # a program without steps builds its models once
        seconds = count * split.own
        if kind == "stacks":
            checks = sum(op.calls for op in split.named(*(f"aten::{name}" for name in CHECKS)))
            calls = sum(op.calls for op in split.ops) or 1
            seconds += split.parts["sync"] + split.parts["launch"] * checks / calls
        elif kind == "optimizer":
            seconds -= _fused_update(split)
        if split.on_gpu:  # beside what the GPU computes it costs nothing
            seconds = min(seconds, split.uncovered)
        title, advice = HOST_ADVICE[kind]
        apply = {"optimizer": "fused optimizer", "stacks": "no anomaly detection"}.get(kind, "")
        yield Finding(kind, title, f"{count:.0%} of the time, most of it in {line}", max(0.0, seconds), advice, apply)


def _fused_update(split: Split) -> float:
    """Estimate the seconds of a fused update: Adam's passes over its numbers are halved, plain SGD has only one. Large
    tensors take as long per byte as before."""
    update = split.named(*(f"aten::{name}" for name in UPDATES))
    passes = 0.5 if any(op.name != "aten::add_" for op in update) else 1.0
    large = (op.seconds if op.seconds > op.calls * SMALL_S else op.calls * (op.floor or 0.0) for op in update)
    return passes * sum(large)


def whole_shares(material: Material) -> dict[str, tuple[float, str]]:
    """Return for each kind in ``WHOLE`` its share of the samples, and the user's line that is most of them."""
    samples, steps = material.stacks, material.steps
    joined = sum(op.calls for op in material.split.ops if op.name.startswith(("aten::_foreach_", "aten::_fused_")))

    def name(sample: Sample) -> str:
        kind = whole_kind(sample.stack)
        if kind in WHOLE or joined <= FEW_UPDATES * steps:
            return kind
        updates = [frame.function for frame in sample.stack if "/torch/optim/" in frame.file]
        return "optimizer" if updates and not EACH & set(updates) else kind

    shares = weighed(samples, name)
    lines: dict[str, Counter[str]] = {}
    for sample in samples:
        if (kind := name(sample)) in WHOLE:
            lines.setdefault(kind, Counter())[str(doing_of(sample.stack).frame or "a library")] += 1
    if material.samples is not None and not material.samples.anomalies:
        lines.pop("stacks", None)  # other code wrote a stack down
    if RARELY * episodes(samples, "evaluation") < steps:
        lines.pop("evaluation", None)
    if not material.trains:
        lines.pop("preparing", None)  # a batch replaces it together with the calls of the model
    return {kind: (shares.get(kind, 0.0), seen.most_common(1)[0][0]) for kind, seen in lines.items()}


def episodes(samples: Sequence[Sample], kind: str) -> int:
    """Return the number of stretches of samples of a kind."""
    shown = [whole_kind(sample.stack) == kind for sample in samples]
    return sum(now and not before for before, now in zip([False, *shown], shown, strict=False))


def other_threads(material: Material) -> Iterator[Finding]:
    """Find another thread that runs Python, and alternates with the main thread."""
    share = _thread_share(material)
    if not share:
        return
    parts = material.split.parts
    waited = sum(each.seconds for each in material.named if each.doing.kind in IDLE)
    python = max(0.0, parts["host"] - waited) + parts["launch"] + parts["sync"]
    yield Finding(
        "gil",
        "another thread runs Python, and only one can at a time (the interpreter's lock, GIL)",
        f"the other thread ran Python in {share:.0%} of the samples in which the main thread had work",
        python * share / 2,
        "move its work to another process",
    )


def _thread_share(material: Material) -> float:
    """Return the share of samples in which another thread ran Python while the main thread had work of its own; 0 if
    negligible. A thread in an operator does not hold Python's lock."""
    samples = material.samples.samples if material.samples is not None else []
    mine = [sample for sample in samples if sample.busy and doing_of(sample.stack).kind not in IDLE]
    computing = _operators_elsewhere(material.split, [sample.at for sample in mine])
    held = sum(sample.busy > count for sample, count in zip(mine, computing, strict=True))
    working = sum(doing_of(sample.stack).kind not in IDLE for sample in samples)
    share = held / working if working else 0.0
    return share if share >= 0.2 and held >= 0.05 * len(samples) else 0.0


def _operators_elsewhere(split: Split, moments: Sequence[float]) -> list[int]:
    """Count the other threads with an operator in progress at each of these rising times."""
    trace = split.trace
    ops = trace.where(OP)
    counts = np.zeros(len(moments), dtype=int)
    for lane in set(trace.lane[ops].tolist()) - {split.lane}:
        counts += trace.during(ops[trace.lane[ops] == lane], moments)
    return counts.tolist()


def collector(material: Material) -> Iterator[Finding]:
    """Find time of the garbage collector, if the program does not call it."""
    if material.samples is None or any(each.doing.kind == "collection" for each in material.named):
        return
    plain = material.plain_samples
    watched = plain if plain is not None and len(plain.samples) >= ENOUGH else material.samples
    found = watched.samples
    times = [sample.at for sample in found]
    before = ((begin, end, bisect_right(times, begin) - 1) for begin, end in watched.collections)
    # Modules that are imported make objects once, and no advice on a loop helps.
    kept = [end - begin for begin, end, i in before if i < 0 or doing_of(found[i].stack).kind != "import"]
    seconds = sum(kept) - max(kept, default=0.0)  # a single long one is no habit
    if watched is plain:
        seconds *= material.split.own / (times[-1] - times[0])
    seconds *= 1 - material.split.share("recompilation")
    if seconds > 0:
        evidence = f"{len(kept)} collections, {1e3 * sum(kept):.1f} ms"
        advice = "gc.freeze() after setting up, or gc.disable() in the loop; make fewer objects"
        yield Finding(
            "collection", "the garbage collector runs often", evidence, seconds, advice, apply="no collection"
        )


def threads(material: Material) -> Iterator[Finding]:
    """Find fewer threads of torch than cores."""
    used, cores = material.facts.get("threads"), material.facts.get("cores")
    if material.split.on_gpu or not used or not cores:
        return
    left = float(material.facts.get("idle_cores", cores))  # other programs may be using them
    cores = min(cores, used + int(left + 1 - IDLE_CORE))
    if used >= cores:
        return
    large = [op for op in material.split.ops if op.seconds > op.calls * SLOW_CALL_S and op.key.name not in SYNC]
    seconds = sum(op.seconds for op in large)
    yield Finding(
        "threads",
        "cores are idle",
        f"torch uses {used} of {cores} cores, and {1e3 * seconds:.1f} ms are in operators that could use more",
        seconds * (1 - used / cores),
        f"torch.set_num_threads({cores}), or OMP_NUM_THREADS={cores}",
        apply="threads",
    )


def crowded(material: Material) -> Iterator[Finding]:
    """Find operators with little work that wait for threads of torch while other work uses the cores."""
    used = int(material.facts.get("threads") or 1)
    slow = [op for op in material.split.ops if op.tiny and op.usual > op.calls * SLOW_CALL_S and op.calls > 1]
    if used > 1 and slow:
        most = max(slow, key=lambda op: op.seconds)
        yield Finding(
            "crowded",
            "operators wait for threads that get no core",
            f"{most.title} takes {1e3 * most.seconds / most.calls:.1f} ms with {used} threads for work of microseconds",
            sum(min(op.seconds, op.usual) for op in slow),
            "OMP_NUM_THREADS=1 or torch.set_num_threads(1): other work has the cores",
            apply="one thread",
        )
