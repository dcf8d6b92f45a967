"""Finds time that calls of operators cost: waiting for values, many small operators, products with few rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .doing import WHOLE, doing_of, in_loader, loop_around, loops_around, whole_kind
from .finding import MANY, Finding, Material, weighed
from .findings_work import NODES, REACHED, rows_of, with_rows
from .op_floor import ATTENTION, CONVOLUTIONS, FREE, PRODUCTS, floor
from .sampler import Frame, Sample
from .split import COPIES, LAUNCH_S, PLUMBING, SLOW_CALL_S, SMALL_S, SYNC, WAITS, Split
from .trace import COPY, KERNEL

FOR_VALUES = {
    f"aten::{name}"
    for name in (
        *("item", "_local_scalar_dense", "is_nonzero", "select", "unbind", "as_strided", "_to_copy", "to", "copy_"),
        *("max", "min", "amax", "amin", "sum", "mean", "norm", "linalg_vector_norm", "argmax", "argmin", "any", "all"),
        *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isfinite", "isinf", "equal"),
        *("empty", "empty_strided", "detach"),
    )
}
"""Operators that programs call to read a single value."""
FEW_ROWS, FEWEST_ROWS = 8, 2
"""Most rows of a product in a batch that is too small, and in one that is too small for training."""
COMPILED_S = 110e-6
"""Seconds that a step of training of a compiled module takes beside its operators."""
LARGE_WORK = 0.7
"""Share of the time in operators, apart from calling them, from which their inputs count as large."""
REACHED_ALONE = 0.3
"""Share of its floor's rate that an operator on a batch reaches at least."""
VALUE_BYTES = 64
"""Largest copy to the host, in bytes, that counts as single values, as ``.item()`` makes it."""


def synchronisation(material: Material) -> Iterator[Finding]:
    """Find ``.item()`` and similar calls: their time, and the loop around them."""
    split = material.split
    if split.on_gpu:
        trace = split.trace
        last = max((float(trace.ts[i]) for kind in (KERNEL, COPY) for i in trace.where(kind)), default=0.0)
        waits = [i for i in split.calls(WAITS) if trace.ts[i] + trace.dur[i] <= last]  # not those at the end
        values = [op for op in split.ops if op.key.name.startswith("Memcpy DtoH") and op.key.bytes <= VALUE_BYTES]
        read = sum(op.seconds for op in values if op.calls >= MANY)
        yield Finding(
            "sync",
            "the program waits for the GPU",
            f"{len(waits)} times, after each of which the GPU is idle until the host issues new work",
            max(_read_seconds(material), split.own - max(split.busy - read, split.issuing)) if waits else 0.0,
            "keep values in tensors and read them once, after the loop (.item(), .cpu() and print() wait)",
        )
        return
    ops = split.named(*SYNC)
    calls = sum(op.calls for op in ops if op.key.name == "aten::item") or sum(op.calls for op in ops)
    if calls >= MANY:
        yield Finding(
            "sync",
            "the program waits for single values",
            f"{calls} calls of .item() or the like",
            max(split.parts["sync"] + _sync_launch(split, calls), _read_seconds(material)),
            "keep values in tensors and read them once, after the loop",
        )


def _read_seconds(material: Material) -> float:
    """Return the seconds in loops that only read values; on a GPU those in which it is idle."""
    split, seconds = material.split, _value_loops(material)[0] * material.split.own
    return min(seconds, split.idle) if split.on_gpu else seconds


def _value_loops(material: Material) -> tuple[float, frozenset[tuple[str, int]]]:
    """Return the share of the time in loops that only read values, by samples, and these loops.

    All of their operators make values, and they contain neither a backward pass nor an optimizer.
    """
    split, samples = material.split, material.stacks
    count = int(split.trace.having(lambda key: key.name == "aten::item").sum())
    often = {op.name for op in split.ops if 2 * op.calls >= count and not op.name.startswith("Memcpy")}
    others = often - FOR_VALUES - SYNC
    if count < MANY * material.steps or others or not samples:
        return 0.0, frozenset()
    loops = {loop_around(sample.stack) for sample in samples} - training_loops(material)
    reading = frozenset(loop for loop in loops if loop[0])

    def name(sample: Sample) -> str:
        inside = loop_around(sample.stack) in reading and not in_loader(sample.stack)
        return "read" if inside and whole_kind(sample.stack) not in WHOLE else ""

    return weighed(samples, name).get("read", 0.0), reading


def _sync_launch(split: Split, calls: int) -> float:
    """Return the launch time of operators that only make the values of ``calls`` waits (called about as often, they
    reduce a tensor, compare, or take an element), and of the gaps before them."""
    made = [op for op in split.ops if calls / 2 <= op.calls <= 2 * calls and op.name in FOR_VALUES]
    if calls < MANY or not made:
        return 0.0
    trace, names = split.trace, {op.name for op in made}
    outer = trace.outermost(split.lane)
    gaps = [gap for gap in split.gaps if gap.part == "launch"]
    following = np.searchsorted(trace.ts[outer], [gap.begin for gap in gaps], side="left")
    before = sum(
        gap.seconds
        for gap, index in zip(gaps, following.tolist(), strict=True)
        if index < len(outer) and trace.key_of(int(outer[index])).name in names
    )
    own = sum(op.launch for op in made if op.name not in SYNC)
    return min(split.parts["launch"], own + before)


def launching(material: Material) -> Iterator[Finding]:
    """Find many small operators."""
    split = material.split
    calls = sum(op.calls for op in split.ops)
    most = max(split.ops, key=lambda op: op.launch, default=None)
    if most is None or sum(op.calls for op in split.ops if op.name == most.name) < MANY:
        return
    if split.on_gpu:  # beside what the GPU computes calls cost nothing
        seconds = min(split.parts["launch"], split.uncovered)
        seconds = max(0.0, seconds - _read_seconds(material))
    else:
        waits = sum(op.calls for op in split.named("aten::item"))
        share, reading = _value_loops(material)
        calling = weighed(material.stacks, lambda sample: _calling(sample, reading)) if share else {}
        left = 1 - calling.get("read", 0.0) / max(1e-9, 1 - calling.get("", 0.0))
        seconds = split.parts["launch"] * left if share else split.parts["launch"] - _sync_launch(split, waits)
    seconds *= 1 - 1 / most.calls
    chained = bool(material.facts.get("chained"))
    fused = seconds * _fusible(split)
    # The rest may be computing, or freeing memory.
    certain = 1.0 if split.on_gpu else min(1.0, _certain_calls(split) / (split.parts["launch"] or 1.0))
    if not split.on_gpu and not chained:  # on a GPU a graph replaces all calls
        looped, compiled = looped_share(material)
        called_s = seconds
        # Where operators compute for most of the time, batches are large already, and a compiler may join calls.
        seconds = looped * (fused if _computing(split) > LARGE_WORK else _batched(split, seconds))
        if compiled:
            yield _compiled(material, called_s * _fusible(split, of_modules=True), compiled, certain)
            fused *= looped
    gain = fused if chained and not split.on_gpu else seconds
    yield Finding(
        "launch",
        "many small operators",
        f"{calls} operators; {most.title} {most.calls} times with {most.key.shapes}",
        gain,
        "each call needs the result of the one before: use a module for whole sequences (nn.LSTM, not LSTMCell), or "
        + ("a CUDA graph: torch.compile(mode='reduce-overhead')" if split.on_gpu else "torch.compile")
        if chained
        else "do the loop's work in one batch; else torch.compile or a CUDA graph",
        apply=_fewer_calls(material, chained),
        gains={"compile": fused},
        least=certain * gain,
    )


def _certain_calls(split: Split) -> float:
    """Return the seconds that calls of operators take at least: what a call takes. Unless operators compute for most
    of the time, work smaller than a call is certain too, and gaps between calls up to that time."""
    if _computing(split) > LARGE_WORK:
        return sum(min(op.launch, op.calls * LAUNCH_S) for op in split.ops if _computes(op.name))
    inside = sum(op.launch if op.tiny else min(op.launch, op.calls * LAUNCH_S) for op in split.ops)
    return inside + sum(min(gap.seconds, LAUNCH_S) for gap in split.gaps if gap.part == "launch")


def _computing(split: Split) -> float:
    """Return the share of the time in operators, apart from calling them."""
    parts = split.parts
    return (parts["floor"] + parts["inefficiency"] + parts["padding"]) / (split.own or 1.0)


def _computes(name: str) -> bool:
    """Return True if operators of this name compute, unlike views, waits and what operators call inside."""
    return name not in FREE | SYNC and not name.startswith(PLUMBING)


def _compiled(material: Material, fused: float, share: float, certain: float) -> Finding:
    """Return the finding about modules that call small operators while they train, where a batch replaces none.

    Args:
        fused: seconds of calling operators that a compiler removes, if it compiles all of them.
        share: share of these calls that is in modules.
        certain: share of the time of calls that is certain.
    """
    gain = max(0.0, share * fused - COMPILED_S * material.steps)
    return Finding(
        "eager",
        "modules call small operators one by one",
        f"{share:.0%} of the calls of operators are in modules, or in their backward passes",
        gain,
        "torch.compile(model), or a larger batch: it makes the same calls for more rows",
        apply="compile",
        least=certain * gain,
    )


def _batched(split: Split, seconds: float) -> float:
    """Return what a batch saves of all operators that are called in a loop: their calls, which last ``seconds``, and
    time far above the floor."""
    for op in split.ops:
        small = op.floor is not None and op.floor < SMALL_S and op.seconds < op.calls * SLOW_CALL_S
        if small and op.calls >= MANY and op.name not in SYNC | COPIES:
            seconds += max(0.0, op.seconds - op.launch - op.calls * (op.floor or 0.0) / REACHED_ALONE)
    return seconds


def _calling(sample: Sample, reading: frozenset[tuple[str, int]]) -> str:
    """Return "read" in a loop that reads values, "call" in other calls of operators, else an empty string."""
    if doing_of(sample.stack).kind not in ("python", "calls"):
        return ""
    return "read" if loop_around(sample.stack) in reading else "call"


def looped_share(material: Material) -> tuple[float, float]:
    """Return the share of the calls of operators that a batch, or an operator on whole tensors, can replace, and the
    share of all others that are in modules.

    Without a backward pass a batch replaces a loop and all that it calls. While a module trains, a batch replaces calls
    in loops inside of a step, and the same share of the backward pass.
    """
    samples = material.stacks
    if not samples or not material.trains:
        return 1.0, 0.0
    calling = [sample for sample in samples if doing_of(sample.stack).kind in ("python", "calls")]
    training = training_loops(material) | _value_loops(material)[1]

    def name(sample: Sample) -> str:
        place = _place(sample.stack)
        if not place and any(frame.file.endswith("/torch/nn/modules/module.py") for frame in sample.stack):
            place = "module"
        return "loop" if loop_around(sample.stack) not in training and place != "optimizer" else place

    times = weighed(calling, name)
    loop, once = times.get("loop", 0.0), times.get("", 0.0) + times.get("module", 0.0)
    if all(op.calls < MANY * material.steps for op in material.split.ops):
        loop = 0.0
    counted = [op for op in material.split.ops if _computes(op.name)]
    most = max((op.calls for op in counted), default=0)
    recorded = any(op.key.nodes for op in counted if 2 * op.calls > most)
    backward = times.get("backward", 0.0)
    looped = backward * loop / (loop + once) * recorded if loop else 0.0
    return loop + looped, times.get("module", 0.0) + backward - looped


def training_loops(material: Material) -> set[tuple[str, int]]:
    """Return the innermost loops with a backward pass or an optimizer, by file and first line. A loop of backward
    passes inside of one with an optimizer is none: it accumulates gradients, and a batch replaces it."""
    updating = {loop_around(sample.stack) for sample in material.stacks if _place(sample.stack) == "optimizer"}
    found = {loop_around(sample.stack) for sample in material.stacks if _place(sample.stack)}
    return {each for each in found if each in updating or not _inside(each, updating)}


def _inside(loop: tuple[str, int], others: set[tuple[str, int]]) -> bool:
    """Return True if a loop is inside of one of the others."""
    file, first = loop
    return bool(file) and any((file, begin) in others for begin in loops_around(file, first))


def _place(stack: tuple[Frame, ...]) -> str:
    """Return the part of training that a stack is in, if it is not the user's code."""
    if any(frame.function == "_engine_run_backward" for frame in stack):
        return "backward"
    return "optimizer" if any("/torch/optim/" in frame.file for frame in stack) else ""


def _fusible(split: Split, of_modules: bool = False) -> float:
    """Return the share of calls that a compiler removes: it fuses operators between two products.

    Args:
        of_modules: count only operators that autograd recorded, and those of backward passes, if one ran on a host.
    """
    trace = split.trace
    if split.on_gpu:
        launcher = trace.launchers
        links = trace.link[trace.where(KERNEL)].tolist()
        ops = np.array([launcher[link] for link in links if link in launcher], dtype=int)
    else:
        ops = trace.ops(split.lane)
        nodes = ops[trace.having(lambda key: key.name.startswith(NODES))[ops]]
        if of_modules and len(nodes):
            ops = ops[trace.having(lambda key: key.nodes)[ops] | trace.during(nodes, trace.ts[ops])]
    ops = ops[trace.having(lambda key: key.name not in FREE | SYNC)[ops]]
    alone = trace.having(lambda key: _is_product(key.name))[ops]
    left = alone | np.append(True, alone[:-1])
    return 1 - float(left.mean()) if len(ops) else 0.0


def _is_product(name: str) -> bool:
    return name in PRODUCTS or name in CONVOLUTIONS or any(each in name for each in ATTENTION)


def _fewer_calls(material: Material, chained: bool) -> str:
    """Return the changes that reduce calls of operators and can be made from outside."""
    if material.trains:
        return "compile"
    graph = "CUDA graph, " if material.split.on_gpu else ""
    return f"{'' if chained else 'batching, '}{graph}compile"


def small_batch(material: Material) -> Iterator[Finding]:
    """Find a product with few rows that is repeated: the weights are read every time."""
    if material.facts.get("chained"):
        return  # there is nothing to put together
    if 0 < (most := _most_rows(material)) <= FEWEST_ROWS:
        seconds = material.split.parts["launch"] + material.split.parts["host"]
        yield Finding(
            "small batch",
            "the batches of training are too small",
            f"matrix products have {most} rows at most; {MANY} times as many rows take about as long",
            seconds * (1 - 1 / MANY),
            f"batch_size={MANY * most} or more: calls, Python and the optimizer's step are then needed once for all",
        )
        return
    gain, evidence, worst = 0.0, "", 0.0
    rates = {name: REACHED * rate for name, rate in material.ceilings.flops_per_second.items()}
    reached = replace(material.ceilings, flops_per_second=rates)
    for op in material.split.ops:
        key = replace(op.key, name=op.name)
        rows = rows_of(key)
        waits = op.tiny and op.seconds > op.calls * SLOW_CALL_S  # for threads, which ``crowded`` finds
        few = rows is not None and rows <= FEW_ROWS
        if op.name not in PRODUCTS or op.calls < MANY or not few or not op.floor or waits or op.tiny:
            continue
        count = min(op.calls, 256)
        batched = floor(with_rows(key, (rows or 1) * count), reached)
        if batched is None:
            continue
        efficiency = min(1.0, op.calls * op.floor / max(op.seconds, 1e-12))
        seconds = op.seconds - op.calls / count * batched / max(efficiency, REACHED_ALONE)
        gain += max(0.0, seconds)
        if seconds > worst:
            worst = seconds
            evidence = f"{op.name} {op.calls} times with {rows} rows ({op.key.shapes})"
    if gain:
        yield Finding(
            "small batch",
            "the batch is too small",
            evidence,
            gain,
            f"compute {MANY} or more of them together: the weights are then read once for all",
            apply="" if material.trains else "batching",
        )


def _most_rows(material: Material) -> int:
    """Return the most rows of a product in the forward pass of steps that train; 0 if other operators need the rows."""
    if material.split.on_gpu or not material.facts.get("steps") or not material.trains:
        return 0
    products = [op for op in material.split.ops if _is_product(op.name)]
    rows = [rows_of(op.key) for op in products if op.key.nodes or op.name not in PRODUCTS]
    return max((each for each in rows if each is not None), default=0) if None not in rows else 0
