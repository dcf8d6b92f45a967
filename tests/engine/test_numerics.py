"""Fingerprints: equal for equal weights and settings, another where one of them changes."""

import shutil

import pytest
import torch
from effort import quick_first
from peft_models import make_adapter
from tiny_checkpoints import make_model, write_gguf
from tiny_llm import save_tiny_llm

from transect import SamplingParams
from transect.checkpoints.resolve import resolve
from transect.engine.build import build_engine
from transect.engine.config import EngineConfig
from transect.engine.numerics import Numerics, numerics_of, weights_digest
from transect.engine.scheduling.request import Request


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(folder)
    return folder


def found(folder, exact=True, **settings):
    config = EngineConfig(model=str(folder), **settings)
    return numerics_of(config, resolve(str(folder)), torch.device("cpu"), "torch", exact)


def test_a_copy_has_the_same_fingerprint_and_promises_the_same(tiny, tmp_path):
    copy = shutil.copytree(tiny, tmp_path / "copy")
    one, other = found(tiny), found(copy, max_num_seqs=3)
    assert one == other and one.fingerprint == other.fingerprint and one.promises(other)
    assert not found(copy, exact=False).promises(one) and not one.promises(found(copy, exact=False))


@pytest.mark.parametrize("changed", [{"block_size": 32}, {"dtype": "float32"}, {"kv_cache_dtype": "fp8"}])
def test_a_setting_that_changes_bits_changes_the_fingerprint(tiny, changed):
    one, other = found(tiny), found(tiny, **changed)
    assert one.differences(other) == list(changed) and not one.promises(other)
    assert one.fingerprint != other.fingerprint


def test_one_byte_of_the_weights_is_seen(tiny, tmp_path):
    copy = shutil.copytree(tiny, tmp_path / "copy")
    file = copy / "model.safetensors"
    body = bytearray(file.read_bytes())
    body[len(body) // 2 // 4096 * 4096] ^= 1
    file.write_bytes(body)
    config = EngineConfig(model=str(tiny))
    assert weights_digest(config, resolve(str(copy))) != weights_digest(config, resolve(str(tiny)))
    random = EngineConfig(model=str(tiny), load_format="dummy", seed=3)
    other = EngineConfig(model=str(tiny), load_format="dummy", seed=4)
    assert weights_digest(random, resolve(str(tiny))) != weights_digest(other, resolve(str(tiny)))


def test_differences_are_named():
    one, other = Numerics({"a": "1", "b": "2"}, True), Numerics({"a": "1", "c": "2"}, True)
    assert one.differences(other) == ["b", "c"]


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory):
    """By name: a model whose layers the C++ kernels have, one in blocks whose layers they lack, and an adapter."""
    folder = tmp_path_factory.mktemp("models")
    blocks = write_gguf(folder / "blocks.gguf", make_model("gemma3_text"), "Q8_0")
    make_adapter(tiny, folder / "adapter")
    return {"layers": str(tiny), "products": str(blocks), "adapter": str(folder / "adapter")}


PATHS = {
    "C++ layers": ("layers", {}, True),
    "C++ layers, float32": ("layers", {"dtype": "float32"}, True),
    "C++ layers, bfloat16": ("layers", {"dtype": "bfloat16"}, True),
    "C++ layers, int8": ("layers", {"quantization": "int8"}, True),
    "C++ products": ("products", {}, False),
    "C++ products, float32": ("products", {"dtype": "float32"}, True),
    "C++ products, deterministic": ("products", {"deterministic": True}, True),
    "torch": ("layers", {"native": False}, False),
    "torch, float32": ("layers", {"native": False, "dtype": "float32"}, True),
    "torch, deterministic": ("layers", {"native": False, "deterministic": True}, True),
    "torch, blocks, deterministic": ("products", {"native": False, "deterministic": True}, True),
    "torch, int8": ("layers", {"native": False, "quantization": "int8", "dtype": "float32"}, False),
    "torch, int4 and int8 caches, deterministic": (
        "layers",
        {"native": False, "quantization": "int4", "kv_cache_dtype": "int8", "deterministic": True},
        True,
    ),
    "torch, fp8 and fp8 caches, deterministic": (
        "layers",
        {"native": False, "quantization": "fp8", "kv_cache_dtype": "fp8", "deterministic": True},
        True,
    ),
    "an adapter beside int8": ("adapter", {"quantization": "int8"}, True),
    "an adapter beside int8, float32": ("adapter", {"quantization": "int8", "dtype": "float32"}, True),
    "an adapter in the weights": ("adapter", {}, True),
}
"""Model, settings, and if bits are promised, of every path on a CPU."""
COMMON = {"device": "cpu", "threads": 2, "max_model_len": 128, "kv_cache_tokens": 2048}


@pytest.mark.parametrize("path", PATHS)
def test_every_path_on_a_cpu_says_if_it_promises_bits(models, path):
    name, settings, exact = PATHS[path]
    built = build_engine(EngineConfig(model=models[name], **settings, **COMMON))
    assert built.numerics.exact == exact
    assert built.numerics.parts["kernels"].startswith(path.partition(",")[0]) or name == "adapter"


QUICK = (
    "C++ layers",
    "C++ layers, bfloat16",
    "C++ layers, int8",
    "C++ products, deterministic",
    "torch, deterministic",
)


@pytest.mark.parametrize("path", quick_first([path for path, (_, _, exact) in PATHS.items() if exact], QUICK))
def test_promised_bits_do_not_depend_on_the_batch_nor_on_chunks(models, path):
    name, settings, _ = PATHS[path]
    alone = answers(models[name], PROMPTS, together=False, **settings)
    assert alone == answers(models[name], PROMPTS, max_num_batched_tokens=24, max_num_seqs=5, **settings)


PROMPTS = [tuple(5 + 7 * i % 50 + j % 9 for j in range(length)) for i, length in enumerate((3, 40, 17, 71, 1, 28, 33))]


def answers(model, prompts, together=True, **settings):
    """Tokens and log-probabilities by prompt; if not ``together``, each prompt begins when the one before has ended.
    No two prompts begin with the same token, so none finds another's blocks."""
    core = build_engine(EngineConfig(model=model, **settings, **COMMON)).core
    params = SamplingParams(max_tokens=12, seed=1, logprobs=3, ignore_eos=True)
    found = {}
    for group in [prompts] if together else [[prompt] for prompt in prompts]:
        for prompt in group:
            core.add(Request(str(prompt), prompt, params, eos_token_ids=()))
        while core.has_work:
            for output in core.step():
                found.setdefault(output.request_id, []).extend(zip(output.new_token_ids, output.logprobs, strict=True))
    assert all(len(tokens) == 12 for tokens in found.values())
    return found
