"""Losses over several steps beside those of TRL's trainers: the same batches, gradients of torch and torch's AdamW.

TRL's trainer gets our batches as padded rows and computes its own loss with its own model of transformers.
"""

import copy
import itertools
import json

import numpy as np
import pytest
import torch
import transformers
from tiny_llm import save_tiny_llm
from training_runs import tiny_run, write_chats

from transect.train.loop.trainer import Trainer

pytestmark = pytest.mark.prove
trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl")

STEPS = 4
PAD = 0
EPS = 1e-4
"""AdamW's: with a smaller one, gradients that are rounding alone would move weights as far as others do."""


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def write_rows(path, kind):
    with path.open("w") as file:
        for i in range(8):
            row = {"prompt": f"{i}?", "chosen": f"yes {i % 5}", "rejected": "no" * (i % 3 + 1)}
            if kind == "kto":
                row = {
                    "prompt": row["prompt"],
                    "completion": row["chosen" if i % 3 else "rejected"],
                    "label": i % 3 > 0,
                }
            if kind == "grpo":
                row = {"prompt": row["prompt"], "answer": "1"}
            file.write(json.dumps(row) + "\n")
    return str(path)


def our_trainer(tmp_path, kind, **changes):
    (tmp_path / "judge.py").write_text("def f(answer, record):\n    return len(set(answer)) % 4\n")
    data = {"train": [write_rows(tmp_path / f"{kind}.jsonl", kind)], "seq_len": 64, "micro_batch": 4096}
    return Trainer(
        tiny_run(
            tmp_path, objective=kind, steps=STEPS, data=data | changes.pop("data", {}),
            optimizer={"learning_rate": 1e-3, "weight_decay": 0.0, "beta2": 0.95, "eps": EPS},
            schedule={"kind": "constant"}, **changes,
        )
    )  # fmt: skip


class Theirs:
    """A model of transformers with torch's AdamW; ``step`` takes TRL's loss of a batch."""

    def __init__(self, path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0
        )

    def step(self, loss) -> float:
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())


def arguments(kind, tmp_path, **more):
    return kind(
        str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False,
        per_device_train_batch_size=8, **more,
    )  # fmt: skip


def rows(batch, chosen=None):
    """Documents as right-padded rows: ids, attention mask, and which tokens are the answer's."""
    bounds = batch.cu_seqlens.tolist()
    documents = [slice(a, b) for a, b in itertools.pairwise(bounds)][chosen or slice(None)]
    width = max(d.stop - d.start for d in documents)
    ids, mask, answer = (torch.zeros(len(documents), width, dtype=torch.int64) for _ in range(3))
    for row, document in enumerate(documents):
        size = document.stop - document.start
        ids[row, :size] = batch.tokens_T[document]
        mask[row, :size] = 1
        answer[row, 1:size] = (batch.labels_T[document][:-1] >= 0).long()
    return ids, mask, answer


def tokenizer_of(config):
    found = transformers.AutoTokenizer.from_pretrained(config.model)
    found.pad_token_id = PAD
    return found


def prompts():
    import datasets

    return datasets.Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 8)


@pytest.mark.parametrize(("loss", "smoothing"), [("sigmoid", 0.0), ("robust", 0.1), ("hinge", 0.0), ("ipo", 0.0)])
def test_dpo_beside_trl(tmp_path, loss: str, smoothing: float) -> None:
    ours = our_trainer(tmp_path, "dpo", dpo={"loss": loss, "label_smoothing": smoothing, "beta": 0.2})
    mirror = Trainer(ours.config).objective
    theirs = Theirs(ours.config.model)
    args = arguments(trl.DPOConfig, tmp_path, beta=0.2, loss_type=[loss], label_smoothing=smoothing)
    trainer = trl.DPOTrainer(
        theirs.model, args=args, train_dataset=prompts(), processing_class=tokenizer_of(ours.config),
        ref_model=copy.deepcopy(theirs.model),
    )  # fmt: skip
    found, expected = [], []
    for step in range(STEPS):
        (batch,) = mirror.batches(step)
        found.append(ours.step().loss)
        order = [*range(0, 2 * batch.num_labels, 2), *range(1, 2 * batch.num_labels, 2)]
        ids, mask, answer = (x[order] for x in rows(batch))
        inputs = {"input_ids": ids, "attention_mask": mask, "completion_mask": answer}
        expected.append(theirs.step(trainer._compute_loss(theirs.model, inputs, return_outputs=False)))
    np.testing.assert_allclose(found, expected, rtol=2e-4)
    assert found[0] != found[1]


def test_kto_beside_trl(tmp_path) -> None:
    settings = {"beta": 0.3, "desirable_weight": 0.8, "undesirable_weight": 1.2}
    ours = our_trainer(tmp_path, "kto", kto=settings)
    mirror = Trainer(ours.config).objective
    theirs = Theirs(ours.config.model)
    import datasets

    data = datasets.Dataset.from_list([{"prompt": "a", "completion": "b", "label": bool(i % 2)} for i in range(8)])
    trainer = trl.KTOTrainer(
        theirs.model, args=arguments(trl.KTOConfig, tmp_path, train_sampling_strategy="sequential", **settings),
        train_dataset=data, processing_class=tokenizer_of(ours.config), ref_model=copy.deepcopy(theirs.model),
    )  # fmt: skip
    found, expected = [], []
    for step in range(STEPS):
        (batch,) = mirror.batches(step)
        found.append(ours.step().loss)
        ids, mask, answer = rows(batch, slice(0, None, 2))
        kl_ids, kl_mask, kl_answer = rows(batch, slice(1, None, 2))
        inputs = {
            "input_ids": ids, "attention_mask": mask, "completion_mask": answer, "KL_input_ids": kl_ids,
            "KL_attention_mask": kl_mask, "KL_completion_mask": kl_answer, "label": batch.good,
        }  # fmt: skip
        expected.append(theirs.step(trainer._compute_loss(theirs.model, inputs, return_outputs=False)))
    np.testing.assert_allclose(found, expected, rtol=2e-4)


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "bnpo"])
def test_grpo_beside_trl(tmp_path, loss: str) -> None:
    settings = {
        "prompts": 4, "group": 4, "iterations": 2, "max_tokens": 12, "loss": loss, "beta": 0.2, "temperature": 0.9,
        "clip": 0.05, "clip_high": 0.1, "reward": f"{tmp_path}/judge.py:f",
    }  # fmt: skip
    ours = our_trainer(tmp_path, "grpo", grpo=settings)
    theirs = Theirs(ours.config.model)
    args = arguments(
        trl.GRPOConfig, tmp_path, beta=0.2, temperature=0.9, epsilon=0.05, epsilon_high=0.1, loss_type=loss,
        max_completion_length=12, num_generations=4, num_iterations=2,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        theirs.model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args,
        train_dataset=prompts(), processing_class=tokenizer_of(ours.config),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.args.steps_per_generation = 1
    found, expected = [], []
    for _ in range(STEPS):
        found.append(ours.step().loss)
        rollout = ours.objective._rollout
        expected.append(theirs.step(trainer._compute_loss(theirs.model, padded_answers(ours.objective, rollout))))
    np.testing.assert_allclose(found, expected, rtol=5e-4, atol=1e-5)


def padded_answers(objective, rollout):
    """Prompts padded on the left, answers on the right, as TRL has them."""
    count, ends = len(rollout), rollout.length_A.cumsum(0).tolist()
    prompts = [objective._prompts[i] for i in rollout.prompt_A.tolist()]
    before, after = max(map(len, prompts)), int(rollout.length_A.max())
    prompt_ids, prompt_mask = (torch.zeros(count, before, dtype=torch.int64) for _ in range(2))
    ids, mask = (torch.zeros(count, after, dtype=torch.int64) for _ in range(2))
    old, reference = torch.zeros(count, after), torch.zeros(count, after)
    for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
        own = slice(end - int(rollout.length_A[row]), end)
        size = own.stop - own.start
        prompt_ids[row, before - len(prompt) :] = torch.tensor(prompt)
        prompt_mask[row, before - len(prompt) :] = 1
        ids[row, :size], mask[row, :size] = rollout.tokens_N[own], 1
        old[row, :size], reference[row, :size] = rollout.old_N[own], rollout.reference_N[own]
    return {
        "prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": ids, "completion_mask": mask,
        "advantages": rollout.advantage_A.float(), "old_per_token_logps": old, "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "beta"), [("forward", 0.0), ("reverse", 1.0), ("jsd", 0.3)])
def test_distillation_beside_trl(tmp_path, kind: str, beta: float) -> None:
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    folder = tmp_path / "teacher"
    folder.mkdir()
    save_tiny_llm(folder, seed=7, hidden_size=96)
    chats = write_chats(tmp_path / "chats.jsonl", count=8)
    distill = {"teacher": str(folder), "divergence": kind, "mixture": beta or 0.5, "temperature": 1.5}
    distill["mixture"] = beta if kind == "jsd" else 0.5
    ours = our_trainer(tmp_path, "distill", distill=distill, data={"train": [chats], "seq_len": 128})
    mirror = Trainer(ours.config).objective
    theirs, teacher = Theirs(ours.config.model), transformers.AutoModelForCausalLM.from_pretrained(folder)
    found, expected = [], []
    for step in range(STEPS):
        (batch,) = mirror.batches(step)
        found.append(ours.step().loss)
        ids, mask, answer = rows(batch)
        hidden = theirs.model.model(ids, attention_mask=mask).last_hidden_state[:, :-1]
        with torch.no_grad():
            above = teacher.model(ids, attention_mask=mask).last_hidden_state[:, :-1]
        loss, _, _ = _chunked_divergence_loss(
            hidden, above, theirs.model.lm_head.weight, teacher.lm_head.weight, answer[:, 1:], beta, temperature=1.5
        )
        expected.append(theirs.step(loss))
    np.testing.assert_allclose(found, expected, rtol=2e-4)


def test_orpo_beside_trl(tmp_path) -> None:
    """TRL's odds ratio over its mean log-probabilities, and its cross entropy over prompt and answer."""
    from trl.experimental.orpo import ORPOTrainer

    ours = our_trainer(tmp_path, "orpo", orpo={"beta": 0.3})
    mirror = Trainer(ours.config).objective
    theirs = Theirs(ours.config.model)
    odds = ORPOTrainer.odds_ratio_loss
    found, expected = [], []

    class Self:
        beta = 0.3
        accelerator = type("Device", (), {"device": torch.device("cpu")})

    for step in range(STEPS):
        (batch,) = mirror.batches(step)
        found.append(ours.step().loss)
        ids, mask, answer = rows(batch)
        logits = theirs.model(ids, attention_mask=mask).logits
        logps = ORPOTrainer.get_batch_logps(logits, ids.masked_fill(answer == 0, -100), average_log_prob=True)
        losses = odds(Self(), logps[::2], logps[1::2])[0]
        labels = ids.masked_fill(mask == 0, -100)[::2, 1:]
        nll = torch.nn.functional.cross_entropy(logits[::2, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100)
        expected.append(theirs.step(nll - losses.mean()))
    np.testing.assert_allclose(found, expected, rtol=2e-4)
