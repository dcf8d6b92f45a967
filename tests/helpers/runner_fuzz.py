"""Random workloads for two executors that must agree: same requests, same tokens, whatever the batches were."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from grammar_fakes import Steps

from transect.engine.scheduling.clock import VirtualClock
from transect.engine.scheduling.core import EngineCore
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler import Scheduler
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.models.decoder import Decoder
from transect.ops.opset import resolve_ops
from transect.spec.hf import from_hf

VOCAB = 61
CONFIG = from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
)


def random_model():
    """A model of two layers on the CPU, whose rows do not depend on each other."""
    ops = resolve_ops("cpu", batch_invariant=True)
    decoder = Decoder(CONFIG, dtype=torch.float32, ops=ops).requires_grad_(False)
    return decoder.init_weights(0.3, torch.Generator().manual_seed(0))


@dataclass
class Arrival:
    """A request, the step before which it comes, and the number of steps after which it is aborted."""

    request: Request
    step: int
    abort_after: int | None


def random_params(rng: random.Random, vocab: int, *, prompt_logprobs: bool = True) -> SamplingParams:
    """Every option of the sampler, in all mixtures."""
    settings: dict = {"max_tokens": rng.randint(1, 12), "seed": rng.randint(-(2**63), 2**63)}
    settings["temperature"] = rng.choice([0.0, 0.0, 0.7, 1.0, 3.0])
    if rng.random() < 0.3:
        settings["top_k"] = rng.randint(1, vocab)
    if rng.random() < 0.3:
        settings["top_p"] = rng.uniform(0.1, 1.0)
    if rng.random() < 0.2:
        settings["min_p"] = rng.uniform(0.0, 0.3)
    if rng.random() < 0.25:
        settings["repetition_penalty"] = rng.uniform(0.5, 2.0)
    if rng.random() < 0.25:
        settings |= {"presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2)}
    if rng.random() < 0.2:
        settings["logit_bias"] = {rng.randrange(vocab): rng.uniform(-100, 100) for _ in range(rng.randint(1, 5))}
    if rng.random() < 0.3:
        settings["min_tokens"] = rng.randint(0, settings["max_tokens"])
        settings["stop_token_ids"] = [rng.randrange(vocab) for _ in range(4)]
    if rng.random() < 0.2:
        settings["logprobs"] = rng.randint(0, 5)
    if prompt_logprobs and rng.random() < 0.1:
        settings["prompt_logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.15:
        settings["n"] = rng.randint(2, 3)
    more = random.Random(settings["seed"])
    if more.random() < 0.1:
        settings["allowed_token_ids"] = more.sample(range(vocab), more.randint(3, vocab // 2))
    if more.random() < 0.15:  # of few tokens, so that some of them do come
        few = [more.randrange(vocab) for _ in range(4)]
        settings["bad_words_token_ids"] = [more.choices(few, k=more.randint(1, 3)) for _ in range(6)]
        settings |= {"logit_bias": dict.fromkeys(few, 6.0)} if more.random() < 0.5 else {}
    return SamplingParams(**settings)


def random_arrivals(rng: random.Random, vocab: int, count: int, longest_prompt: int = 40) -> list[Arrival]:
    """Requests with shared beginnings, some of them aborted."""
    stems = [tuple(rng.randrange(vocab) for _ in range(longest_prompt)) for _ in range(3)]
    arrivals = []
    for index in range(count):
        stem = rng.choice(stems)[: rng.randint(0, longest_prompt - 1)]
        prompt = (*stem, *(rng.randrange(vocab) for _ in range(rng.randint(1, longest_prompt - len(stem)))))
        eos = rng.randrange(vocab)
        grammar = Steps(rng.randrange(100), vocab, rng.randint(2, 14), eos) if rng.random() < 0.2 else None
        if grammar is not None:
            grammar.forcing = grammar.seed % 3 * 3
        params = random_params(rng, vocab)
        if params.prompt_logprobs is not None and (start := random.Random(params.seed).randrange(-9, len(prompt))) > 0:
            params = params.with_(prompt_logprobs_start=start)
        pooling = {1: "last", 2: "mean"}.get(hash(prompt) % 9)
        request = Request(str(index), prompt, params, eos_token_ids=(eos,), constraint=grammar, pooling=pooling)
        abort_after = rng.randint(1, 10) if rng.random() < 0.15 else None
        arrivals.append(Arrival(request, rng.randint(0, 12), abort_after))
    return arrivals


class Planned(RuntimeError):
    """A failure of ``Breaking``."""


class Breaking:
    """An executor whose steps fail now and then: before they are handed over, after that, or when they are done."""

    def __init__(self, inner, rng: random.Random) -> None:
        self.inner, self.rng, self.failures = inner, rng, 0
        self.abandon = inner.abandon

    def submit(self, batch):
        self.fail()
        handle = self.inner.submit(batch)
        self.fail()
        return BreakingHandle(handle, self)

    def fail(self) -> None:
        if self.rng.random() < 0.04:
            self.failures += 1
            raise Planned


class BreakingHandle:
    def __init__(self, inner, executor: Breaking) -> None:
        self.inner, self.executor = inner, executor

    def draw(self) -> None:
        self.executor.fail()
        self.inner.draw()

    def result(self):
        result = self.inner.result()
        self.executor.fail()
        return result


def run_workload(executor, config: SchedulerConfig, arrivals: list[Arrival], lag: int):
    """What came out by (request, choice): tokens, logprobs, why it ended; and the engine."""
    core = EngineCore(Scheduler(config, VirtualClock()), executor, lag=lag)
    waiting = sorted(arrivals, key=lambda arrival: arrival.step)
    aborts: dict[int, list[str]] = {}
    found: dict[tuple[str, int], dict] = {}
    step = 0
    while waiting or core.has_work:
        while waiting and waiting[0].step <= step:
            arrival = waiting.pop(0)
            core.add(arrival.request)
            if arrival.abort_after is not None:
                aborts.setdefault(step + arrival.abort_after, []).append(arrival.request.request_id)
        for request_id in aborts.pop(step, ()):
            core.abort(request_id)
        try:
            outputs = core.step()
        except Planned:
            outputs = []
        for output in outputs:
            entry = found.setdefault((output.request_id, output.index), {"tokens": [], "logprobs": [], "end": None})
            entry["tokens"] += output.new_token_ids
            entry["logprobs"] += output.logprobs or []
            if output.prompt_logprobs is not None:
                entry["prompt_logprobs"] = output.prompt_logprobs
            if output.pooled is not None:
                assert "pooled" not in entry, "a vector came twice"
                entry["pooled"] = np.frombuffer(output.pooled)
            if output.finish_reason is not None:
                entry["end"] = (output.finish_reason, output.error)
        step += 1
        assert step < 5000
    cache = core.scheduler.cache
    assert cache.num_free == cache.num_blocks, "a KV block was not given back"
    return found, core


def assert_same(expected: dict, found: dict, arrivals: list[Arrival]) -> None:
    """Equal outputs; of aborted requests, which end at different moments, the tokens that both have."""
    aborted = {arrival.request.request_id for arrival in arrivals if arrival.abort_after is not None}
    for key, entry in expected.items():
        other = found.get(key, {"tokens": [], "logprobs": [], "end": None})
        if key[0] in aborted:
            shared = min(len(entry["tokens"]), len(other["tokens"]))
            assert entry["tokens"][:shared] == other["tokens"][:shared], key
            continue
        assert entry["tokens"] == other["tokens"], key
        assert entry["end"] == other["end"], key
        for one, two in zip(entry["logprobs"], other["logprobs"], strict=True):
            assert one.token_id == two.token_id and one.rank == two.rank
            assert abs(one.logprob - two.logprob) < 1e-4
            assert [token for token, _ in one.top] == [token for token, _ in two.top]
        assert ("pooled" in entry) == ("pooled" in other), key
        if "pooled" in entry:
            assert np.abs(entry["pooled"] - other["pooled"]).max() < 1e-3
        assert ("prompt_logprobs" in entry) == ("prompt_logprobs" in other)
