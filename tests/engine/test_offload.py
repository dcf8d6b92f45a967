"""Layers that stream give the tokens of a model that is all there: every family, from host memory and a file."""

import pytest
import torch
from effort import proving, quick_first
from tiny_checkpoints import FAMILIES, make_model
from tiny_llm import save_tiny_llm_text

from transect import LLM, SamplingParams
from transect.costs.memory.serving import smallest_layout
from transect.costs.memory.streaming import plan_stream
from transect.costs.storage import storage_for
from transect.engine import offload
from transect.engine.config import EngineConfig
from transect.engine.executors.gpu.setup import _check_weights, plan_of, without_graphs
from transect.engine.frontends.vllm_arguments import engine_settings
from transect.engine.scheduling.decisions import read_records
from transect.spec.layouts.ranks import RankLayout
from transect.spec.model import ModelConfig

torch.set_num_threads(1)
SETTINGS = {
    "dtype": "float32", "native": False, "num_kv_blocks": 96, "threads": 1, "max_num_seqs": 16, "seed": 11,
    "block_size": 4,
}  # fmt: skip
ALL = 1000.0
ROUNDS = 2 if proving() else 1
SHARED = list(range(20, 34))
PROMPTS = [[5, 6, 7], [*SHARED, 3, 4], [1], [*SHARED, 9, 9, 9], [9] * 33]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=3),
    SamplingParams(seed=3, top_p=0.9, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=1.5, frequency_penalty=0.5, max_tokens=14, ignore_eos=True),
    SamplingParams(seed=5, n=3, top_k=20, max_tokens=10),
    SamplingParams(seed=6, max_tokens=14, prompt_logprobs=1, ignore_eos=True),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("families"), set()

    def find(family):
        if family not in made:
            made.add(family)
            make_model(family, num_hidden_layers=4).save_pretrained(folder / family)
            save_tiny_llm_text(folder / family)
        return str(folder / family)

    return find


def tokens_of(results):
    return [[choice.token_ids for choice in result.outputs] for result in results]


def assert_same(model, rounds=ROUNDS, **changes):
    """The same tokens with and without; in a second round with prefix hits."""
    settings = SETTINGS | changes
    whole = LLM(model, **settings | {"cpu_offload_gb": 0, "offload_folder": None})
    streamed = LLM(model, **settings)
    for _ in range(rounds):
        mine, theirs = (llm.generate(PROMPTS, PARAMS) for llm in (streamed, whole))
        assert tokens_of(mine) == tokens_of(theirs)
    assert mine[0].outputs[0].logprobs == theirs[0].outputs[0].logprobs
    assert streamed.stats() == whole.stats()
    return streamed


@pytest.mark.parametrize(
    "family",
    quick_first([*FAMILIES, "qwen3_moe", "gpt_oss", "dots1"], ["llama", "llama-bias", "qwen3", "gpt2", "gpt_oss"]),
)
def test_every_family_draws_the_same_tokens(checkpoint, family):
    rounds = 2 if proving() or family == "llama" else 1
    llm = assert_same(checkpoint(family), rounds, cpu_offload_gb=ALL)
    assert "4 of 4 layers stream from host memory" in llm.kernels
    assert llm.stats().prefix_hit_tokens > 0 or rounds == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"async_scheduling": True},
        {"async_scheduling": True, "num_kv_blocks": 20, "max_model_len": 64},  # so few that sequences are preempted
        {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
        {"quantization": "int4"},
        {"quantization": "fp8"},
        {"quantization": "int8"},
        {"dtype": "bfloat16"},
    ],
    ids=["ahead", "preempted", "chunks", "int4", "fp8", "int8", "bfloat16"],
)
def test_it_does_not_matter_how_the_engine_runs(checkpoint, settings, tmp_path):
    llm = assert_same(checkpoint("qwen3"), cpu_offload_gb=ALL, offload_folder=str(tmp_path), **settings)
    assert ("num_kv_blocks" in settings) == (llm.stats().preemptions > 0)
    assert f"stream from a file in {tmp_path}" in llm.kernels


def test_requests_that_end_early(checkpoint):
    found = []
    for gib in (0, ALL):
        llm = LLM(checkpoint("smollm2"), **SETTINGS, cpu_offload_gb=gib)
        names = [llm.submit(prompt, SamplingParams(seed=i, max_tokens=30)) for i, prompt in enumerate(PROMPTS)]
        outputs = []
        for step in range(40):
            outputs += [(names.index(each.request_id), each.new_token_ids, each.finish_reason) for each in llm.step()]
            if step == 3:
                llm.abort(names[1])
        found.append(outputs)
        assert llm.stats().kv_blocks_used == 0
    assert found[0] == found[1]


def test_what_every_step_brings_is_in_the_decision_log(checkpoint):
    llm = LLM(checkpoint("llama"), **SETTINGS, cpu_offload_gb=ALL)
    layer = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    (header,) = read_records(llm._core.decisions.header)
    assert header.storage["streamed"] == 4 * layer


def test_a_host_or_a_disk_without_room_is_refused_before_anything_is_read(checkpoint, monkeypatch, tmp_path):
    def read(*_, **__):
        raise AssertionError("weights are read")

    monkeypatch.setattr("transect.checkpoints.load.stored_weights", read)
    monkeypatch.setattr(offload, "free_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"of host memory, and 0\.0 GiB are free: lower cpu_offload_gb"):
        LLM(checkpoint("llama"), **SETTINGS, cpu_offload_gb=ALL)
    full = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(offload.shutil, "disk_usage", lambda folder: full)
    with pytest.raises(ValueError, match=r"0\.0 GiB are free there: lower cpu_offload_gb"):
        LLM(checkpoint("llama"), **SETTINGS, cpu_offload_gb=ALL, offload_folder=str(tmp_path))
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"offload_folder .*nowhere' cannot be used"):
        LLM(checkpoint("llama"), **SETTINGS, cpu_offload_gb=ALL, offload_folder=str(tmp_path / "nowhere"))


def test_ranks_of_one_host_share_its_memory(monkeypatch):
    monkeypatch.setattr(offload, "free_memory", lambda: 1500)
    plan = plan_stream([100.0] * 10, ALL)
    offload.check_room(plan)
    with pytest.raises(ValueError, match="for 2 ranks of host memory"):
        offload.check_room(plan, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpu_offload_gb": -1}, "cpu_offload_gb must be a number of at least 0"),
        ({"cpu_offload_gb": True}, "cpu_offload_gb must be a number of at least 0"),
        ({"cpu_offload_gb": float("nan")}, "cpu_offload_gb must be a number of at least 0"),
        ({"offload_folder": "/tmp"}, "give cpu_offload_gb too"),
        ({"cpu_offload_gb": 1, "native": True}, "leave out cpu_offload_gb"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(model="x", **settings)


def test_vllms_argument():
    assert engine_settings({"cpu_offload_gb": None}) == {}
    assert engine_settings({"cpu_offload_gb": 4}) == {"cpu_offload_gb": 4}


def test_a_gpu_streams_without_graphs_and_says_what_to_stream_if_weights_do_not_fit():
    plan = plan_stream([2.0**30] * 10, 5)
    config = EngineConfig(model="x", cpu_offload_gb=5, gpu_memory_utilization=1.0)
    ops = type("Ops", (), {"chosen": (("paged_attention", "triton"),), "passed_over": ()})
    assert without_graphs(config, ops, plan).cuda_graphs == "off"
    assert without_graphs(config, ops).cuda_graphs == "on"
    gib = 2**30
    _check_weights(config, 40 * gib, 25 * gib, 20 * gib, 20 * gib)
    with pytest.raises(ValueError, match=r"the weights take 40.0 GiB and 20.0 GiB .*cpu_offload_gb=25"):
        _check_weights(config, 40 * gib, 0, 20 * gib, 20 * gib)
    with pytest.raises(ValueError, match=r"over 6 GPUs \(tensor_parallel_size=2, pipeline_parallel_size=3\), or let"):
        _check_weights(config, 40 * gib, 0, 20 * gib, 20 * gib, lambda budget: RankLayout(2, 3 * (budget == 20 * gib)))


def test_a_long_context_that_nobody_asked_for_takes_no_further_gpus():
    """Sixteen GiB of weights; a sequence of all ten million positions would take 1.3 TB more."""
    model, storage = ModelConfig("llama", 128256, 4096, 32, 32, 8, 128, 14336, 10**7), storage_for(2, None)

    def least(**settings):
        plan = plan_of(EngineConfig(model="x", **settings), model, storage, torch.bfloat16)
        return smallest_layout(model, plan, storage, 12 * 2**30)

    assert least() == RankLayout(2)
    asked = least(max_model_len=10**6)
    assert asked is None or asked.size > 8
