"""Runs of a tiny engine whose decision logs are kept, and the same decisions again on a virtual clock.

``benchmarks/plan/recorded_logs.py`` records such runs on a CPU or a GPU.
"""

import json
import time
from collections.abc import Mapping
from types import MappingProxyType

import torch
from decision_logs import log_for
from safetensors.torch import save_file
from tiny_llm import save_tiny_llm

from transect import LLM, LoRARequest, SamplingParams
from transect.engine.scheduling.decisions import Aborted, Added, Done, Planned
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.engine.scheduling.simulation import SimulatedEngine
from transect.explain.engine.log import build, load
from transect.explain.engine.replay import RecordedDrafts, ReplayScript

SETTINGS = {
    "cpu": {"dtype": "float32", "native": False, "threads": 1, "num_kv_blocks": 20, "block_size": 8},
    "cuda": {"device": "cuda", "dtype": "bfloat16", "num_kv_blocks": 10, "block_size": 16},
}
"""Settings by device: so few blocks that sequences are preempted."""
DRAFTS = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3, "adaptive": False}
KINDS = {
    "late": {"async_scheduling": False},
    "ahead": {"async_scheduling": True},
    "no-jumps": {"jump_ahead": False},
    "adapters": {"async_scheduling": True, "enable_lora": True, "max_loras": 1},
    "drafts": {"speculative_config": DRAFTS, "max_num_seqs": 16, "async_scheduling": False},
}
"""Settings of the runs, by name. Where drafts are made, every token is known before each step: an engine that plans
ahead waits for tokens as soon as drafts would pay, which a log does not say."""
FORM = {"regex": "[a-z]{3} is (one|two|three) of them"}


def save_models(folder):
    """Write a tiny model, and two adapters of it."""
    (folder / "model").mkdir()
    save_tiny_llm(folder / "model", head_dim=32)
    for name, rank in (("a", 2), ("b", 4)):
        (folder / name).mkdir()
        settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8,
                    "target_modules": ["q_proj"], "base_model_name_or_path": None}  # fmt: skip
        (folder / name / "adapter_config.json").write_text(json.dumps(settings))
        weights = {}
        for layer in range(2):
            place = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
            weights[f"{place}.lora_A.weight"] = 0.1 * torch.ones(rank, 64)
            weights[f"{place}.lora_B.weight"] = 0.1 * torch.ones(128, rank)
        save_file(weights, folder / name / "adapter_model.safetensors")


def recorded(models, path, kind, device="cpu"):
    """A run of an engine in this process, to which requests come while it is at work; its log."""
    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 6, "mixed_step_limit": "auto"}
    settings |= SETTINGS[device] | KINDS[kind]
    allowed = list(range(70, 74)) if kind == "drafts" else None  # so few that what came before comes again
    llm = LLM(str(models / "model"), decision_log=str(path), **settings)
    adapters = [None, *(LoRARequest(name, str(models / name)) for name in ("a", "b"))]
    system = list(range(40, 64))
    work = []
    for number in range(14):
        params = SamplingParams(max_tokens=10 + 3 * number, ignore_eos=True, seed=number, allowed_token_ids=allowed)
        if number % 4 == 1:
            params = SamplingParams(max_tokens=40, structured_outputs=FORM, seed=number, temperature=1.0)
        if number % 5 == 3:
            params = params.with_(n=2)
        work.append(([*system[: 8 * (number % 4)], *range(70 + number, 80 + 4 * number)], params))
    names = []
    for number, (prompt, params) in enumerate(work):
        adapter = adapters[number % 3] if settings.get("enable_lora") else None
        names.append(llm.submit(prompt, params, lora_request=adapter))
        for _ in range(number % 3 * 2):
            llm.step()
        if number == 9:
            llm._core.abort(llm._core.scheduler.running[-1].request_id)
        time.sleep(0.001)
    while llm.has_work:
        llm.step()
    llm.close()
    return load(path)


class AcceptedAgain(RecordedDrafts):
    """Drafts as many tokens as were drafted, of which as many are right."""

    accepted: Mapping[int, int] = MappingProxyType({})
    device = None

    def drafts(self, sequences, room, *, known=True):
        found = super().drafts(sequences, room, known=known)
        for seq_id, tokens in found.items():
            right = self.device.outputs[seq_id].peek(self.accepted.get(seq_id, 0))
            found[seq_id] = (*right, *[-1] * (len(tokens) - len(right)))
        return found


def simulated(log):
    """The decisions of a simulated engine whose steps take the recorded times."""
    script, lives = ReplayScript(log), iter(log.lives)
    taken = {event.step: event for event in log.events if isinstance(event, Done)}
    engine = SimulatedEngine(
        SchedulerConfig(**log.header.scheduler),
        lambda batch: taken[batch.step].learned,
        lag=log.header.lag,
        now=log.header.began,
    )
    engine.core.decisions = log_for(engine.core)
    speculation = engine.scheduler.speculation
    if speculation is not None:
        speculation = engine.scheduler.speculation = AcceptedAgain(speculation.config, engine.scheduler.times)
        speculation.device = engine.device
    rows = {step.number: {seq_id: count for seq_id, _, count in step.rows} for step in log.steps}

    def step():
        """Take one step of the engine loop; as many tokens are forced as were."""
        done = taken.get(engine.scheduler.blocks.committed_step + 1)
        jumps, outputs = dict(done.jumps if done else ()), engine.device.outputs
        engine.scheduler.jumps.forced = lambda seq, token, least, most: [
            next(outputs[seq.seq_id]) for _ in range(jumps.get(seq.seq_id, 0))
        ]
        if speculation is not None:
            coming = engine.scheduler._step + 1
            speculation.rows = rows.get(coming, {})
            speculation.accepted = dict(taken[coming].accepted) if coming in taken else {}
        engine.step()

    for event in log.events:
        match event:
            case Added():
                life = next(lives)
                engine.add(script.request(life), [script.output(life, choice) for choice in range(event.n)])
                if event.grammar:
                    for choice in engine.scheduler.requests[event.request_id].choices:
                        choice.plain = False
            case Aborted():
                engine.core.abort(event.request_id, event.choice)
            case Planned():
                engine.clock.advance(max(0.0, event.began - engine.clock.time))
                step()
            case Done() if event.step > engine.scheduler.blocks.committed_step:
                step()
    return build(engine.core.decisions.ring.records())


def decisions(log):
    found = []
    for event, step in zip((e for e in log.events if isinstance(e, Planned) and e.step), log.steps, strict=True):
        counts = (event.copies, event.held_back, event.waiting, event.running, event.free_blocks)
        found.append((event.step, step.rows, counts))
    return found


def met(log):
    """Names of what a log has of all that a run is to meet."""
    rows = [row for step in log.steps for row in step.rows]
    block, ends, again = log.header.scheduler["block_size"], {}, 0
    for seq, start, count in rows:
        again += start < ends.get(seq, 0)
        ends[seq] = start + count
    known = {
        "prefixes": any(start and count > 1 and start % block == 0 for _, start, count in rows),
        "preemption": again > 0,
        "grammars": any(life.added.grammar for life in log.lives),
        "choices": any(life.added.n > 1 for life in log.lives),
        "aborts": any(isinstance(event, Aborted) for event in log.events),
        "adapters": len({life.added.adapter for life in log.lives}) > 2,
        "drafts": sum(step.drafted(row) for step in log.steps for row in step.rows) > 10,
    }
    return {name for name, there in known.items() if there}
