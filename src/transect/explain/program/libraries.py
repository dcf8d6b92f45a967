"""Adds to a finding the user's line, the library function that it calls, and a switch of the library.

A switch is looked up by the kind of a finding and the files of the library that a good part of the samples are in.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .doing import LIBRARY, doing_of, user_stack
from .finding import Finding, Material
from .sampler import Frame, Sample

OFTEN = 0.1
"""Least share of samples that show a library at work."""
CALLS = ("launch", "small batch", "autograd", "collection", "inefficiency")


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
    Switch("Trainer", TRAINER, ("launch", "small batch"), "TrainingArguments(torch_compile=True), and a larger "
           "per_device_train_batch_size with fewer gradient_accumulation_steps, until memory is full"),
    Switch("Trainer", TRAINER, ("optimizer",), "TrainingArguments(optim='adamw_torch_fused')"),
    Switch("Trainer", TRAINER, ("sync", "logging"), "TrainingArguments(logging_steps=50, "
           "logging_nan_inf_filter=False)"),
    Switch("Trainer", TRAINER, ("saving",), "TrainingArguments(save_strategy='steps', save_steps=500)"),
    Switch("Lightning", LIGHTNING, ("float32 products",), "Trainer(precision='bf16-mixed')"),
    Switch("Lightning", LIGHTNING, ("sync", "logging"), "Trainer(log_every_n_steps=50); self.log(..., on_step=False)"),
    Switch("Lightning", LIGHTNING, ("saving",), "ModelCheckpoint(every_n_train_steps=500)"),
    Switch("sentence-transformers", SENTENCES, CALLS, "model.encode(all_sentences, batch_size=64) in one call"),
    Switch("transformers", TRANSFORMERS, ("float32 products",), "from_pretrained(..., dtype=torch.bfloat16)"),
    Switch("transformers", TRANSFORMERS, ("small batch", "launch"), "call the model on several sequences at once "
           "(tokenizer(list_of_texts, padding=True)), or torch.compile(model)"),
    Switch("transformers", TRANSFORMERS, ("padding",), "tokenizer(..., padding='longest') in batches of "
           "similar length"),
    Switch("accelerate", ACCELERATE, ("float32 products",), "Accelerator(mixed_precision='bf16')"),
    Switch("scikit-learn", SKLEARN, ("python", "launch"), "call transform or predict once for all rows; n_jobs=-1 "
           "where the estimator has it"),
    Switch("torch", OPTIM, ("optimizer", "launch"), "the optimizer's fused=True"),
)  # fmt: skip


def placed(found: Sequence[Finding], material: Material) -> Iterator[Finding]:
    """Yield findings with the user's line, the library's function, and the library's switch."""
    samples = material.samples.samples if material.samples is not None else []
    for each in found:
        chosen = [sample for sample in samples if _belongs(sample, each.kind)] or list(samples)
        words = next(_switches(each.kind, chosen), "")
        advice = f"{words}. Else: {each.advice}" if words else each.advice
        yield replace(each, where=_where(chosen), advice=advice)


def _belongs(sample: Sample, kind: str) -> bool:
    """Return True if a sample may be part of a finding's subject."""
    doing = doing_of(sample.stack)
    if kind == "loading":
        return any("/torch/utils/data/" in frame.file for frame in sample.stack)
    if kind == "optimizer":
        return any("/torch/optim/" in frame.file for frame in sample.stack)
    return doing.kind == kind if kind not in ("launch", "small batch", "sync", "autograd") else doing.part == "host"


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


def _where(samples: Sequence[Sample]) -> str:
    """Return the user's line that most samples are below, and the function that it calls there."""
    counts: Counter[tuple[Frame, Frame | None]] = Counter()
    for sample in samples:
        stack = user_stack(sample.stack)
        index = next((i for i, frame in enumerate(stack) if not any(part in frame.file for part in LIBRARY)), None)
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
    """Find attention of transformers that writes all scores to memory."""
    samples = material.samples.samples if material.samples is not None else []
    eager = [sample for sample in samples if any(frame.function == "eager_attention_forward" for frame in sample.stack)]
    scores = material.split.named("aten::_softmax", "aten::softmax", "aten::bmm", "aten::_softmax_backward_data")
    seconds = sum(op.seconds - op.calls * (op.floor or 0.0) for op in scores if "bmm" not in op.name)
    if not eager or seconds <= 0:
        return
    seconds += sum(op.seconds for op in material.split.named("aten::add", "aten::mul")) * 0.3
    evidence = f"{len(eager) / len(samples):.0%} of the samples are in eager_attention_forward"
    advice = "from_pretrained(..., attn_implementation='sdpa'), or flash_attention_2 on a GPU"
    yield Finding("attention", "attention writes all of its scores to memory", evidence, seconds, advice)
