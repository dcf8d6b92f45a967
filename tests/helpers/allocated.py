"""What a step of training takes, by torch's own count, and shapes to look at it with."""

import json

import torch
from tiny_llm import save_tiny_llm


def allocated_by(work):
    """The most bytes that torch's CPU allocator handed out during ``work``, beyond what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    most = now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def shape_of(folder, **changes):
    """A directory with the tokenizer of the tiny model and a config.json, without weights."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 5, "num_attention_heads": 8,
             "num_key_value_heads": 4, "head_dim": 32}  # fmt: skip
    made = folder / "shape"
    made.mkdir()
    save_tiny_llm(made)
    (made / "model.safetensors").unlink()
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | sizes | changes))
    return str(made)


def watched(trainer):
    """Gets what the second step of ``trainer`` allocates."""
    step, records, found = trainer.step, [], []

    def second():
        if not records:
            records.append(step())
        else:
            found.append(allocated_by(lambda: records.append(step())))
        return records[-1]

    trainer.step = second
    return found
