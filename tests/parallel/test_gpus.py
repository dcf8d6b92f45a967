"""Tensor parallelism on two GPUs: logits within bfloat16's rounding of one GPU's, bitwise repeatable where that is
asked for, in CUDA graphs; and the end of a rank."""

import gc
import os
import subprocess
import sys
import textwrap

import parallel_jobs
import pytest
import torch
from transformers import LlamaConfig

from transect import LLM, SamplingParams
from transect.bench import scaling
from transect.engine.executors.gpu.options import GPUOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
}
PROMPTS = [[5, 6, 7], list(range(20, 90)), [9] * 33, [1, 2]]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    for name, sizes in SIZES.items():
        shape = LlamaConfig(
            vocab_size=1024, num_hidden_layers=2, max_position_embeddings=2048, tie_word_embeddings=False, **sizes
        )
        shape.save_pretrained(folder / name)
    return folder


def run(model, ranks=None, prompts=PROMPTS, **settings):
    """Logprobs of prompts and of drawn tokens, and the tokens."""
    many = {} if ranks is None else {"ranks": ranks, "tensor_parallel_size": 2}
    llm = LLM(
        str(model), load_format="dummy", dtype="bfloat16", max_num_seqs=16, max_model_len=512,
        num_kv_blocks=512, seed=3, **many, **settings,
    )  # fmt: skip
    try:
        params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs=1, ignore_eos=True)
        return [read(result) for result in llm.generate(prompts, params)]
    finally:
        llm.close()
        del llm
        gc.collect()
        torch.cuda.empty_cache()


def read(result):
    choice = result.outputs[0]
    of_prompt = [
        entry[token].logprob
        for entry, token in zip(result.prompt_logprobs[1:], result.prompt_token_ids[1:], strict=True)
    ]
    drawn = [entry[token].logprob for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)]
    return of_prompt, drawn, list(choice.token_ids)


@pytest.mark.parametrize("size", SIZES)
def test_logits_are_those_of_one_gpu(gpus, shapes, size):
    alone, two = run(shapes / size), run(shapes / size, gpus)
    for (prompt_a, drawn_a, tokens_a), (prompt_b, drawn_b, tokens_b) in zip(alone, two, strict=True):
        assert prompt_b == pytest.approx(prompt_a, abs=0.06)
        same = next((i for i, (a, b) in enumerate(zip(tokens_a, tokens_b, strict=True)) if a != b), len(tokens_a))
        assert drawn_b[:same] == pytest.approx(drawn_a[:same], abs=0.06)
        if same < len(tokens_a):  # a close call went another way
            assert drawn_b[same] == pytest.approx(drawn_a[same], abs=0.1)
    assert any(a[2] == b[2] for a, b in zip(alone, two, strict=True))


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_deterministic_mode_does_not_see_the_batch(gpus, shapes, graphs):
    settings = {"deterministic": True, "cuda_graphs": graphs, "enable_prefix_caching": False}
    together = run(shapes / "8B", gpus, PROMPTS, **settings)
    assert [run(shapes / "8B", gpus, [prompt], **settings)[0] for prompt in PROMPTS[:2]] == together[:2]


def test_sums_in_a_graph_take_time(gpus):
    sizes = (8 << 10, 1 << 20)
    gpus.call(scaling.JOB, sizes)
    found = scaling.sum_times(gpus.world, sizes)
    assert list(found.library) == list(sizes) and all(seconds > 0 for seconds in found.library.values())
    assert 8 << 10 in found.own, found.said


def test_own_sums_are_right_whoever_is_late(gpus):
    gpus.call("parallel_jobs:own_sums", None)
    assert parallel_jobs.own_sums(gpus.world, None) == [0, 0]


def test_draws_from_logits_on_both_are_those_from_whole_rows(gpus):
    gpus.call("parallel_jobs:spread_draws", None)
    assert parallel_jobs.spread_draws(gpus.world, None) == [0, 0]


def test_draws_on_the_device_are_those_of_the_host(gpus, shapes):
    """The host draws from gathered logits."""
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, seed=4, **narrowed)
        for narrowed in ({"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.02, "temperature": 1.4})
    ]
    found = []
    for on in (True, False):
        llm = LLM(
            str(shapes / "tiny"), load_format="dummy", dtype="float32", max_num_seqs=16, max_model_len=512,
            num_kv_blocks=512, seed=3, ranks=gpus, tensor_parallel_size=2, gpu=GPUOptions(device_sampling=on),
        )  # fmt: skip
        results = llm.generate([[5, 6, 7 + i] for i in range(len(params))], params, use_tqdm=False)
        found.append([list(result.outputs[0].token_ids) for result in results])
        llm.close()
    assert found[0] == found[1]


KILLED = """
    import os, signal, sys, threading, time
    from transect import LLM, SamplingParams
    from transect.parallel.children import RankFailure
    from transect.parallel.launch import Ranks

    ranks = Ranks.start(2, "cuda")
    llm = LLM(sys.argv[1], load_format="dummy", dtype="bfloat16", max_num_seqs=16, max_model_len=2048,
              num_kv_blocks=2048, seed=3, ranks=ranks, tensor_parallel_size=2)
    threading.Timer(float(sys.argv[2]), os.kill, (ranks.pids[1], signal.SIGKILL)).start()
    try:
        while True:
            llm.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=500, ignore_eos=True), use_tqdm=False)
    except RankFailure as error:
        print("ENDED", error, flush=True)
    ranks.close()
    print("CLOSED", flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("after", [0.05, 0.6])
def test_the_end_of_a_rank_ends_the_engine(shapes, after):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(shapes / "8B"), str(after)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert "ENDED" in done.stdout and "rank 1" in done.stdout and "CLOSED" in done.stdout, done.stderr[-3000:]
