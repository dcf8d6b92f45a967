"""Answers with drafts on a GPU: in deterministic mode the tokens are those without."""

import gc

import pytest
import torch
from eagle_heads import save_random_head
from tiny_llm import save_tiny_llm, save_tiny_llm_text

from transect import LLM, SamplingParams, StructuredOutputsParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
FORM = StructuredOutputsParams(regex="([a-b]{3}-[0-9]{2};){6}")
OPTIONS = [
    {"temperature": 0.0},
    {"n": 2, "temperature": 0.5},
    {"temperature": 0.3, "logprobs": 2},
    {"temperature": 0.2, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    {"temperature": 0.5, "top_k": 3, "min_p": 0.01, "logit_bias": {65: 3.0}},
    {"temperature": 0.3, "structured_outputs": FORM},
]
PROMPTS = ["abcabcabcab", "Hello Hello Hello", "x1 x2 x3", "aaaa", "ababab", "zz"]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def answers(directory: str, **settings):
    """Token ids of every choice, and the engine's counters."""
    llm = LLM(
        directory,
        device="cuda",
        dtype="bfloat16",
        deterministic=True,
        max_num_seqs=64,
        kv_cache_tokens=4096,
        **settings,
    )
    params = [SamplingParams(**{"max_tokens": 48, "seed": 1, "ignore_eos": True} | each) for each in OPTIONS]
    outputs = [*llm.generate(PROMPTS, params), *llm.generate(PROMPTS[0], params[0])]
    found = [choice.token_ids for output in outputs for choice in output.outputs]
    stats = llm.stats()
    del llm
    gc.collect()
    return found, stats


@pytest.mark.parametrize("ahead", [False, True], ids=["lag 0", "lag 1"])
def test_answers_are_the_same_with_drafts(tmp_path, ahead: bool):
    save_tiny_llm(tmp_path, **SIZES)
    plain, _ = answers(str(tmp_path), async_scheduling=ahead)
    for method in ("ngram", "suffix"):
        spec = {"method": method, "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
        found, stats = answers(str(tmp_path), async_scheduling=ahead, speculative_config=spec)
        assert found == plain
        assert stats.drafted_tokens > sum(stats.accepted_at.values()) > 0


@pytest.mark.parametrize("ahead", [False, True], ids=["lag 0", "lag 1"])
def test_answers_are_the_same_with_a_draft_model(tmp_path, ahead: bool):
    """The last layer of the large model adds nothing, so the small one has the same logits: its drafts are right."""
    large, small = tmp_path / "large", tmp_path / "small"
    large.mkdir()
    model = save_tiny_llm(large, num_hidden_layers=3, **SIZES)
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj.weight.zero_()
        model.model.layers[2].mlp.down_proj.weight.zero_()
    model.save_pretrained(large)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers, model.config.layer_types = 2, None
    model.save_pretrained(small)
    save_tiny_llm_text(small)
    plain, _ = answers(str(large), async_scheduling=ahead)
    for adaptive in (False, True):
        spec = {"method": "draft_model", "model": str(small), "num_speculative_tokens": 4, "adaptive": adaptive}
        found, stats = answers(str(large), async_scheduling=ahead, speculative_config=spec)
        assert found == plain
        if not adaptive:
            assert sum(stats.accepted_at.values()) > 0.8 * stats.drafted_tokens > 0


@pytest.mark.parametrize("ahead", [False, True], ids=["lag 0", "lag 1"])
def test_answers_are_the_same_with_a_head(tmp_path, ahead: bool):
    """An EAGLE-3 head with random weights: its steps are graphs, and its drafts those of the CPU's runner."""
    large, head = tmp_path / "large", tmp_path / "head"
    large.mkdir()
    save_tiny_llm(large, num_hidden_layers=4, **SIZES)
    save_random_head(large, head)
    plain, _ = answers(str(large), async_scheduling=ahead)
    for adaptive in (False, True):
        spec = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4, "adaptive": adaptive}
        found, stats = answers(str(large), async_scheduling=ahead, speculative_config=spec)
        assert found == plain
        if not adaptive:
            assert stats.drafted_tokens > 100


def test_a_head_drafts_on_a_gpu_what_it_drafts_on_a_cpu(tmp_path):
    large, head = tmp_path / "large", tmp_path / "head"
    large.mkdir()
    save_tiny_llm(large, num_hidden_layers=4, **SIZES)
    save_random_head(large, head)
    spec = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3, "adaptive": False}
    drafts = []
    for device in ("cpu", "cuda"):
        llm = LLM(str(large), device=device, dtype="float32", speculative_config=spec, kv_cache_tokens=2048)
        model, seen = llm._core.scheduler.speculation.model, {}
        draft = model.draft

        def record(wanted, draft=draft, seen=seen):
            wanted = list(wanted)
            found = draft(wanted)
            seen.update({(*seq.prompt_token_ids, *seq.output_token_ids): found.get(seq.seq_id) for seq, _ in wanted})
            return found

        model.draft = record
        llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
        drafts.append(seen)
        del llm, model
        gc.collect()
    both = drafts[0].keys() & drafts[1].keys()  # answers may part where logits are nearly equal
    assert len(both) > 40
    assert sum(drafts[0][key] == drafts[1][key] for key in both) > 0.95 * len(both)
