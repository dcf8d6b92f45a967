"""Tensor parallelism gives the tokens of one device: every family, every way in which an engine runs."""

import gc
import itertools
import json
from dataclasses import dataclass

import parallel_jobs
import pytest
import torch
from effort import proving, quick_first
from quantized_files import fp8
from safetensors.torch import load_file, save_file
from tiny_checkpoints import EXPERTS, FAMILIES, make_model, write_gguf
from tiny_llm import save_tiny_llm_text

from transect import LLM, SamplingParams, StructuredOutputsParams
from transect.engine import ranks as engine_ranks
from transect.engine.scheduling.decisions import Done

torch.set_num_threads(1)
SETTINGS = {
    "dtype": "float32", "native": False, "num_kv_blocks": 96, "threads": 1, "max_num_seqs": 16, "seed": 11,
    "block_size": 4, "check_plans": True,
}  # fmt: skip
SHARED = list(range(20, 34))
BRIEF = {"tokens": 14, "rounds": 2} if proving() else {"tokens": 6, "rounds": 1}
ONCE = {"rounds": 2 if proving() else 1}
PROMPTS = [[5, 6, 7], [*SHARED, 3, 4], [1], [*SHARED, 9, 9, 9], [9] * 33]


def params(tokens=14):
    free, few = {"ignore_eos": True, "max_tokens": tokens}, tokens - 5
    return [
        SamplingParams(temperature=0.0, logprobs=3, **free),
        SamplingParams(seed=3, top_p=0.9, **free),
        SamplingParams(temperature=1.5, frequency_penalty=0.5, logit_bias={7: 2.0}, **free),  # the engine's own seed
        SamplingParams(seed=5, n=3, top_k=20, min_p=0.01, max_tokens=tokens - 4),
        SamplingParams(seed=6, n=2, min_tokens=few, max_tokens=tokens, repetition_penalty=1.2, prompt_logprobs=1),
    ]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folders of every family, made when they are asked for."""
    folder, made = tmp_path_factory.mktemp("families"), {}

    def find(family):
        if family not in made:
            wide = family == "wide vocabulary"  # one that has a token for every byte
            model = make_model("llama", vocab_size=300) if wide else make_model(family)
            model.save_pretrained(folder / family)
            save_tiny_llm_text(folder / family)
            made[family] = str(folder / family)
        return made[family]

    return find


def tokens_of(results):
    return [[choice.token_ids for choice in result.outputs] for result in results]


@dataclass
class Alone:
    """What one device made of the requests: tokens of each round, log-probabilities of the last one, counters."""

    tokens: list
    logprobs: list
    stats: object


ALONE: dict[str, Alone] = {}
"""By model and settings: each axis is compared with the same."""


def alone_with(model, tokens, rounds, **settings):
    key = repr((model, tokens, rounds, sorted(settings.items())))
    if key not in ALONE:
        llm = LLM(model, **settings)
        made = [llm.generate(PROMPTS, params(tokens)) for _ in range(rounds)]
        ALONE[key] = Alone([tokens_of(each) for each in made], made[-1][0].outputs[0].logprobs, llm.stats())
    return ALONE[key]


def assert_same(model, ranks, axis="tensor_parallel_size", size=2, tokens=14, rounds=2, **changes):
    """The same requests on one device and on several, a second time with prefix hits; returns what the one made, and
    the engine of the several."""
    settings = SETTINGS | changes
    alone = alone_with(model, tokens, rounds, **settings | {"check_plans": False, "enable_expert_parallel": False})
    spread = LLM(model, ranks=ranks, **{axis: size}, **settings)
    try:
        for mine in alone.tokens:
            theirs = spread.generate(PROMPTS, params(tokens))
            assert mine == tokens_of(theirs)
        for a, b in zip(alone.logprobs, theirs[0].outputs[0].logprobs, strict=True):
            assert list(a) == list(b)
            assert [v.logprob for v in a.values()] == pytest.approx([v.logprob for v in b.values()], abs=1e-4)
        spent = [each.ranks for each in spread.decisions.records() if isinstance(each, Done)]
        assert sum(spent) > 0 and min(spent) >= 0, "the log says how long ranks waited for one another"
        stats = alone.stats, spread.stats()
        if axis == "tensor_parallel_size":
            assert stats[0] == stats[1]
        assert stats[1].prefix_hit_tokens > 0 or rounds == 1 or not settings.get("enable_prefix_caching", True)
        return alone, spread
    finally:
        spread.close()
        gc.collect()


@pytest.mark.parametrize(
    "family", quick_first([*FAMILIES, *EXPERTS], ["llama", "llama-bias", "qwen3", "gpt2", "qwen2_moe", "gpt_oss"])
)
def test_every_family_draws_the_same_tokens(checkpoints, pair, family):
    assert_same(checkpoints(family), pair, **BRIEF if family != "llama" else {})


@pytest.mark.parametrize(
    "settings",
    [
        {"async_scheduling": True},
        {"async_scheduling": True, "num_kv_blocks": 20, "max_model_len": 64},  # so few that sequences are preempted
        {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
    ],
    ids=["ahead", "preempted", "chunks"],
)
def test_it_does_not_matter_how_the_engine_runs(checkpoints, pair, settings):
    _, spread = assert_same(checkpoints("qwen3"), pair, **ONCE, **settings)
    assert ("num_kv_blocks" in settings) == (spread.stats().preemptions > 0)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """Wide enough that each rank's columns are whole blocks."""
    folder = tmp_path_factory.mktemp("gguf")
    wide = make_model("llama", vocab_size=300, intermediate_size=128)
    return str(write_gguf(folder / "wide.gguf", wide, "Q8_0"))


@pytest.mark.parametrize(
    "settings",
    [{"native": True}, {"native": False}, {"native": True, "dtype": "auto"}],
    ids=["packed", "plain", "bfloat16-cache"],
)
def test_blocks_of_a_file_stay_packed(quantized, checkpoints, pair, settings):
    _, spread = assert_same(quantized, pair, block_size=16, tokenizer=checkpoints("llama"), **ONCE, **settings)
    assert ("C++ kernels" in spread.kernels) == settings["native"]


def test_8_bits_over_ranks_are_for_the_c_kernels(pair, tmp_path):
    """Plain torch would round them to 4. A KV cache in fp8 is for those of one rank."""
    make_model("llama", hidden_size=64, head_dim=64, intermediate_size=256).save_pretrained(tmp_path)
    save_tiny_llm_text(tmp_path)
    how = {"ranks": pair, "tensor_parallel_size": 2, **SETTINGS, "quantization": "fp8", "block_size": 16}
    with pytest.raises(ValueError, match=r"fp8 over several ranks on a CPU is for the C\+\+ kernels"):
        LLM(str(tmp_path), **how | {"native": False})
    with pytest.raises(ValueError, match=r"native=True, but .* no KV cache in fp8 where ranks share a model"):
        LLM(str(tmp_path), **how | {"native": True, "kv_cache_dtype": "fp8"})
    llm = LLM(str(tmp_path), **how | {"native": True})
    assert "the layers' weights in fp8" in llm.kernels and llm.generate(PROMPTS[:1])[0].outputs[0].token_ids
    llm.close()


def test_blocks_of_fp8_that_ranks_part_become_numbers(pair, tmp_path):
    """Each rank has 96 of 192 rows, and scales are of 128 rows by 128 columns."""
    make_model("llama", hidden_size=64, head_dim=64, intermediate_size=192).save_pretrained(tmp_path)
    save_tiny_llm_text(tmp_path)
    made = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        parts = fp8(weight.float(), 128, 128, "weight_scale_inv")[1] if "_proj" in name else {"weight": weight}
        made |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    save_file(made, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same(str(tmp_path), pair, native=True, block_size=16, **ONCE)


@pytest.mark.parametrize("native", [True, False])
def test_weights_rounded_to_4_bits(pair, tmp_path, native):
    make_model("llama", hidden_size=64, head_dim=64, intermediate_size=256).save_pretrained(tmp_path)
    save_tiny_llm_text(tmp_path)
    assert_same(str(tmp_path), pair, quantization="int4", native=native, block_size=16, **ONCE)


def test_blocks_that_would_be_parted_are_refused(pair, tmp_path):
    path = write_gguf(tmp_path / "narrow.gguf", make_model("llama"), "Q8_0")  # down has 96 columns in blocks of 32
    with pytest.raises(ValueError, match="packs 32 numbers of a row together"):
        LLM(str(path), ranks=pair, tensor_parallel_size=2, **SETTINGS)
    make_model("llama", intermediate_size=192).save_pretrained(tmp_path / "hf")
    with pytest.raises(ValueError, match="rounds groups of 128 numbers"):
        LLM(
            str(tmp_path / "hf"),
            ranks=pair,
            tensor_parallel_size=2,
            **SETTINGS | {"quantization": "int4", "native": True, "block_size": 16},
        )


class Started:
    """Ranks as if an engine had started them for itself; the processes are needed by later tests."""

    def __init__(self, pair):
        self.pair, self.asked, self.core, self.closed = pair, None, None, 0

    def start(self, *asked):
        self.asked = asked
        return self

    def __getattr__(self, name):
        return getattr(self.pair, name)

    def close(self):
        self.closed += 1
        self.core.release()


def test_an_engine_starts_the_ranks_it_needs_and_ends_them(checkpoints, pair, monkeypatch):
    own = Started(pair)
    monkeypatch.setattr(engine_ranks.Ranks, "start", own.start)
    llm = LLM(checkpoints("smollm2"), tensor_parallel_size=2, **SETTINGS)
    own.core = llm._core
    assert own.asked == (2, "cpu", 0, None) and not own.closed
    assert len(llm.generate([[5, 6]], params()[0])[0].outputs[0].token_ids) == 14
    llm.close()
    llm.close()
    assert own.closed == 1
    with pytest.raises(ValueError, match="this engine was closed"):
        llm.generate([[5, 6]], params()[0])


def test_answers_under_a_grammar_and_requests_that_end_early(checkpoints, pair):
    made = []
    for size in (1, 2):
        llm = LLM(checkpoints("smollm2"), ranks=pair if size > 1 else None, tensor_parallel_size=size, **SETTINGS)
        wanted = StructuredOutputsParams(regex="[a-f]{3,9}")
        constrained = SamplingParams(seed=1, max_tokens=12, structured_outputs=wanted)
        names = [llm.submit(prompt, SamplingParams(seed=i, max_tokens=30)) for i, prompt in enumerate(PROMPTS)]
        outputs = [*llm.step(), *llm.step(), *llm.step()]
        llm.abort(names[1])
        llm.abort(names[4])
        llm.reset_prefix_cache()
        while llm.has_work:
            outputs += llm.step()
        made.append(([(o.request_id, o.new_token_ids, o.finish_reason) for o in outputs], llm.stats()))
        made[-1] += (tokens_of(llm.generate([[5, 6]], constrained)),)
        llm.close()
    assert made[0] == made[1]
    with pytest.raises(ValueError, match="was closed, and its other ranks have ended: create another LLM"):
        llm.generate([[5, 6]], constrained)


def test_a_model_that_cannot_be_cut(checkpoints):
    with pytest.raises(ValueError, match=r"4 query heads, 2 key heads and 96 .*tensor_parallel_size can be 1, 2, 4"):
        LLM(checkpoints("llama"), tensor_parallel_size=3, **SETTINGS)
    with pytest.raises(ValueError, match="tensor_parallel_size must be a whole number of at least 1, not 0"):
        LLM(checkpoints("llama"), tensor_parallel_size=0)


def test_steps_that_are_sized_by_time(checkpoints, pair):
    """Rank 0 alone measures; the ranks compare every plan."""
    llm = LLM(checkpoints("qwen3"), ranks=pair, tensor_parallel_size=2, mixed_step_limit="2ms", **SETTINGS)
    long = [[i + 3] * 40 for i in range(12 if proving() else 4)]
    llm.generate([*PROMPTS, *long], SamplingParams(max_tokens=30, ignore_eos=True))
    assert llm.stats().timed_steps > 20
    llm.close()


@pytest.mark.parametrize(
    ("family", "axis"),
    quick_first(
        itertools.product(EXPERTS, ["data_parallel_size", "tensor_parallel_size"]),
        [
            *((family, "data_parallel_size") for family in ("qwen3_moe", "dots1", "gpt_oss")),
            ("gpt_oss", "tensor_parallel_size"),
        ],
    ),
)
def test_shared_experts_draw_the_same_tokens(checkpoints, pair, family, axis):
    """Each rank has half of the experts; along the data axis also half of the requests."""
    brief = BRIEF if family != "qwen3_moe" else {}
    _, spread = assert_same(checkpoints(family), pair, axis, enable_expert_parallel=True, **brief)
    if axis == "data_parallel_size":
        fewest = 5 if brief and not proving() else 50
        assert all(group.generation_tokens > fewest for group in (spread._core.scheduler.stats(), *spread._core._stats))


@pytest.mark.parametrize(
    "settings",
    [
        {"async_scheduling": True, "num_kv_blocks": 20, "max_model_len": 64},
        pytest.param({"async_scheduling": True}, marks=pytest.mark.prove),
        pytest.param({"max_num_batched_tokens": 16, "enable_prefix_caching": False}, marks=pytest.mark.prove),
    ],
    ids=["preempted", "ahead", "chunks"],
)
def test_ranks_with_requests_of_their_own_in_other_engines(checkpoints, pair, settings):
    alone, _ = assert_same(
        checkpoints("qwen3_moe"), pair, "data_parallel_size", enable_expert_parallel=True, **ONCE, **settings
    )
    assert ("num_kv_blocks" in settings) == (alone.stats.preemptions > 0)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("gpt_oss", {"check_plans": False}),
        ("qwen3", {"async_scheduling": True, "num_kv_blocks": 20, "max_model_len": 64}),
    ],
    ids=["dense", "mixture", "preempted"],
)
def test_an_engine_of_two_whole_models(checkpoints, pair, family, settings):
    """Each rank has all weights and half of the requests."""
    brief = BRIEF if family != "qwen3" else ONCE
    _, spread = assert_same(checkpoints(family), pair, "data_parallel_size", **brief, **settings)
    assert all(group.generation_tokens > 5 for group in (spread._core.scheduler.stats(), *spread._core._stats))


@pytest.mark.parametrize(
    ("family", "axis", "experts"),
    [
        ("qwen2_moe", "tensor_parallel_size", True),
        ("qwen2_moe", "data_parallel_size", True),
        ("qwen2", "data_parallel_size", False),
    ],
)
def test_sharing_ranks_among_requests_that_end_early(checkpoints, pair, family, axis, experts):
    """Fewer requests than ranks, aborts, a prompt that cannot be, a name that is taken, a forgotten cache."""
    made = []
    for size in (1, 2):
        how = {} if size == 1 else {axis: 2, "enable_expert_parallel": experts}
        llm = LLM(checkpoints(family), ranks=pair if size > 1 else None, **how, **SETTINGS)
        one = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=6, temperature=0))  # the other rank is idle
        with pytest.raises(ValueError, match="context length"):
            llm.submit([1] * 500, SamplingParams(max_tokens=2))
        free = {"max_tokens": 30, "ignore_eos": True}
        names = [llm.submit(prompt, SamplingParams(seed=i, **free)) for i, prompt in enumerate(PROMPTS)]
        found = {name: [] for name in names}
        for turn in range(100):
            if turn == 3:
                llm.abort(names[1])
                llm.abort(names[4])
                llm.reset_prefix_cache()
            for output in llm.step():
                found[output.request_id] += output.new_token_ids
            if not llm.has_work:
                break
        assert not llm.has_work and llm.stats().running == llm.stats().waiting == 0
        assert llm.stats().finished["abort"] == 2
        made.append((tokens_of(one), [found[names[i]] for i in (0, 2, 3)]))
        llm.close()
    assert made[0] == made[1]


def test_layouts_that_cannot_share_experts(checkpoints):
    wrong = [
        ("llama", {"tensor_parallel_size": 2}, "llama model has no experts"),
        ("mixtral", {"data_parallel_size": 3}, r"3 ranks cannot share 4 experts evenly.*data_parallel_size be 2"),
        ("mixtral", {}, "there is one such rank"),
    ]
    for family, sizes, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            LLM(checkpoints(family), enable_expert_parallel=True, **sizes, **SETTINGS)


@pytest.mark.parametrize(
    "family", quick_first([*FAMILIES, "dots1", "gpt_oss"], ["llama", "qwen3", "gpt2", "dots1", "gpt_oss"])
)
def test_pipeline_stages_draw_the_same_tokens(checkpoints, pair, family):
    assert_same(checkpoints(family), pair, "pipeline_parallel_size", **BRIEF if family != "llama" else {})


@pytest.mark.parametrize(
    "settings",
    [{"num_kv_blocks": 20, "max_model_len": 64}, {"max_num_batched_tokens": 16}, {"native": True, "block_size": 16}],
    ids=["preempted", "chunks", "packed"],
)
def test_a_pipeline_in_other_engines(quantized, checkpoints, pair, settings):
    model = quantized if "native" in settings else checkpoints("qwen3")
    tokenizer = {"tokenizer": checkpoints("llama")} if "native" in settings else {}
    _, spread = assert_same(model, pair, "pipeline_parallel_size", **tokenizer, **ONCE, **settings)
    assert ("num_kv_blocks" in settings) == (spread.stats().preemptions > 0)
    assert spread._core.lag == 1


def test_deterministic_stages_give_the_same_bits_in_any_steps(quantized, checkpoints, pair):
    """A prompt in one step, and with its last tokens one by one: torch multiplies one query otherwise than many."""
    settings = SETTINGS | {"native": True, "dtype": "auto", "block_size": 16, "tokenizer": checkpoints("llama")}
    settings |= {"deterministic": True, "enable_prefix_caching": False, "max_num_seqs": 2}
    prompt = list(range(20, 110))
    asked = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=0)

    def bits(tokens):
        llm = LLM(quantized, ranks=pair, pipeline_parallel_size=2, max_num_batched_tokens=tokens, **settings)
        try:
            (found,) = llm.generate([prompt], asked)
        finally:
            llm.close()
        return found.prompt_logprobs[1:], found.outputs[0].logprobs

    assert bits(128) == bits(89) == bits(4)


@pytest.mark.parametrize(
    ("family", "quantization"), [("qwen3", None), ("qwen2", None), ("gpt_oss", None), ("wide", "int4")]
)
def test_the_executor_for_gpus_on_ranks(checkpoints, pair, tmp_path, family, quantization):
    """With its fused stack, and sampling as on the device, on CPU tensors and ahead of its tokens."""
    if family == "wide":
        make_model("llama", head_dim=64, intermediate_size=256).save_pretrained(tmp_path)
    given = (str(tmp_path) if family == "wide" else checkpoints(family), quantization, PROMPTS)
    pair.call("parallel_jobs:gpu_tokens", given)
    spread = parallel_jobs.gpu_tokens(pair.world, given)
    assert spread == parallel_jobs.gpu_tokens(parallel_jobs.Alone(), given)
    assert all(len(tokens) == 10 or tokens[-1] == 2 for tokens in spread.values()) and len(spread) == len(PROMPTS)


@pytest.mark.parametrize(
    ("family", "axis"),
    [("qwen3", "pipeline"), ("qwen3_moe", "pipeline"), ("qwen3_moe", "tensor"), ("gpt_oss", "data")],
)
def test_the_executors_for_stages_and_shared_experts(checkpoints, pair, family, axis):
    """Those for GPUs, on CPU tensors: each stage plans for itself and hands hidden states on; ranks that share experts
    run their own requests, and take part in steps of the others."""
    given = (checkpoints(family), None, PROMPTS, axis)
    pair.call("parallel_jobs:gpu_tokens", given)
    spread = parallel_jobs.gpu_tokens(pair.world, given)
    alone = parallel_jobs.gpu_tokens(parallel_jobs.Alone(), given[:3])
    assert spread == {name: tokens for name, tokens in alone.items() if name in spread}
    assert len(spread) == (len(PROMPTS) if axis != "data" else 3)


@pytest.mark.parametrize("axis", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_tokens_that_a_grammar_forces(checkpoints, pair, axis):
    """They are computed together, on every rank."""
    wanted = StructuredOutputsParams(regex="the answer is [a-f]{3,9}, and that is all")
    params = [SamplingParams(max_tokens=45, seed=i, structured_outputs=wanted) for i in range(2)]
    found = []
    for sizes in ({}, {axis: 2}):
        llm = LLM(checkpoints("wide vocabulary"), ranks=pair if sizes else None, **sizes, **SETTINGS)
        found.append(tokens_of(llm.generate([[5, 6], [7] * 9], params)))
        llm.close()
    assert found[0] == found[1] and len(found[0][0][0]) > 30
