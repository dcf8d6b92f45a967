"""Adds to a finding the user's line, the library function that it calls, and a switch of the library.

A switch is looked up by the kind of a finding and the files of the library that a good part of the samples are in.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .doing import doing_of, is_users, loop_around, needs_itself, user_stack, whole_kind
from .finding import Finding, Material
from .findings_calls import training_loops
from .findings_work import REACHED
from .sampler import Frame, Sample
from .split import OpStat

OFTEN = 0.1
"""Least share of samples that show a library at work."""
CALLS = ("launch", "eager", "small batch", "autograd")
CALLING = (*CALLS, "sync")
"""Kinds of findings about calls of operators, from any line."""
SCORES = ("aten::bmm", "aten::baddbmm")
"""Products of attention that is not fused."""
MATH = "_scaled_dot_product_attention_math"
"""Operator of fused attention that torch computes in steps, because no kernel has the mask or the type."""
LEAST_SCORES = 4096
"""Scores of a head from which fused attention may gain."""
WITH_BACKWARD = 3.5
"""Time of fused attention with its backward pass, in forward passes."""
Place = tuple[tuple[str, int], str]
"""(File, first line) of a loop, and a function in it."""
MOSTLY = 0.6
"""Least gain of a batch, in gains of reading values or of Python alone, with which a loop's change is the batch."""
LOOPED = ("python", "launch", "sync", "small batch")
"""Kinds of findings about a loop that a batch replaces."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch of a library: the library's name, files and functions that show it, kinds of findings, and words."""

    library: str
    place: re.Pattern[str]
    kinds: tuple[str, ...]
    words: str


TRAINER = re.compile(r"/(?:transformers/trainer|trl/trainer/\w+)\.py:")
TRL = re.compile(r"/trl/trainer/\w+\.py:")
GENERATE = re.compile(r"/transformers/generation/utils\.py:")
TRANSFORMERS = re.compile(r"/transformers/models/")
LIGHTNING = re.compile(r"/(?:pytorch_)?lightning/")
ACCELERATE = re.compile(r"/accelerate/")
SENTENCES = re.compile(r"/sentence_transformers/")
SKLEARN = re.compile(r"/sklearn/")
DERIVATIVES = re.compile(r"/torch/autograd/functional\.py:")
GRAPHS = re.compile(r"/torch_geometric/")
DIFFUSERS = re.compile(r"/diffusers/")
PICTURES = re.compile(r"/torchvision/transforms/")
PANDAS = re.compile(r"/pandas/")
OPTIM = re.compile(r"/torch/optim/")
SWITCHES = (
    Switch("transformers", GENERATE, CALLS, "generate for several prompts in one call (pad on the left); "
           "model.generation_config.cache_implementation = 'static' and model.forward = torch.compile(model.forward)"),
    Switch("trl", TRL, ("padding",), "SFTConfig(packing=True) or padding_free=True"),
    Switch("Trainer", TRAINER, ("padding",), "TrainingArguments(train_sampling_strategy='group_by_length') and a "
           "collator that pads to the longest of a batch, or DataCollatorWithFlattening"),
    Switch("Trainer", TRAINER, ("loading",), "TrainingArguments(dataloader_num_workers=4, "
           "dataloader_persistent_workers=True, dataloader_pin_memory=True)"),
    Switch("Trainer", TRAINER, ("float32 products",), "TrainingArguments(bf16=True), or tf32=True"),
    Switch("Trainer", TRAINER, ("launch", "eager", "small batch"), "TrainingArguments(torch_compile=True), and a "
           "larger per_device_train_batch_size with fewer gradient_accumulation_steps, until memory is full"),
    Switch("Trainer", TRAINER, ("optimizer",), "TrainingArguments(optim='adamw_torch_fused')"),
    Switch("Trainer", TRAINER, ("sync", "logging"), "TrainingArguments(logging_steps=50, "
           "logging_nan_inf_filter=False)"),
    Switch("Trainer", TRAINER, ("saving",), "TrainingArguments(save_strategy='steps', save_steps=500)"),
    Switch("Lightning", LIGHTNING, ("float32 products",), "Trainer(precision='bf16-mixed')"),
    Switch("Lightning", LIGHTNING, ("sync", "logging"), "Trainer(log_every_n_steps=50); self.log(..., on_step=False)"),
    Switch("Lightning", LIGHTNING, ("saving",), "ModelCheckpoint(every_n_train_steps=500)"),
    Switch("sentence-transformers", SENTENCES, CALLS, "model.encode(all_sentences, batch_size=64) in one call"),
    Switch("transformers", TRANSFORMERS, ("float32 products",), "from_pretrained(..., dtype=torch.bfloat16)"),
    Switch("transformers", TRANSFORMERS, ("small batch", "launch", "eager"), "call the model on several sequences at "
           "once (tokenizer(list_of_texts, padding=True)), or torch.compile(model)"),
    Switch("transformers", TRANSFORMERS, ("padding",), "tokenizer(..., padding='longest') in batches of "
           "similar length"),
    Switch("accelerate", ACCELERATE, ("float32 products",), "Accelerator(mixed_precision='bf16')"),
    Switch("scikit-learn", SKLEARN, ("python", "launch"), "call transform or predict once for all rows; n_jobs=-1 "
           "where the estimator has it"),
    Switch("torch-geometric", GRAPHS, CALLS, "torch_geometric.loader.DataLoader(graphs, batch_size=64): many graphs in "
           "one call"),
    Switch("diffusers", DIFFUSERS, CALLS, "num_images_per_prompt or a list of prompts in one call; "
           "pipe.unet = torch.compile(pipe.unet)"),
    Switch("torchvision", PICTURES, ("loading", "python"), "transforms.v2 on batches of tensors, after the loader"),
    Switch("pandas", PANDAS, ("loading", "python"), "torch.from_numpy(frame.to_numpy()) once, then index the tensor"),
    Switch("torch", DERIVATIVES, CALLS, "vectorize=True, or torch.func.jacrev and torch.func.hessian"),
    Switch("torch", OPTIM, ("optimizer", "launch", "eager"), "the optimizer's fused=True"),
)  # fmt: skip


def placed(found: Sequence[Finding], material: Material) -> Iterator[Finding]:
    """Yield findings with the user's line, the library's function and the library's switch, best first. Python and
    calls of one loop are one finding, if the whole loop can be done in a batch."""
    samples = material.stacks
    training = training_loops(material)
    loops: dict[Place, Finding] = {}
    reading: set[Place] = set()
    rest: list[Finding] = []
    for each in found:
        chosen = [sample for sample in samples if _belongs(sample, each.kind)] or list(samples)
        if each.kind == "launch" and material.trains:  # of loops inside of a step
            chosen = [sample for sample in chosen if loop_around(sample.stack) not in training] or chosen
        words = next(_switches(each.kind, chosen), "")
        advice = f"{words}. Else: {each.advice}" if words else each.advice
        each = replace(each, where=_where(chosen), advice=advice)
        place = loop, _ = _loop(chosen)
        inside = bool(loop[0]) and (not material.trains or (bool(training) and loop not in training))
        if each.kind not in (LOOPED[:2] if material.trains else LOOPED) or not inside or place in reading:
            rest.append(each)
        elif each.kind == "sync" and place not in loops and (needs_itself(loop) or not _called(found, each)):
            reading.add(place)  # the rest of the loop stays
            rest.append(each)
        elif place in loops:
            first = loops[place]
            if each.kind == "launch" and each.gain > MOSTLY * first.gain:  # the loop mostly calls operators
                first, each = each, first
            more = 0.0 if each.kind == "small batch" else 1.0  # its operators are those that are called
            gain, share = first.gain + more * each.gain, min(1.0, first.share + more * each.share)
            evidence = f"{first.evidence}; in the same loop: {each.title} ({each.share:.0%})"
            apply = ", ".join(dict.fromkeys(filter(None, [first.apply, each.apply])))
            loops[place] = replace(first, gain=gain, share=share, evidence=evidence, apply=apply)
        else:
            loops[place] = each
    yield from sorted([*rest, *loops.values()], key=lambda each: -each.gain)


def _called(found: Sequence[Finding], reading: Finding) -> bool:
    """Return True if calls of operators gain nearly as much as reading values does: a batch replaces both."""
    return any(each.kind == "launch" and each.gain > MOSTLY * reading.gain for each in found)


def _belongs(sample: Sample, kind: str) -> bool:
    """Return True if a sample may be part of a finding's subject."""
    doing = doing_of(sample.stack)
    if kind == "loading":
        return any("/torch/utils/data/" in frame.file for frame in sample.stack)
    if kind == "optimizer":
        return any("/torch/optim/" in frame.file for frame in sample.stack)
    return kind in (doing.kind, whole_kind(sample.stack)) if kind not in CALLING else doing.part in ("host", "launch")


def _switches(kind: str, samples: Sequence[Sample]) -> Iterator[str]:
    stacks = Counter(user_stack(sample.stack) for sample in samples)
    for switch in SWITCHES:
        if kind not in switch.kinds:
            continue
        count = sum(
            number
            for stack, number in stacks.items()
            if any(switch.place.search(f"{frame.file}:{frame.function}") for frame in stack)
        )
        if samples and count >= OFTEN * len(samples):
            yield f"{switch.library}: {switch.words}"


def _loop(samples: Sequence[Sample]) -> Place:
    """Return the user's innermost loop that most samples are in, ("", 0) if that is none, and the function in it."""
    counts: Counter[Place] = Counter()
    for sample in samples:
        frame = doing_of(sample.stack).frame
        counts[loop_around(sample.stack), frame.function if frame is not None else ""] += 1
    return counts.most_common(1)[0][0] if counts else (("", 0), "")


def _where(samples: Sequence[Sample]) -> str:
    """Return the user's line that most samples are below, with the function that it calls there."""
    counts: Counter[tuple[Frame, Frame | None]] = Counter()
    for sample in samples:
        stack = user_stack(sample.stack)
        index = next((i for i, frame in enumerate(stack) if is_users(frame)), None)
        if index is not None:
            counts[stack[index], stack[index - 1] if index else None] += 1
    if not counts:
        return ""
    (user, called), _ = counts.most_common(1)[0]
    file = user.file.rpartition("/")[2]
    inside = f", which calls {called.function} ({_library(called.file)})" if called is not None else ""
    return f"{file}:{user.line} in {user.function}{inside}"


def _library(file: str) -> str:
    """Return a library's file from the library's name on."""
    return re.split(r"/(?:site|dist)-packages/|/lib/python[\d.]+/", file)[-1]


def attention(material: Material) -> Iterator[Finding]:
    """Find attention that writes all scores to memory; fused attention of the same shapes is timed."""
    samples, split = material.stacks, material.split
    softmax = split.named("aten::_softmax", "aten::softmax")
    most = max(softmax, key=lambda op: op.seconds, default=None)
    if most is None or not isinstance(most.key.shapes, list) or any(MATH in key.name for key in split.trace.keys):
        return
    if len(most.key.shapes[0]) < 2:
        return
    *batch, queries, keys = most.key.shapes[0]
    scores = [op for op in split.ops if _of_scores(op, queries, keys)]
    products = [op for op in scores if op.name in SCORES]
    width = next((found for op in products if (found := _width(op, queries))), 0)
    if not width or len(batch) < 1 or queries * keys < LEAST_SCORES:
        return
    kind = {"float": torch.float32, "c10::half": torch.float16}.get(most.key.types[0], torch.bfloat16)
    device = "cuda" if split.on_gpu else "cpu"
    shape = math.prod(batch), queries, keys, width
    known: dict[str, float] = material.facts.get("fused", {})  # a recording may be explained elsewhere
    if (name := f"{shape} {kind}") not in known:
        rate = material.ceilings.flops_per_second.get(str(kind).removeprefix("torch."), 0.0)
        absent = device == "cuda" and not torch.cuda.is_available()
        if absent and not rate:
            return
        known[name] = 4 * math.prod(shape) / (REACHED * rate) if absent else fused_seconds(*shape, kind, device)
    fused = most.calls * known[name]
    if split.named("aten::_softmax_backward_data"):
        fused *= WITH_BACKWARD
    seconds = sum(op.seconds for op in scores) - fused
    if seconds <= 0:
        return
    evidence = (
        f"softmax of {most.key.shapes[0]} between products, {most.calls} times; fused attention of the same shapes: "
        f"{1e3 * fused:.1f} ms"
    )
    eager = any(frame.function == "eager_attention_forward" for sample in samples for frame in sample.stack)
    layer = any(frame.function == "multi_head_attention_forward" for sample in samples for frame in sample.stack)
    advice = "torch.nn.functional.scaled_dot_product_attention, which keeps the scores in registers"
    if eager:
        advice = "from_pretrained(..., attn_implementation='sdpa'), or flash_attention_2 on a GPU"
    elif layer:
        advice = "need_weights=False in calls of nn.MultiheadAttention"
    title = "attention writes the scores of all pairs of tokens to memory"
    yield Finding("attention", title, evidence, seconds, advice, apply="fused attention" if eager else "")


def _of_scores(op: OpStat, queries: int, keys: int) -> bool:
    """Return True if an operator reads or writes scores: [..., queries, keys]."""
    shapes = [each for each in op.key.shapes or () if isinstance(each, list) and len(each) > 2]
    if op.name in SCORES and len(shapes) >= 2:
        left, right = shapes[-2:]
        return (left[1], right[2]) == (queries, keys) or left[1:] == [queries, keys]
    return any(each[-2:] == [queries, keys] for each in shapes)


def _width(op: OpStat, queries: int) -> int:
    """Return the width of a head, from the product that makes scores."""
    left, right = [each for each in op.key.shapes if isinstance(each, list) and len(each) > 2][-2:]
    return int(left[2]) if left[1] == queries and left[2] == right[1] and left[2] != right[2] else 0


@functools.cache
def fused_seconds(heads: int, queries: int, keys: int, width: int, kind: torch.dtype, device: str) -> float:
    """Time fused attention, on this machine."""
    q, k, v = (torch.ones(1, heads, rows, width, dtype=kind, device=device) for rows in (queries, keys, keys))
    times = []
    with torch.inference_mode():
        for _ in range(4):
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            torch.nn.functional.scaled_dot_product_attention(q, k, v)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    return statistics.median(times)
