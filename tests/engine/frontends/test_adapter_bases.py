"""Adapters over bases of every format, beside drafts, scores and beams: a row has the bits that it has alone."""

import pytest
from eagle_heads import save_random_head
from peft_models import make_adapter
from tiny_checkpoints import write_gguf
from tiny_llm import save_tiny_llm

from transect import LLM, BeamSearchParams, LoRARequest, SamplingParams

SETTINGS = {"device": "cpu", "max_model_len": 96, "threads": 1, "num_kv_blocks": 64, "deterministic": True, "seed": 2}
NAMES = ["", "all", "small", "", "small", "all"]
PROMPTS = [[72, 101, 108, 108, 111], [97] * 9, [98, 99] * 8, [72, 101, 108], [97] * 30, [65, 66, 67]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Directories of a model, of two adapters, and the model as a GGUF file."""
    folder = tmp_path_factory.mktemp("bases")
    model = save_tiny_llm(folder / "model", num_hidden_layers=4)
    write_gguf(folder / "model.gguf", model, "Q8_0")
    make_adapter(folder / "model", folder / "all", target_modules="all-linear")
    make_adapter(folder / "model", folder / "small", target_modules=["down_proj", "q_proj"], r=2)
    return folder


def request(folder, name):
    return LoRARequest(name, str(folder / name)) if name else None


def answers(llm, folder, names, prompts):
    params = [
        SamplingParams(max_tokens=12, temperature=0.8 * (at % 2), seed=at, logprobs=1, ignore_eos=True)
        for at in (PROMPTS.index(prompt) for prompt in prompts)
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(prompts, params, lora_request=[request(folder, name) for name in names])
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("model", {"dtype": "float32"}),
        ("model", {"quantization": "fp8"}),
        ("model", {"quantization": "int4"}),
        ("model", {"quantization": "int8"}),
        ("model.gguf", {}),
        ("model.gguf", {"native": False, "dtype": "float32"}),
    ],
    ids=["float32", "fp8", "int4", "int8", "GGUF", "GGUF on torch"],
)
def test_a_row_of_a_mixed_batch_has_the_bits_that_it_has_alone(folder, model, settings):
    settings = SETTINGS | settings | {"tokenizer": str(folder / "model")}
    llm = LLM(str(folder / model), **settings, enable_lora=True, enable_prefix_caching=False)
    mixed = answers(llm, folder, NAMES, PROMPTS)
    alone = [answers(llm, folder, [name], [prompt])[0] for name, prompt in zip(NAMES, PROMPTS, strict=True)]
    assert mixed == alone
    plain = LLM(str(folder / model), **settings)
    for at in (0, 3):  # rows without an adapter are those of an engine that has no room for any
        assert answers(plain, folder, [""], [PROMPTS[at]])[0] == mixed[at]
    assert mixed[1] != answers(llm, folder, [""], [PROMPTS[1]])[0]


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_drafts_are_verified_with_the_adapter_of_their_row(folder, method, tmp_path):
    settings = SETTINGS | {"dtype": "float32", "enable_lora": True}
    plain = answers(LLM(str(folder / "model"), **settings), folder, NAMES, PROMPTS)
    spec = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    if method == "eagle3":
        save_random_head(folder / "model", tmp_path)
        spec["model"] = str(tmp_path)
    elif method == "draft_model":
        save_tiny_llm(tmp_path, num_hidden_layers=1)
        spec["model"] = str(tmp_path)
    else:
        spec["prompt_lookup_min"] = 1
    llm = LLM(str(folder / "model"), **settings, speculative_config=spec)
    assert answers(llm, folder, NAMES, PROMPTS) == plain
    assert llm.stats().drafted_tokens > 0


def test_scores_and_beams_take_an_adapter(folder):
    llm = LLM(str(folder / "model"), **SETTINGS, dtype="float32", enable_lora=True)
    query, texts = "cats", ["cats", "dogs and cats"]
    base = [each.outputs.score for each in llm.score(query, texts)]
    mixed = llm.score(query, texts, lora_request=[None, request(folder, "all")])
    adapted = llm.score(query, texts, lora_request=request(folder, "all"))
    assert mixed[0].outputs.score == base[0] != adapted[0].outputs.score
    assert mixed[1].outputs.score == adapted[1].outputs.score != base[1]
    params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
    each = [None, request(folder, "all")]
    plain, own = llm.beam_search(["ab"] * 2, params, lora_request=each)
    assert [s.tokens for s in plain.sequences] == [s.tokens for s in llm.beam_search("ab", params)[0].sequences]
    again = llm.beam_search("ab", params, lora_request=request(folder, "all"))[0]
    assert [s.cum_logprob for s in own.sequences] == [s.cum_logprob for s in again.sequences]
    assert own.sequences[0].cum_logprob != plain.sequences[0].cum_logprob
    with pytest.raises(ValueError, match="2 prompts and 1 lora_requests"):
        llm.score(query, texts, lora_request=[None])
