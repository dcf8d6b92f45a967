"""The engine on a GPU: the same tokens as on the CPU, graphs, batch invariance, one launch a step."""

import dataclasses
import random

import pytest
import torch
from runner_fuzz import assert_same, random_arrivals, run_workload

from transect.engine.gpu_build import gpu_ops
from transect.engine.gpu_runner import GPURunner
from transect.engine.llm import LLM
from transect.engine.runner import Runner
from transect.engine.sampling_params import SamplingParams
from transect.engine.scheduler_config import SchedulerConfig
from transect.models.config import ModelConfig
from transect.models.context import PagedContext
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack, join_weights
from transect.models.presets import PRESETS
from transect.ops.opset import resolve_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
VOCAB, BLOCK = 61, 16
TINY = ModelConfig(
    architecture="qwen3",
    vocab_size=VOCAB,
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    ffn_dim=96,
    max_position=128,
    qk_norm=True,
)


def gpu_model(config, dtype, *, deterministic=False, state=None, std=0.3):
    """A model on the GPU, with random weights or those of ``state``."""
    model = Decoder(config, "meta", dtype, ops=gpu_ops(torch.device("cuda"), deterministic=deterministic))
    join_weights(model, "cuda")
    model.requires_grad_(False)
    if state is None:
        model.init_weights(std, torch.Generator("cuda").manual_seed(0))
    else:
        model.load_state_dict(state)
    model.tie_weights()
    model.stack = FusedStack(model, max_positions=config.max_position)
    return model


def runner_for(model, config: SchedulerConfig, *, graphs=True):
    caches = model.new_kv_cache(config.num_blocks + 1, config.block_size, model.norm.weight.dtype)
    for cache in caches:
        cache.zero_()
    return GPURunner(
        model,
        *caches,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        graphs=graphs,
    )


def scheduler_config(rng: random.Random) -> SchedulerConfig:
    seqs = rng.choice([3, 5, 9])
    return SchedulerConfig(
        num_blocks=rng.choice([8, 12, 24]),
        block_size=BLOCK,
        max_num_seqs=seqs,
        max_num_batched_tokens=rng.choice([seqs, 16, 64]),
        max_model_len=100,
        enable_prefix_caching=rng.random() < 0.7,
        seed=1,
    )


@pytest.fixture(scope="module")
def pair():
    """The same weights on the CPU and on the GPU, float32."""
    cpu = Decoder(TINY, dtype=torch.float32, ops=resolve_ops("cpu", batch_invariant=True)).requires_grad_(False)
    cpu.init_weights(0.3, torch.Generator().manual_seed(0))
    return cpu, gpu_model(TINY, torch.float32, state=cpu.state_dict())


@pytest.mark.parametrize("seed", range(8))
def test_same_tokens_as_on_the_cpu(pair, seed):
    """Aborts, preemption, prefix hits and every sampling option; with graphs and a step ahead, or neither."""
    cpu, gpu = pair
    rng = random.Random(seed)
    config = scheduler_config(rng)
    arrivals = random_arrivals(rng, VOCAB, 14)
    caches = cpu.new_kv_cache(config.num_blocks, BLOCK, torch.float32)
    expected, _ = run_workload(Runner(cpu, *caches), config, arrivals, lag=0)
    for lag, graphs in ((0, False), (1, True)):
        found, _ = run_workload(runner_for(gpu, config, graphs=graphs), config, arrivals, lag=lag)
        assert_same(expected, found, arrivals)


@pytest.mark.parametrize("seed", range(3))
def test_deterministic_outputs_equal_those_of_each_request_alone(seed):
    model = gpu_model(TINY, torch.bfloat16, deterministic=True)
    rng = random.Random(100 + seed)
    config = scheduler_config(rng)
    arrivals = random_arrivals(rng, VOCAB, 14)
    together, _ = run_workload(runner_for(model, config), config, arrivals, lag=1)
    alone = {}
    for arrival in arrivals:
        found, _ = run_workload(runner_for(model, config), config, [arrival], lag=1)
        alone.update(found)
    assert_same(alone, together, arrivals)


@torch.inference_mode()
def test_deterministic_logits_have_the_same_bits_in_any_batch_and_chunk():
    """At the widths of an 8B model: alone, in batches, in chunks of 1 to 700, with a prefix that others computed."""
    config = dataclasses.replace(PRESETS["llama-3.1-8b"], n_layers=2, vocab_size=4096, max_position=2048)
    model = gpu_model(config, torch.bfloat16, deterministic=True, std=0.02)
    k_cache, v_cache = model.new_kv_cache(2048, BLOCK, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 4096, (length,), generator=generator).tolist() for length in (700, 65, 1, 333)]

    def logits(rows):
        """Of the last token of each (prompt, first token, last token, blocks)."""
        tokens = torch.tensor([token for prompt, first, last, _ in rows for token in prompt[first:last]], device="cuda")
        starts = torch.tensor([0, *(last - first for _, first, last, _ in rows)], device="cuda")
        starts = starts.cumsum(0, dtype=torch.int32)
        lengths = torch.tensor([last for _, _, last, _ in rows], dtype=torch.int32, device="cuda")
        columns = max(len(blocks) for *_, blocks in rows)
        tables = [[*blocks, *[0] * (columns - len(blocks))] for *_, blocks in rows]
        tables = torch.tensor(tables, dtype=torch.int32, device="cuda")
        context = PagedContext(k_cache, v_cache, tables, starts, lengths, model.ops)
        hidden = model(tokens, context.positions(), context)
        return model.head(hidden[starts[1:].long() - 1])

    def blocks(first, count):
        return list(range(first, first + -(-count // BLOCK)))

    long = prompts[0]
    k_cache.normal_()
    v_cache.normal_()
    alone = logits([(long, 0, 700, blocks(0, 700))])[0]
    for chunk in (1, 2, 17, 64, 129, 300):
        place = blocks(100, 700)
        for first in range(0, 700, chunk):
            part = logits([(long, first, min(first + chunk, 700), place)])
        assert torch.equal(part[0], alone), f"chunks of {chunk}"
    for others in (1, 3, 40, 255):
        rows = [
            (prompts[1 + i % 3], 0, len(prompts[1 + i % 3]), blocks(200 + 21 * (i % 80), 333)) for i in range(others)
        ]
        rows.insert(others // 2, (long, 0, 700, blocks(0, 700)))
        assert torch.equal(logits(rows)[others // 2], alone), f"a batch of {others + 1} prompts"
    logits([(long, 0, 640, blocks(0, 700))])
    for others in (0, 1, 7, 63, 255):  # decode beside decodes, and after a prefix of another request
        rows = [(prompts[1], 64, 65, blocks(60, 65))] * others
        shared = [(long, 699, 700, blocks(0, 700))]
        assert torch.equal(logits([*rows, *shared])[-1], alone), f"decode beside {others} others"
    assert torch.equal(logits([(long, 640, 700, blocks(0, 700)), (prompts[3], 0, 333, blocks(70, 333))])[0], alone)


def test_no_block_is_lost_after_many_requests(pair):
    rng = random.Random(7)
    config = SchedulerConfig(
        num_blocks=60, block_size=BLOCK, max_num_seqs=64, max_num_batched_tokens=256, max_model_len=100, seed=1
    )
    arrivals = random_arrivals(rng, VOCAB, 2000)
    for index, arrival in enumerate(arrivals):
        arrival.step = index // 16
    found, core = run_workload(runner_for(pair[1], config), config, arrivals, lag=1)  # asserts that all came back
    assert len(found) >= 2000 and core.stats().preemptions > 0


def test_a_steady_step_is_one_graph_launch_and_waits_for_nothing_but_tokens():
    """With every sampling option in the batch; read from the profiler's trace."""
    llm = LLM("qwen3-0.6b", load_format="dummy", max_model_len=1024, max_num_seqs=32, kv_cache_tokens=32768)
    options = [
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "seed": 3, "top_k": 50, "min_p": 0.01},
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {5: 1.0}},
    ]
    for index in range(32):
        params = SamplingParams(max_tokens=300, ignore_eos=True, **options[index % 4])
        llm.submit([index, 1, 2, 3], params)
    for _ in range(30):
        llm.step()
    steps = 20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            llm.step()
    calls = {}
    for event in trace.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CPU:
            calls[event.name()] = calls.get(event.name(), 0) + 1
    assert calls["cudaGraphLaunch"] == steps
    assert not any("LaunchKernel" in name for name in calls), calls
    synchronising = {name: count for name, count in calls.items() if "Synchronize" in name}
    # One wait for a step's tokens; a second, for the ring, returns at once. The profiler's own ends the trace.
    assert set(synchronising) <= {"cudaEventSynchronize", "cudaDeviceSynchronize"}
    assert synchronising.get("cudaDeviceSynchronize", 0) <= 2
    while llm.has_work:
        llm.step()


def test_requests_end_exactly_where_they_should_a_step_ahead():
    llm = LLM("qwen3-0.6b", load_format="dummy", max_model_len=512, max_num_seqs=8, kv_cache_tokens=8192)
    reference = LLM(
        "qwen3-0.6b",
        load_format="dummy",
        max_model_len=512,
        max_num_seqs=8,
        kv_cache_tokens=8192,
        async_scheduling=False,
        cuda_graphs="off",
    )
    found = []
    for engine in (llm, reference):
        for number in (1, 2, 7, 30):
            engine.submit([number] * 20, SamplingParams(max_tokens=number, temperature=0.0, ignore_eos=True))
        tokens = {}
        while engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        found.append(tokens)
    assert found[0] == found[1] and [len(tokens) for tokens in found[0].values()] == [1, 2, 7, 30]
