"""A smaller model drafts: the answers are those without, and a model that agrees is accepted at any temperature."""

import pytest
import torch
from drafted_answers import FORM, SETTINGS, answers
from eagle_heads import save_random_head
from effort import proving
from tiny_llm import VOCAB, save_tiny_llm, save_tiny_llm_text

from transect import LLM, SamplingParams
from transect.checkpoints.resolve import resolve
from transect.engine.drafting import check_pair
from transect.engine.scheduling.policies.model_speculation import ModelSpeculation
from transect.train.export.write import export_model, opened


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Directories of a model of three layers, of its first two, and of its first one. The third layer adds nothing."""
    large, equal, other = (tmp_path_factory.mktemp(name) for name in ("large", "equal", "other"))
    model = save_tiny_llm(large, num_hidden_layers=3)
    with torch.no_grad():
        for weight in (model.model.layers[2].self_attn.o_proj.weight, model.model.layers[2].mlp.down_proj.weight):
            weight.zero_()
    model.save_pretrained(large)
    for directory, layers in ((equal, 2), (other, 1)):
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
        model.config.layer_types = None
        model.save_pretrained(directory)
        save_tiny_llm_text(directory)
    return str(large), str(equal), str(other)


def drafting(model: str, **settings):
    return {"method": "draft_model", "model": model, "num_speculative_tokens": 4, **settings}


@pytest.mark.parametrize("native", [False, None], ids=["torch", "C++"])
@pytest.mark.parametrize("lag", [False, True], ids=["lag 0", "lag 1"])
def test_answers_are_the_same(pair, native: bool | None, lag: bool):
    """Any three of draft, length, stack and lag meet in every way; all four with ``--prove``."""
    large, equal, other = pair
    plain = answers(LLM(large, async_scheduling=lag, native=native, **SETTINGS))
    for draft in (equal, other):
        for adaptive in (False, True):
            if (draft == equal) ^ adaptive ^ lag ^ (native is None) and not proving():
                continue
            spec = drafting(draft, adaptive=adaptive)
            llm = LLM(large, async_scheduling=lag, native=native, speculative_config=spec, **SETTINGS)
            assert answers(llm) == plain
            stats = llm.stats()
            accepted = sum(stats.accepted_at.values())
            assert stats.drafted_tokens > 0
            if draft == equal and not adaptive:  # drafts behind a stop token, and in the answer's last steps, are lost
                assert accepted > 0.9 * stats.drafted_tokens


def test_a_model_with_the_same_distribution_is_always_right_at_high_temperature(pair):
    """Its draws have the noise of the large model. With noise of its own hardly one in a hundred would be right."""
    large, equal, _ = pair
    llm = LLM(large, speculative_config=drafting(equal, adaptive=False), **SETTINGS)
    params = SamplingParams(max_tokens=41, temperature=1.5, seed=5, ignore_eos=True)
    llm.generate(["abc", "defghij"], params)
    stats = llm.stats()
    assert stats.drafted_tokens == sum(stats.accepted_at.values()) == 2 * 32


@pytest.mark.parametrize("lag", [False, True], ids=["lag 0", "lag 1"])
def test_tokens_that_a_grammar_forces_are_drafts_without_a_draw(pair, lag):
    """Of seven characters the grammar forces two, and the small model draws the others only."""
    large, equal, _ = pair
    llm = LLM(large, speculative_config=drafting(equal, adaptive=False), async_scheduling=lag, **SETTINGS)
    executor, drawn = llm._core.scheduler.speculation.model.executor, []
    submit = executor.submit
    executor.submit = lambda batch: drawn.extend(row for row in batch.rows if row.draws) or submit(batch)
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=5, structured_outputs=FORM)
    (answer,) = llm.generate("abc", params)[0].outputs
    stats = llm.stats()
    assert stats.drafted_tokens == sum(stats.accepted_at.values())  # the same distribution and the same noise
    assert len(drawn) < 0.9 * stats.drafted_tokens and answer.text.count(";") == 6
    plain = LLM(large, async_scheduling=lag, jump_ahead=False, **SETTINGS).generate("abc", params)[0].outputs[0]
    assert plain.token_ids == answer.token_ids


def test_the_kv_of_shared_prompts_is_computed_once(pair):
    large, equal, _ = pair
    llm = LLM(large, speculative_config=drafting(equal, adaptive=False), **SETTINGS)
    speculation = llm._core.scheduler.speculation
    assert isinstance(speculation, ModelSpeculation) and speculation.model is not None
    computed = []
    submit = speculation.model.executor.submit

    def record(batch):
        computed.append(sum(row.num_tokens for row in batch.rows))
        return submit(batch)

    speculation.model.executor.submit = record
    for _ in range(2):
        llm.generate("x" * 100, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    assert max(computed[: len(computed) // 2]) > 100 and max(computed[len(computed) // 2 :]) < 20


def test_a_pair_that_cannot_work_is_refused_by_name(pair, tmp_path):
    large, equal, _ = pair
    with pytest.raises(ValueError, match=r"not smaller than .* take a smaller one"):
        LLM(large, speculative_config=drafting(large), **SETTINGS)
    save_tiny_llm(tmp_path, num_hidden_layers=1, vocab_size=VOCAB + 20)
    with pytest.raises(ValueError, match="vocabulary of 320 tokens"):
        LLM(large, speculative_config=drafting(str(tmp_path)), **SETTINGS)
    with pytest.raises(ValueError, match="needs a model that drafts"):
        LLM(large, speculative_config={"method": "draft_model"}, **SETTINGS)
    with pytest.raises(ValueError, match="needs no model"):
        LLM(large, speculative_config={"method": "ngram", "model": equal}, **SETTINGS)


def test_tokens_that_differ_are_refused(pair, tmp_path):
    large, equal, _ = pair
    save_tiny_llm(tmp_path, num_hidden_layers=1)
    file = tmp_path / "tokenizer.json"
    swapped = file.read_text().replace('"a":', '"?":', 1).replace('"b":', '"a":', 1).replace('"?":', '"b":', 1)
    file.write_text(swapped)
    with pytest.raises(ValueError, match="another vocabulary"):
        check_pair(resolve(str(tmp_path)), resolve(large))
    check_pair(resolve(equal), resolve(large))


def test_the_cache_of_the_small_model_counts_as_memory(pair):
    large, equal, _ = pair
    settings = {name: value for name, value in SETTINGS.items() if name != "num_kv_blocks"}
    plain = LLM(large, kv_cache_bytes=10_000_000, **settings)
    both = LLM(large, kv_cache_bytes=10_000_000, speculative_config=drafting(equal), **settings)
    blocks = [llm._core.scheduler.config.num_blocks for llm in (plain, both)]
    assert blocks[1] == pytest.approx(blocks[0] * 3 / 5, abs=1)  # layers: 3, and 3 + 2
    speculation = both._core.scheduler.speculation
    assert speculation.model._blocks.cache.num_blocks == blocks[1]


def test_a_step_that_raises_leaves_the_small_model_in_step(pair):
    large, equal, _ = pair
    llm = LLM(large, speculative_config=drafting(equal, adaptive=False), **SETTINGS)
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=2, ignore_eos=True)
    plain = llm.generate("abc", params)[0].outputs[0].token_ids
    executor = llm._core.scheduler.speculation.model.executor
    submit, calls = executor.submit, []

    def fail_once(batch):
        calls.append(batch)
        if len(calls) == 6:
            raise RuntimeError("as planned")
        return submit(batch)

    executor.submit = fail_once
    with pytest.raises(RuntimeError, match="as planned"):
        llm.generate("abc", params)
    assert llm.generate("abc", params)[0].outputs[0].token_ids == plain
    assert llm.stats().drafted_tokens > 0


@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_plan_the_same_drafts_and_answer_the_same(pair, two_ranks, layout, tmp_path):
    """The ranks compare their plans in every step (``check_plans``)."""
    large, _, other = pair
    specs = [{"method": "suffix", "prompt_lookup_min": 1, "num_speculative_tokens": 3, "adaptive": False}]
    if layout == "tensor_parallel_size":
        save_random_head(large, tmp_path, (1, 2))
        head = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3, "adaptive": False}
        models = [drafting(other), head]
        specs = [*specs, drafting(other, adaptive=False), *models] if proving() else models
    params = SamplingParams(max_tokens=24, seed=1, ignore_eos=True, temperature=0.5, n=2)
    found = []
    for spec in (None, *specs):
        llm = LLM(large, speculative_config=spec, check_plans=True, ranks=two_ranks, **{layout: 2}, **SETTINGS)
        found.append([c.token_ids for o in llm.generate(["abcabcab", "x1 x1 x1", "aaaa"], params) for c in o.outputs])
        assert (llm.stats().drafted_tokens > 0) == (spec is not None)
        llm.close()
    assert all(each == found[0] for each in found)


def test_layouts_that_cannot_draft_are_refused_by_name(pair):
    large, equal, _ = pair
    with pytest.raises(ValueError, match="hold up all stages"):
        LLM(large, speculative_config=drafting(equal), pipeline_parallel_size=2, **SETTINGS)


def test_the_first_layers_of_a_model_are_a_model_that_drafts(pair, tmp_path):
    """The third layer of the large model adds nothing, so its first two are always right."""
    large, _, _ = pair
    export_model(opened(large), tmp_path / "first", first_layers=2)
    llm = LLM(large, speculative_config=drafting(str(tmp_path / "first"), adaptive=False), **SETTINGS)
    llm.generate("abc", SamplingParams(max_tokens=21, temperature=1.0, seed=1, ignore_eos=True))
    stats = llm.stats()
    assert stats.drafted_tokens == sum(stats.accepted_at.values()) > 0
    with pytest.raises(ValueError, match="from 1 to 2"):
        export_model(opened(large), tmp_path / "all", first_layers=3)
