"""Finds changes that save time, in the order of their predicted gain.

A finding has evidence in the trace, a predicted gain in seconds of the wall time that was looked at, and what to do.
Detectors are small functions over the same material; each names one cause, and no time is claimed twice by causes that
stand for the same thing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from ...hardware.cores import usable_cores
from .doing import calls_itself, doing_of, in_loader
from .finding import MANY, SURE, Finding, Material, weighed
from .findings_calls import launching, small_batch, synchronisation
from .findings_host import (
    EVERYWHERE,
    IDLE,
    IDLE_CORE,
    SAMPLED,
    collector,
    crowded,
    host,
    library,
    other_threads,
    restarted,
    threads,
    whole_shares,
)
from .findings_work import (
    dense_gradients,
    gradients,
    one_hot_products,
    padding,
    pairs,
    prefix,
    recomputation,
    unused_gradients,
)
from .libraries import attention, placed
from .op_floor import SIZES, cost
from .split import ALLOCATES, BLOCKED_S, COPIES, OpStat, of_number, on_the_host
from .stretches import stretches
from .trace import Key

CALLING = ("launch", "eager", "sync", "layout", "convert", "grow", "small batch")
"""Kinds of findings about operators, of which a library may call a share that is another finding."""
MOVES = re.compile(r"nchwToNhwc|nhwcToNchw", re.I)
"""Names of kernels by which cuDNN changes the layout of pictures."""
LEAST = 0.02
"""Least gain, as a share of the wall time, of a reported finding."""
FOREIGN = {*EVERYWHERE, "python", "loading", "stacks", "printing", "saving", "copying", "building", "grow"} - set(IDLE)
"""Kinds of findings about work that replaces the operators' code and data in a core's caches."""
EVICTED, WARMER = 0.1, 0.3
"""Time that such code adds to the calls after it, as a share of its own, and the largest share of theirs
(docs/lab-notes/explain.md)."""
LEAST_CALLED = 0.05
"""Least share of samples in which the user's lines call operators themselves."""
ON_DEVICE = ("float32 products", "float64", "padding", "attention", "prefix", "broadcast")
"""Kinds of findings whose change shortens kernels: on a GPU the time for which the host issues work remains."""


def find(material: Material) -> list[Finding]:
    """Return all findings of interest, best first."""
    found = restarted([each for detector in DETECTORS for each in detector(material)], material)
    whole = whole_shares(material).items()  # operators that a library calls are its
    left = 1.0 - sum(share for kind, (share, _) in whole if kind in {each.kind for each in found})
    wall = material.split.own or 1.0
    found = [replace(each, gain=each.gain * (left if each.kind in CALLING else 1.0)) for each in found]
    found = [replace(each, gain=_warmed(each, each.gain, material)) for each in found]
    found = [_certain(each, SURE * wall, material) for each in found]
    if material.split.on_gpu:
        most = max(0.0, wall - material.split.issued(BLOCKED_S))
        found = [replace(each, gain=min(each.gain, most)) if each.kind in ON_DEVICE else each for each in found]
    found = [replace(each, gain=min(each.gain, wall), share=min(each.gain, wall) / wall) for each in found]
    found = sorted((each for each in found if each.share >= LEAST), key=lambda each: -each.gain)
    return [replace(each, gain=min(each.gain, wall)) for each in placed(found, material)]


def _certain(found: Finding, sure: float, material: Material) -> Finding:
    """Return a finding with the least of its gain, if more than ``sure`` seconds are promised and fewer are certain."""
    least = min(found.least, material.certain(found.gain)) if found.kind in SAMPLED else found.least
    return replace(found, gain=max(0.0, least)) if least < sure < found.gain else found


def _warmed(found: Finding, gain: float, material: Material) -> float:
    """Return a gain with that of other calls, which are faster if no other code replaces theirs in the caches."""
    split = material.split
    if split.on_gpu or found.kind not in FOREIGN:
        return gain
    calls = max(0.0, min(split.parts["launch"], split.own - gain))
    own = sum(op.seconds for op in split.loading if "::" in op.key.name) if found.kind == "loading" else 0.0
    return gain + min(EVICTED * max(0.0, gain - own), WARMER * calls)


def compiling(material: Material) -> Iterator[Finding]:
    """Find repeated compilation by torch.compile."""
    split = material.split
    again = [each for each in stretches(split.trace, split.lane) if each[2] == "recompilation"]
    needed = 2 if material.trains else 1  # a backward pass is compiled when it first runs
    steps = int(material.facts.get("steps") or 0)
    needed = 0 if len(again) >= steps > 1 else needed
    if len(again) <= needed:
        return
    seconds = split.parts["recompilation"]
    yield Finding(
        "recompilation",
        "the program is compiled again and again",
        f"{len(again)} compilations, {1e3 * seconds:.1f} ms",
        seconds * (1 - needed / len(again)),
        "keep shapes and Python values the same (pad to buckets, or dynamic=True), and warm up first",
    )


def conversions(material: Material) -> Iterator[Finding]:
    """Find copies that change the type, the layout or the length of the same tensors."""
    groups: dict[str, list[OpStat]] = {"convert": [], "layout": [], "grow": []}
    growing = [op for op in material.split.named("aten::cat", "aten::stack") if op.key.shapes]
    growing = growing if len({str(op.key.shapes) for op in growing}) >= MANY // 2 else []
    for op in material.split.named(*COPIES):
        if (of_number(op.key) and not material.split.on_gpu) or op.key.strides is not None:
            continue  # one with strides repeats numbers, such as a bias for each row
        if op.name in ("aten::cat", "aten::stack"):
            groups["grow" if op in growing else "layout"].append(op)
        elif len(op.key.types) > 1 and op.key.types[0] in SIZES and op.key.types[1] in SIZES:
            groups["convert" if op.key.types[0] != op.key.types[1] else "layout"].append(op)
        else:
            groups["layout"].append(op)
    most_s = _called_by_user(material)
    inside = [op for op in material.split.ops if MOVES.search(op.key.name)]  # of a convolution, in the user's layout
    groups["layout"] += inside
    moved_s = sum(op.seconds for op in inside)
    texts = {
        "convert": ("the same tensors are converted again and again", "convert once, before the loop"),
        "layout": (
            "tensors are copied to change their layout",
            "keep the layout that the next operator wants; memory_format=torch.channels_last for convolutions",
        ),
        "grow": ("tensors grow by concatenation", "allocate the whole tensor once and write into it"),
    }
    for kind, ops in groups.items():
        calls = sum(op.calls for op in ops)
        if calls < MANY:
            continue
        most = max(ops, key=lambda op: op.seconds)
        spent = sum(op.seconds for op in ops)
        # The first conversion of each shape is needed; a tensor that grows is written once in any case.
        kept = sum(op.seconds / op.calls for op in ops) if kind == "convert" else 2 / calls * spent
        seconds = max(0.0, spent - kept) if kind != "layout" else spent
        seconds = min(seconds, most_s + (moved_s if kind == "layout" else 0.0))
        title, advice = texts[kind]
        evidence = f"{calls} copies, {1e3 * spent:.1f} ms; most in {most.name} {most.key.shapes}"
        yield Finding(kind, title, f"{evidence} {' <- '.join(most.key.types[:2])}", seconds, advice)


def _called_by_user(material: Material) -> float:
    """Return the seconds in which the user's lines call operators themselves; on a GPU, where samples do not show the
    length of kernels, all seconds if some do."""
    samples, own = material.stacks, material.split.own
    if len(samples) < MANY:  # too few to show that no line does
        return own
    share = weighed(samples, lambda sample: "user" if calls_itself(sample.stack) else "").get("user", 0.0)
    return share * own if not material.split.on_gpu else own if share >= LEAST_CALLED else 0.0


def wide_numbers(material: Material) -> Iterator[Finding]:
    """Find float64 work that float32 could do, and float32 products for which a GPU has faster ones."""
    double = [op for op in material.split.ops if _has_doubles(op.key) and op.name not in COPIES]
    seconds = sum(op.seconds - (0.0 if op.operator else op.launch) for op in double)  # a kernel was called beforehand
    if seconds:
        most = max(double, key=lambda op: op.seconds)
        evidence = f"{1e3 * seconds:.1f} ms in float64, most of it in {most.name} {most.key.shapes}"
        advice = "use float32: a number takes half the bytes and half the time"
        yield Finding("float64", "float64 numbers", evidence, seconds / 2, advice)
    rates = material.ceilings.flops_per_second
    fast, slow = rates.get("tf32"), rates.get("float32")
    if not (material.split.on_gpu and fast and slow):
        return
    ops = [
        op
        for op in material.split.ops
        if "float" in op.key.types
        and (found := cost(replace(op.key, name=op.operator))) is not None
        and found.flops > 100 * found.bytes
    ]
    seconds = sum(op.seconds for op in ops if re.search(r"sgemm|simt|fp32|f32f32_f32f32", op.key.name))
    if seconds:
        yield Finding(
            "float32 products",
            "products in full float32",
            f"{1e3 * seconds:.1f} ms in float32 products",
            seconds * (1 - slow / fast),
            "torch.set_float32_matmul_precision('high'), or bfloat16",
            apply="tf32, bfloat16",
        )


def _has_doubles(key: Key) -> bool:
    """Return True if a tensor input is in float64; plain Python numbers are listed with that type too."""
    shapes = key.shapes if isinstance(key.shapes, list) else []
    return any(kind == "double" and shape != [] for kind, shape in zip(key.types, shapes, strict=False))


def loading(material: Material) -> Iterator[Finding]:
    """Find a DataLoader that works in the main process."""
    split = material.split
    seconds = split.parts["loading"] - sum(each.seconds for each in material.named if each.doing.part == "loading")
    if seconds <= 0:
        return
    plain = material.shares(lambda sample: "loading" if in_loader(sample.stack) else "")
    if plain:  # beside a GPU it may take less than it seems, where that has work
        shown = plain.get("loading", 0.0) * split.own
        seconds = min(seconds, shown) if split.on_gpu else shown
    cores = int(material.facts.get("cores") or usable_cores())
    workers = max(1, cores - 1)
    free = min(cores - 1, float(material.facts.get("idle_cores", cores - 1)))
    rest = split.own - seconds
    beside = any("MultiProcessingDataLoader" in key.name for key in split.trace.keys)
    left = 0.0 if beside else max(0.0, seconds / workers - rest)
    advice = (
        f"DataLoader(num_workers={workers}, persistent_workers=True, prefetch_factor=2): loads while the step computes"
    )
    if beside:
        advice = "more workers, or less work for each sample; persistent_workers=True, and a larger prefetch_factor"
    inside = [sample for sample in material.stacks if in_loader(sample.stack)]
    waits = 2 * sum(doing_of(sample.stack).kind in IDLE for sample in inside) > len(inside)
    if not inside:
        waits = free >= IDLE_CORE
    # Without a core for workers, what operators compute in the loader is computed elsewhere, for whole batches.
    computed = min(seconds, sum(op.seconds - op.launch for op in split.loading if "::" in op.key.name))
    kept = left if waits else min(left, computed) if free >= IDLE_CORE else computed
    if left and not waits:
        advice = f"a faster __getitem__, or one for whole batches; {advice}, {1e3 * (seconds - left):.1f} ms at most"
    yield Finding(
        "loading",
        "the loop waits for the workers that load its data" if beside else "the loop waits for its data",
        f"{1e3 * seconds:.1f} ms in DataLoader.__next__",
        seconds - kept,
        advice,
        apply="" if beside or cores < 2 else "loader workers",
        gains={"loader workers": seconds - left},
    )


def transfers(material: Material) -> Iterator[Finding]:
    """Find copies between host and GPU that come from pageable memory, or repeat the same bytes."""
    split, link = material.split, material.ceilings.host_to_device_bytes_per_second
    ops = [op for op in split.ops if op.key.name.startswith("Memcpy")]
    needed = bool(on_the_host(split.trace)) if split.on_gpu else False  # for operators of the host, see ``fallback``
    pageable = [op for op in ops if "Pageable" in op.key.name and not (needed and _to_host(op))]
    if pageable and link:
        seconds = sum(op.seconds - op.calls * op.key.bytes / link for op in pageable)
        evidence = f"{sum(op.calls for op in pageable)} copies, {sum(op.calls * op.key.bytes for op in pageable)} bytes"
        advice = "pin_memory=True in the DataLoader or tensor.pin_memory(), and non_blocking=True"
        gain = max(0.0, seconds)
        yield Finding("pinned", "copies from pageable memory", evidence, gain, advice, apply="pinned memory")
    again = [op for op in ops if "HtoD (Pinned" in op.key.name and op.calls >= MANY and op.key.bytes >= 1 << 20]
    if again:
        seconds = sum(op.seconds * (1 - 1 / op.calls) for op in again)
        evidence = f"{again[0].calls} copies of {again[0].key.bytes} bytes each"
        advice = "upload once what stays the same; new batches in a stream of their own, beside the computing"
        yield Finding("upload", "copies of the same size go to the GPU again and again", evidence, seconds, advice)


def _to_host(op: OpStat) -> bool:
    """Return True for copies of large tensors to the host."""
    return op.key.name.startswith("Memcpy DtoH") and op.key.bytes >= 1 << 20


def allocation(material: Material) -> Iterator[Finding]:
    """Find allocation and freeing of the GPU's memory in the loop."""
    split = material.split
    calls = split.calls(ALLOCATES)
    if len(calls) >= MANY:
        seconds = min(float(split.trace.dur[calls].sum()), split.idle)
        advice = "remove torch.cuda.empty_cache(); keep shapes alike; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        title, evidence = "the driver allocates and frees GPU memory in the loop", f"{len(calls)} calls"
        yield Finding("allocation", title, evidence, seconds, advice, apply="no empty_cache")


def fallback(material: Material) -> Iterator[Finding]:
    """Find operators that compute on the host between kernels."""
    split = material.split
    if not split.on_gpu:
        return
    slow = on_the_host(split.trace)
    if slow:
        seconds = min(float(split.trace.dur[slow].sum()), split.idle)
        names = sorted({split.trace.key_of(i).name for i in slow})
        seconds += sum(op.seconds for op in split.ops if _to_host(op))  # their inputs
        advice = "move their inputs to the GPU, or use an operator that has a kernel there"
        yield Finding(
            "fallback", "operators compute on the CPU between GPU kernels", ", ".join(names[:5]), seconds, advice
        )


DETECTORS: tuple[Callable[[Material], Iterator[Finding]], ...] = (
    host,
    library,
    compiling,
    synchronisation,
    launching,
    small_batch,
    conversions,
    wide_numbers,
    padding,
    gradients,
    loading,
    other_threads,
    collector,
    threads,
    crowded,
    transfers,
    allocation,
    fallback,
    attention,
    unused_gradients,
    dense_gradients,
    recomputation,
    prefix,
    pairs,
    one_hot_products,
)
