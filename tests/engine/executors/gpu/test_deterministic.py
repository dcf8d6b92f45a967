"""Batch-invariant mode on a GPU: the same bits alone, in any batch and chunk, with hits of the prefix cache or without,
preempted or not; and 10,000 mixed requests, each as it is alone."""

import dataclasses
import random

import pytest
import torch
from gpu_engine import BLOCK, TINY, VOCAB, gpu_model, runner_for
from runner_fuzz import random_arrivals, run_workload

from transect.engine.scheduling.clock import VirtualClock
from transect.engine.scheduling.core import EngineCore
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler import Scheduler
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.models.context import PagedContext
from transect.spec.shapes import PRESETS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
PROMPT, NEW = 2100, 6
"""Tokens of the request that is watched."""
REQUESTS = 10_000


@pytest.fixture(scope="module")
def wide():
    """Two layers at the widths of an 8B model, its whole vocabulary, bfloat16."""
    config = dataclasses.replace(PRESETS["llama-3.1-8b"], n_layers=2, max_position=4096)
    return gpu_model(config, torch.bfloat16, deterministic=True, std=0.02)


def random_tokens(seed, count):
    return tuple(random.Random(seed).choices(range(100_000), k=count))


@torch.inference_mode()
def test_logits_have_the_same_bits_in_any_batch_and_chunk(wide):
    """The forward pass itself: chunks of 1 to 2048, beside up to 255 others, after a prefix that another computed."""
    k_cache, v_cache = wide.new_kv_cache(2048, BLOCK, torch.bfloat16)
    long = random_tokens(0, PROMPT)
    others = [random_tokens(seed, length) for seed, length in ((1, 65), (2, 1), (3, 333))]

    def logits(rows):
        """The last token's values, for each (prompt, first token, last token, blocks)."""
        tokens = torch.tensor([token for prompt, first, last, _ in rows for token in prompt[first:last]], device="cuda")
        starts = torch.tensor([0, *(last - first for _, first, last, _ in rows)], device="cuda")
        starts = starts.cumsum(0, dtype=torch.int32)
        lengths = torch.tensor([last for _, _, last, _ in rows], dtype=torch.int32, device="cuda")
        columns = max(len(blocks) for *_, blocks in rows)
        tables = [[*blocks, *[0] * (columns - len(blocks))] for *_, blocks in rows]
        tables = torch.tensor(tables, dtype=torch.int32, device="cuda")
        context = PagedContext(k_cache, v_cache, tables, starts, lengths, wide.ops)
        hidden = wide(tokens, context.positions(), context)
        return wide.head(hidden[starts[1:].long() - 1])

    def blocks(first, count):
        return list(range(first, first + -(-count // BLOCK)))

    k_cache.normal_()
    v_cache.normal_()
    own = blocks(0, PROMPT)
    alone = logits([(long, 0, PROMPT, own)])[0]
    for chunk in (1, 2, 17, 64, 129, 300, 1024, 2047, 2048):
        place = blocks(200, PROMPT)
        for first in range(0, PROMPT, chunk):
            part = logits([(long, first, min(first + chunk, PROMPT), place)])
        assert torch.equal(part[0], alone), f"chunks of {chunk}"
    for count in (1, 3, 40, 255):
        rows = [
            (others[i % 3], 0, len(others[i % 3]), blocks(400 + 21 * (i % 70), len(others[i % 3])))
            for i in range(count)
        ]
        rows.insert(count // 2, (long, 0, PROMPT, own))
        assert torch.equal(logits(rows)[count // 2], alone), f"a batch of {count + 1} prompts"
    beside = [(others[0], 64, 65, blocks(400, 65))]
    for count in (0, 1, 7, 31, 63, 128, 255):  # a decode beside decodes
        rows = [*beside * count, (long, PROMPT - 1, PROMPT, own)]
        assert torch.equal(logits(rows)[-1], alone), f"decode beside {count} others"
    mixed = [(long, 640, PROMPT, own), (others[2], 0, 333, blocks(500, 333)), *beside]
    assert torch.equal(logits(mixed)[0], alone), "after a prefix, beside a prompt and a decode"


class Watched:
    """An engine whose logits are kept: of every token drawn for the request with ``prompt``, in order."""

    def __init__(self, model, prompt, **limits):
        settings = {"num_blocks": 2000, "max_num_seqs": 256, "max_num_batched_tokens": 2048, **limits}
        config = SchedulerConfig(block_size=BLOCK, max_model_len=4096, seed=1, **settings)
        self.prompt, self.inner = prompt, runner_for(model, config)
        self.core = EngineCore(Scheduler(config, VirtualClock()), self, lag=1)
        self.seen = torch.zeros(256, model.config.vocab_size, dtype=torch.bfloat16, device="cuda")
        self.kept, self.cached, self.widest = [], [], 0
        self._hook = model.head.register_forward_hook(self._keep)

    def _keep(self, module, inputs, output):
        self.seen[: len(output)].copy_(output)  # part of the graph where there is one

    def submit(self, batch):
        handle = self.inner.submit(batch)
        torch.cuda.synchronize()
        self.widest = max(self.widest, len(batch.rows))
        draws = [draw for row in batch.rows for draw in row.draws]
        for draw in draws:
            if draw.prompt_token_ids == self.prompt:
                self.kept.append(self.seen[handle.seq_ids.index(draw.seq_id)].clone())
        return handle

    def add(self, name, prompt, new, priority=0):
        params = SamplingParams(max_tokens=new, temperature=0.8, seed=5, ignore_eos=True)
        self.core.add(Request(name, prompt, params, priority=priority))

    def run(self, new=NEW):
        """To the end; (logits ``[new, V]``, tokens) of the watched request."""
        tokens = []
        while self.core.has_work:
            for output in self.core.step():
                if output.request_id == "watched":
                    tokens += output.new_token_ids
                    self.cached.append(output.num_cached_tokens)
        logits, self.kept = torch.stack(self.kept[:new]), []  # one more may be drawn and thrown away
        return logits, tokens

    def close(self):
        self._hook.remove()


@torch.inference_mode()
def test_an_engine_gives_the_same_bits_whatever_else_it_does(wide):
    """Graphs, continuous batching and the prefix cache are on; the logits are those that tokens were drawn from."""
    prompt = random_tokens(0, PROMPT)
    engine = Watched(wide, prompt)
    try:
        engine.add("watched", prompt, NEW)
        alone, tokens = engine.run()
        assert len(tokens) == NEW and len(engine.inner.graphs) > 0
        engine.add("watched", prompt, NEW)
        again = engine.run()
        assert engine.cached[-1] >= PROMPT - 2 * BLOCK, "no hit of the prefix cache"
        assert torch.equal(again[0], alone) and again[1] == tokens, "after a hit of the prefix cache"
    finally:
        engine.close()
    for others in (1, 30, 255):
        engine = Watched(wide, prompt)
        try:
            for index in range(others):
                engine.add(f"other-{index}", random_tokens(index + 1, 1 + 37 * index % 90), 20 + index % 20)
                if index == others // 2:
                    engine.add("watched", prompt, NEW)
            found = engine.run()
            assert engine.widest == others + 1
            assert torch.equal(found[0], alone) and found[1] == tokens, f"beside {others} others"
        finally:
            engine.close()
    for chunk in (1, 33, 500):
        engine = Watched(wide, prompt, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 16))
        try:
            engine.add("watched", prompt, NEW)
            for index in range(min(chunk, 16) - 1):
                engine.add(f"other-{index}", random_tokens(index + 1, 50), 20)
            found = engine.run()
            assert torch.equal(found[0], alone) and found[1] == tokens, f"steps of {chunk} tokens"
        finally:
            engine.close()


@torch.inference_mode()
def test_a_preempted_request_has_the_same_bits(wide):
    """The cache holds too few blocks for both, so the one that came later is put off half-way and computed again."""
    prompt = random_tokens(0, PROMPT)
    found = []
    for rival in (False, True):
        engine = Watched(wide, prompt, num_blocks=136, enable_prefix_caching=False, max_num_seqs=4)
        try:
            if rival:
                engine.add("rival", random_tokens(9, 20), 60)
            engine.add("watched", prompt, 40)
            found.append(engine.run(40))
            assert (engine.core.stats().preemptions > 0) == rival
        finally:
            engine.close()
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_each_of_ten_thousand_mixed_requests_is_as_it_is_alone():
    """Aborts, preemption, hits of the prefix cache and every sampling option; no KV block is lost. Equal to the bit:
    tokens, logprobs, and why it ended."""
    model = gpu_model(TINY, torch.bfloat16, deterministic=True)
    limits = {"block_size": BLOCK, "max_num_seqs": 64, "max_num_batched_tokens": 256, "max_model_len": 100, "seed": 1}
    config = SchedulerConfig(num_blocks=40, **limits)
    arrivals = random_arrivals(random.Random(7), VOCAB, REQUESTS)
    for index, arrival in enumerate(arrivals):
        arrival.step = index // 4
    found, core = run_workload(runner_for(model, config), config, arrivals, lag=1)  # asserts that all blocks came back
    stats = core.stats()
    assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0 and stats.finished["abort"] > 0
    assert stats.kv_blocks_used == 0
    print(f"{len(found)} choices, {stats}")

    alone = SchedulerConfig(num_blocks=40, enable_prefix_caching=False, **limits)
    engine = EngineCore(Scheduler(alone, VirtualClock()), runner_for(model, alone), lag=1)
    for arrival in arrivals:
        engine.add(arrival.request)
        expected = {}
        while engine.has_work:
            for output in engine.step():
                entry = expected.setdefault(output.index, ([], [], []))
                entry[0].extend(output.new_token_ids)
                entry[1].extend(output.logprobs or [])
                if output.finish_reason is not None:
                    entry[2].append((output.finish_reason, output.error))
        for choice, (tokens, logprobs, end) in expected.items():
            entry = found.get((arrival.request.request_id, choice), {"tokens": [], "logprobs": [], "end": None})
            if entry["end"] is None or entry["end"][0] == "abort":
                assert arrival.abort_after is not None
                count = len(entry["tokens"])
                assert entry["tokens"] == tokens[:count] and entry["logprobs"] == logprobs[:count]
            else:
                assert entry["tokens"] == tokens and entry["logprobs"] == logprobs and [entry["end"]] == end
