"""The engine on a GPU: the same tokens as on the CPU, with graphs and a step ahead; one or two launches a step."""

import random

import pytest
import torch
from gpu_engine import BLOCK, TINY, VOCAB, gpu_model, runner_for, scheduler_config
from runner_fuzz import assert_same, random_arrivals, run_workload

from transect.engine.executors.runner import Runner
from transect.engine.frontends.llm import LLM
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.models.decoder import Decoder
from transect.ops.opset import resolve_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


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


def calls_of(llm, options, steps=20):
    """Calls of CUDA by name, from the profiler, in so many steps of 32 requests that have these options in turn."""
    for index in range(32):
        params = SamplingParams(max_tokens=60, ignore_eos=True, **options[index % len(options)])
        llm.submit([index, 1, 2, 3], params)
    for _ in range(30):
        llm.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            llm.step()
    while llm.has_work:
        llm.step()
    calls = {}
    for event in trace.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CPU:
            calls[event.name()] = calls.get(event.name(), 0) + 1
    return calls


def test_a_steady_step_is_graph_launches_alone_and_waits_for_nothing_but_tokens():
    """One for draws from logits; a second for the draws where any of them need more than those."""
    llm = LLM("qwen3-0.6b", load_format="dummy", max_model_len=1024, max_num_seqs=32, kv_cache_tokens=32768)
    plain = [
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "seed": 3, "top_k": 50, "min_p": 0.01},
        {"temperature": 0.0},
    ]
    more = [
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {5: 1.0}},
    ]
    for options, launches in ((plain, 1), (plain + more, 2)):
        calls = calls_of(llm, options)
        assert calls["cudaGraphLaunch"] == 20 * launches, calls
        assert not any("LaunchKernel" in name for name in calls), calls
        synchronising = {name: count for name, count in calls.items() if "Synchronize" in name}
        # One wait for a step's tokens; a second, for the ring, returns at once. The profiler's own ends the trace.
        assert set(synchronising) <= {"cudaEventSynchronize", "cudaDeviceSynchronize"}, calls
        assert synchronising.get("cudaDeviceSynchronize", 0) <= 2, calls


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
    assert found[0] == found[1]
    assert [len(found[0][name]) for name in sorted(found[0], key=int)] == [1, 2, 7, 30]
