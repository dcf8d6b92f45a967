"""An EAGLE-3 head drafts: the answers are those without, and what the head reads and draws is what it should be."""

import json
from pathlib import Path

import pytest
import torch
from drafted_answers import SETTINGS, answers
from eagle_heads import DRAFTED, save_random_head
from naive_head import naive_drafts
from safetensors.torch import load_file, save_file
from tiny_llm import VOCAB, save_tiny_llm

from transect import LLM, SamplingParams
from transect.checkpoints.eagle import load_head, resolve_head
from transect.checkpoints.resolve import resolve
from transect.engine.executors.gpu.head_runner import GPUHeadRunner
from transect.ops.opset import resolve_ops


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Directories of a model of five layers, and of a head for it with random weights."""
    large, head = tmp_path_factory.mktemp("large"), tmp_path_factory.mktemp("head")
    save_tiny_llm(large, num_hidden_layers=5)
    save_random_head(large, head, (1, 2, 4))
    return str(large), str(head)


def drafting(head: str, **settings):
    return {"method": "eagle3", "model": head, "num_speculative_tokens": 4, **settings}


@pytest.mark.parametrize(("native", "lag"), [(False, True), (None, False)], ids=["torch, lag 1", "C++, lag 0"])
def test_answers_are_the_same(pair, native, lag):
    large, head = pair
    plain = answers(LLM(large, async_scheduling=lag, native=native, **SETTINGS))
    for adaptive in (False, True):
        spec = drafting(head, adaptive=adaptive)
        llm = LLM(large, async_scheduling=lag, native=native, speculative_config=spec, **SETTINGS)
        assert answers(llm) == plain
        assert llm.stats().drafted_tokens > 0


def test_an_engine_for_one_sequence_drafts(pair):
    """A step verifies more rows than the engine has sequences."""
    large, head = pair
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=4, ignore_eos=True)
    settings = SETTINGS | {"max_num_seqs": 1, "enable_prefix_caching": False}
    plain = LLM(large, **settings).generate("abcabc", params)[0].outputs[0].token_ids
    for spec in (drafting(head, adaptive=False), {"method": "ngram", "prompt_lookup_min": 1}):
        llm = LLM(large, speculative_config=spec, **settings)
        assert llm.generate("abcabc", params)[0].outputs[0].token_ids == plain
        assert llm.stats().drafted_tokens > 0


@pytest.mark.parametrize("native", [False, None], ids=["torch", "C++"])
def test_drafts_are_those_of_the_formulas(pair, native):
    """Also in chunks, after steps with wrong drafts, and where the prompt comes from the prefix cache."""
    large, head = pair
    settings = SETTINGS | {"max_num_batched_tokens": 24}
    llm = LLM(large, native=native, speculative_config=drafting(head, adaptive=False), **settings)
    model, seen = llm._core.scheduler.speculation.model, []
    draft = model.draft

    def record(wanted):
        wanted = list(wanted)
        known = {seq.seq_id: [*seq.prompt_token_ids, *seq.output_token_ids] for seq, _ in wanted}
        found = draft(wanted)
        seen.extend((known[seq_id], tokens) for seq_id, tokens in found.items())
        return found

    model.draft = record
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    for prompts in (["x" * 40, "abcabc"], ["x" * 40 + "yz"]):
        llm.generate(prompts, params)
    llm.generate("q" * 21, SamplingParams(max_tokens=9, n=2, temperature=0.0, ignore_eos=True))
    assert len(seen) > 12
    for known, tokens in seen:
        assert list(tokens) == naive_drafts(large, head, known, len(tokens))


def test_the_gpu_runner_of_a_head_drafts_the_same(pair):
    """On CPU tensors, without graphs: padding, device-side inputs and draws at the position after the next."""
    large, head = pair
    llm = LLM(large, native=False, speculative_config=drafting(head, adaptive=False), **SETTINGS)
    model = llm._core.scheduler.speculation.model
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=4, ignore_eos=True)
    prompts = ["abcabcab", "q", "x" * 50, "Hello"]
    drafts = []
    for turn in range(2):
        seen, draft = [], model.draft
        model.draft = lambda wanted, draft=draft, seen=seen: seen.append(draft(wanted)) or seen[-1]
        llm.generate(prompts, params)
        model.draft = draft
        drafts.append([list(found.values()) for found in seen])
        if turn == 0:
            llm.reset_prefix_cache()
            with_padding(model, llm._core)
    assert drafts[0] == drafts[1]
    assert sum(len(each) for each in drafts[0]) > 20


def with_padding(model, core):
    """Put a GPU runner in the place of the CPU's, with a block more for padding."""
    cpu, size = model.executor, SETTINGS["num_kv_blocks"] + 1
    head = cpu._model
    head.features.allocate(size, 16, head.config.dim, torch.float32, torch.device("cpu"))
    caches = head.new_kv_cache(size, 16, torch.float32)
    limits = {"max_num_seqs": 24, "max_num_batched_tokens": 2048, "max_model_len": 256}
    model.executor = GPUHeadRunner(head, *caches, **limits)


def test_heads_of_other_models_are_refused_by_name(pair, tmp_path):
    large, head = pair

    def changed(name, config=None, **tensors):
        directory = tmp_path / name
        directory.mkdir()
        values = json.loads(Path(head, "config.json").read_text()) | (config or {})
        (directory / "config.json").write_text(json.dumps(values))
        found = load_file(f"{head}/model.safetensors") | tensors
        save_file({key: value for key, value in found.items() if value is not None}, directory / "model.safetensors")
        return str(directory)

    layers = "eagle_aux_hidden_state_layer_ids"
    cases = {
        "reads hidden states of 32 numbers": changed("width", {"target_hidden_size": 32}),
        "a vocabulary of 999 tokens": changed("vocabulary", {"vocab_size": 999}),
        "no tensor d2t": changed("places", d2t=None),
        "d2t names tokens outside": changed("outside", d2t=torch.full((DRAFTED,), VOCAB)),
        "layers 1 to 4 between": changed("layers", {"eagle_config": {}, layers: [1, 2, 5]}),
        r"fc.weight has shape \[64, 192\]": changed("two", {"eagle_config": {}, layers: [1, 2]}),
        "lacks the tensor norm.weight": changed("lacks", **{"norm.weight": None}),
        "without a use here: more": changed("more", more=torch.zeros(1)),
        "this config.json is of LlamaForCausalLM": large,
        "nor a hub id": str(tmp_path / "nothing"),
        "norm_before_fc, which is not supported": changed("variant", {"norm_before_fc": True}),
    }
    for message, directory in cases.items():
        with pytest.raises(ValueError, match=message):
            target = resolve(large)
            source = resolve_head(directory, target)
            load_head(source, target, torch.nn.Identity(), ops=resolve_ops(), device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match="leave out quantization"):
        LLM(large, speculative_config=drafting(head, quantization="int4"), **SETTINGS)


def test_pickled_heads_are_read_as_numbers(pair, tmp_path):
    large, head = pair
    (tmp_path / "config.json").write_text(Path(head, "config.json").read_text())
    torch.save(load_file(f"{head}/model.safetensors"), tmp_path / "pytorch_model.bin")
    target = resolve(large)
    where = {"ops": resolve_ops(), "device": "cpu", "dtype": torch.float32}
    ours, theirs = (
        load_head(resolve_head(each, target), target, torch.nn.Identity(), **where) for each in (head, str(tmp_path))
    )
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
