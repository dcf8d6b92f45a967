"""Rows of different adapters in one batch: each answer is the one that its request gets alone, on every executor."""

import random
from dataclasses import replace

import msgspec
import pytest
import torch
from effort import quick_first
from runner_fuzz import assert_same, random_arrivals, run_workload

from transect.engine.executors.adapter_slots import AdapterSlots
from transect.engine.executors.drafted import Drafted
from transect.engine.executors.gpu.runner import GPURunner
from transect.engine.executors.runner import Runner
from transect.engine.scheduling.drafters.registry import SpeculativeConfig
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack
from transect.models.native import native_model, run_natively
from transect.models.row_adapters import AdapterRoom, add_row_adapters
from transect.models.weights.low_rank import LowRank
from transect.models.weights.weight import Weight
from transect.ops.cpu import library
from transect.ops.opset import resolve_ops
from transect.spec.model import ModelConfig
from transect.spec.weights import linear_shapes

VOCAB = 61
CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=VOCAB,
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    ffn_dim=96,
    max_position=128,
    qk_norm=True,
)
SLOTS = 2
IDS = [f"{number:064x}" for number in range(1, 5)]


def factors(number: int) -> dict[str, LowRank]:
    """Of another rank, scale and choice of matrices for each adapter."""
    generator = torch.Generator().manual_seed(number)
    rank, names = [(16, ""), (4, "qv"), (7, "down o"), (1, "")][number % 4]
    found = {}
    for layer in range(CONFIG.n_layers):
        for name, ((outputs, inputs), _) in linear_shapes(CONFIG, layer).items():
            leaf = name.rpartition(".")[2]
            if not names or leaf in (names.split() if " " in names else names):
                a = torch.randn(rank, inputs, generator=generator) / 4
                b = torch.randn(outputs, rank, generator=generator) / 4
                found[f"layers.{layer}.{name}"] = LowRank(a, b, 0.5 + number)
    return found


def plain_model() -> Decoder:
    ops = resolve_ops("cpu", batch_invariant=True)
    model = Decoder(CONFIG, dtype=torch.float32, ops=ops).requires_grad_(False)
    return model.init_weights(0.3, torch.Generator().manual_seed(0))


def model_of(stack: str) -> Decoder:
    model = plain_model()
    if stack == "native":
        kernels = library.load(2)
        native = native_model(CONFIG, kernels, torch.float32, 16, half=False)
        state = {name: weight.dense() for name, weight in model.weights()}
        for name, weight in native.weights():
            weight.load(state[name], None)
        native.embed.load(model.embed.weight, None)
        own = dict(model.named_parameters())
        for name, parameter in native.named_parameters():
            parameter.copy_(own[name])
        model = run_natively(native, kernels, torch.float32, 16)
    add_row_adapters(model, AdapterRoom(SLOTS, 16, ("q", "k", "v", "o", "gate", "up", "down")))
    if stack == "fused":
        model.stack = FusedStack(model, max_positions=128)
    return model


@pytest.fixture(scope="module", params=["layers", "fused", "native"])
def model(request) -> Decoder:
    with torch.inference_mode():
        return model_of(request.param)


def executor(model: Decoder, config: SchedulerConfig, *, device: bool = False):
    blocks = config.num_blocks + device
    caches = model.new_kv_cache(blocks, config.block_size, torch.float32)
    for cache in caches:
        cache.zero_()
    limits = {name: getattr(config, name) for name in ("max_num_batched_tokens", "max_model_len")}
    limits["max_num_seqs"] = config.max_rows
    made = GPURunner(model, *caches, **limits, prune_last_layer=True) if device else Runner(model, *caches)
    prepared = {name: model.adapters.prepare(factors(number)) for number, name in enumerate(IDS)}
    made.adapters = AdapterSlots(model.adapters, prepared.__getitem__)
    return made


def limits(rng: random.Random) -> SchedulerConfig:
    seqs = rng.choice([3, 5, 9])
    return SchedulerConfig(
        num_blocks=rng.choice([8, 12, 40]),
        block_size=16,
        max_num_seqs=seqs,
        max_num_batched_tokens=rng.choice([seqs, 16, 64]),
        max_model_len=60,
        max_adapters=SLOTS,
        seed=1,
    )


def workload(rng: random.Random) -> list:
    """Prompts that begin alike, for adapters that differ: the prefix cache must keep them apart."""
    shared = tuple(rng.randrange(VOCAB) for _ in range(20))
    arrivals = []
    for arrival in random_arrivals(rng, VOCAB, 14, longest_prompt=20):
        prompt = (*shared, *arrival.request.prompt_token_ids)
        changes = {"prompt_token_ids": prompt, "adapter": rng.choice([*IDS, "", IDS[0]])}
        arrivals.append(replace(arrival, request=msgspec.structs.replace(arrival.request, **changes)))
    return arrivals


def alone(model: Decoder, config: SchedulerConfig, arrivals: list) -> dict:
    """Each request in an engine of its own, all of whose blocks are fresh."""
    found = {}
    for arrival in arrivals:
        quiet = replace(config, num_blocks=40, enable_prefix_caching=False)
        found |= run_workload(executor(model, quiet), quiet, [replace(arrival, step=0)], lag=0)[0]
    return found


@pytest.mark.parametrize("seed", quick_first(range(20), 1))
def test_a_mixed_batch_gives_what_each_gets_alone(model, seed: int) -> None:
    rng = random.Random(seed)
    config = limits(rng)
    arrivals = workload(rng)
    expected = alone(model, config, arrivals)
    on_device = getattr(model.stack, "rows", None) is None  # the C++ stack has a runner of its own
    for device in (False, True) if on_device else (False,):
        for lag in (0, 1):
            found, _ = run_workload(executor(model, config, device=device), config, arrivals, lag=lag)
            assert_same(expected, found, arrivals)


@pytest.mark.parametrize("seed", quick_first(range(8), 1))
def test_drafts_are_verified_with_the_request_s_adapter(model, seed: int) -> None:
    rng = random.Random(seed)
    config = limits(rng)
    arrivals = workload(rng)
    expected = alone(model, config, arrivals)
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, adaptive=False)
    config = replace(config, speculation=drafts, max_num_seqs=3 * config.max_num_seqs, max_num_batched_tokens=64)
    found, _ = run_workload(Drafted(executor(model, config)), config, arrivals, lag=1)
    assert_same(expected, found, arrivals)


@torch.inference_mode()
def test_it_computes_what_the_merged_matrices_do(model) -> None:
    config = SchedulerConfig(num_blocks=40, block_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=60)
    arrivals = random_arrivals(random.Random(5), VOCAB, 1, longest_prompt=20)
    greedy = arrivals[0].request.params.with_(temperature=0.0, max_tokens=12, logprobs=3, n=1)
    for number, name in enumerate(IDS):
        request = msgspec.structs.replace(arrivals[0].request, params=greedy, adapter=name)
        mine, _ = run_workload(executor(model, config), config, [replace(arrivals[0], request=request)], lag=0)
        merged = plain_model()
        for place, low in factors(number).items():
            weight: Weight = merged.get_submodule(place)
            weight.weight.copy_(low.applied(weight.weight))
        caches = merged.new_kv_cache(40, 16, torch.float32)
        plain = [replace(arrivals[0], request=msgspec.structs.replace(request, adapter=""))]
        theirs, _ = run_workload(Runner(merged, *caches), config, plain, lag=0)
        ((_, one),), ((_, two),) = mine.items(), theirs.items()
        assert one["tokens"] == two["tokens"]
        found, exact = ([each.logprob for each in entry["logprobs"]] for entry in (one, two))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(exact), atol=2e-3, rtol=1e-3)


def test_a_slot_goes_to_the_adapter_that_needs_it(model) -> None:
    config = replace(limits(random.Random(0)), max_model_len=60)
    runner = executor(model, config)
    slots = runner.adapters
    rows = [
        msgspec.structs.replace(row, adapter=name) for row, name in zip(_rows(3), [IDS[0], "", IDS[1]], strict=True)
    ]
    first = slots.place(rows)
    assert first[1] == -1 and sorted(first) == [-1, 0, 1]
    assert slots.place(rows[:1]) == first[:1]  # the other one is now the least recently used
    assert slots.place([msgspec.structs.replace(rows[1], adapter=IDS[2])]) == [first[2]]
    assert slots.place(_rows(2)) is None


def _rows(count: int):
    from transect.engine.scheduling.batch import ScheduledRow

    return [ScheduledRow(number, 0, 1, (1,), [], [0]) for number in range(count)]
