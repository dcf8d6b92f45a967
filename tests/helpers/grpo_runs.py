"""Runs of GRPO over a tiny model, with rewards of a file."""

import json

from training_runs import tiny_run

REWARD = """
def length(answer, record):
    return len(answer) % 5 if answer else None

def vowels(answer, record):
    return sum(letter in "aeiou" for letter in answer)

def fails(answer, record):
    raise KeyError("what was asked")
"""


def grpo_run(tmp_path, **changes):
    rows = tmp_path / "prompts.jsonl"
    if not rows.exists():
        rows.write_text("".join(json.dumps({"prompt": f"{i} and {i + 1}", "answer": str(i)}) + "\n" for i in range(12)))
        (tmp_path / "judge.py").write_text(REWARD)
    grpo = {"prompts": 3, "group": 4, "max_tokens": 6, "reward": f"{tmp_path}/judge.py:length"}
    data = {"train": [str(rows)], "seq_len": 64, "micro_batch": 128} | changes.pop("data", {})
    return tiny_run(
        tmp_path, objective="grpo", optimizer={"learning_rate": 2e-3}, data=data, run_dir=str(tmp_path / "grpo"),
        **changes | {"grpo": grpo | changes.get("grpo", {})},
    )  # fmt: skip


def documents(batches):
    """(tokens, labels, old, advantage, reference) of every answer of micro-batches."""
    for batch in batches:
        for first, last in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            own = slice(first, last)
            reference = batch.reference_T[own] if len(batch.reference_T) else None
            yield batch.tokens_T[own], batch.labels_T[own], batch.old_T[own], batch.advantage_T[own], reference
