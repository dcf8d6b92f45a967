"""Adapters that requests name, from files to answers: ``LLM`` and ``AsyncEngine``."""

import asyncio
import shutil

import pytest
from peft_models import PROMPT, make_adapter
from tiny_llm import greedy_tokens, save_tiny_llm

from transect import LLM, AsyncEngine, LoRARequest, SamplingParams
from transect.checkpoints.peft_config import AdapterFiles

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
KINDS = {
    "all": {"target_modules": "all-linear"},
    "stabilized": {"target_modules": ["q_proj", "v_proj"], "r": 8, "use_rslora": True},
    "small": {"target_modules": ["down_proj", "o_proj"], "r": 2},
}
SETTINGS = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "threads": 1, "enable_lora": True}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """The folder with a model and adapters, and PEFT's greedy tokens with each; "" is the base."""
    folder = tmp_path_factory.mktemp("adapters")
    model = save_tiny_llm(folder / "model")
    expected = {"": greedy_tokens(model, PROMPT, 8)}
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for name, settings in KINDS.items():
        make_adapter(folder / "model", folder / name, **settings)
        fresh = AutoModelForCausalLM.from_pretrained(folder / "model")
        expected[name] = greedy_tokens(PeftModel.from_pretrained(fresh, folder / name).eval(), PROMPT, 8)
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    return folder, expected


@pytest.fixture(scope="module")
def llm(adapters) -> LLM:
    return LLM(str(adapters[0] / "model"), **SETTINGS)


def asked(folder, name: str) -> LoRARequest | None:
    return LoRARequest(name, str(folder / name)) if name else None


def tokens(results) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in results]


def test_one_batch_gives_peft_s_tokens_of_each_adapter(adapters, llm) -> None:
    folder, expected = adapters
    names = list(expected) * 2
    found = llm.generate([PROMPT] * len(names), PARAMS, lora_request=[asked(folder, name) for name in names])
    assert tokens(found) == [expected[name] for name in names]
    (embedded,), (plain,) = llm.embed([PROMPT], lora_request=asked(folder, "all")), llm.embed([PROMPT])
    assert embedded.outputs.embedding != plain.outputs.embedding


def test_vllm_s_form_of_a_request_is_taken(adapters, llm) -> None:
    folder, expected = adapters
    request = LoRARequest("small", 1, str(folder / "small"))
    assert tokens(llm.generate([PROMPT], PARAMS, lora_request=request)) == [expected["small"]]
    with pytest.raises(ValueError, match="a name and the directory"):
        LoRARequest("small", 1)


def test_other_files_under_the_same_path_are_another_adapter(adapters, llm, tmp_path) -> None:
    folder, expected = adapters
    place = tmp_path / "place"
    for name in ("all", "small", "all"):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder / name, place)
        found = llm.generate([PROMPT], PARAMS, lora_request=LoRARequest("same", str(place)))
        assert tokens(found) == [expected[name]]


def test_more_adapters_than_slots_and_host_memory_hold(adapters) -> None:
    folder, expected = adapters
    small = LLM(str(folder / "model"), **SETTINGS, max_loras=1, max_cpu_loras=2)
    for names in (("all", "small", "", "all"), ("stabilized", "all"), ("small", "stabilized")):
        found = small.generate([PROMPT] * len(names), PARAMS, lora_request=[asked(folder, name) for name in names])
        assert tokens(found) == [expected[name] for name in names]
        assert len(small._adapters) <= 2
    with pytest.raises(ValueError, match="uses 3 adapters, and max_cpu_loras is 2"):
        small.generate([PROMPT] * 3, PARAMS, lora_request=[asked(folder, name) for name in KINDS])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "is DoRA"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "changes embed"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "which all requests share"),
        ({"target_modules": ["q_proj"], "r": 32}, "max_lora_rank is 16: raise it"),
    ],
)
def test_what_rows_cannot_have_of_their_own_is_refused(adapters, llm, tmp_path, settings, words: str) -> None:
    make_adapter(adapters[0] / "model", tmp_path / "a", **settings)
    with pytest.raises(ValueError, match=words):
        llm.generate([PROMPT], PARAMS, lora_request=LoRARequest("a", str(tmp_path / "a")))


def test_an_adapter_of_another_base_is_refused(adapters, llm, tmp_path) -> None:
    save_tiny_llm(tmp_path / "other", hidden_size=48)
    make_adapter(tmp_path / "other", tmp_path / "a", target_modules=["q_proj"])
    with pytest.raises(ValueError, match=r"does not fit .*is of another model"):
        llm.generate([PROMPT], PARAMS, lora_request=LoRARequest("a", str(tmp_path / "a")))


def test_an_engine_without_adapters_says_how_to_get_them(adapters) -> None:
    folder = adapters[0]
    plain = LLM(str(folder / "model"), **SETTINGS | {"enable_lora": False})
    with pytest.raises(ValueError, match="enable_lora=True"):
        plain.generate([PROMPT], PARAMS, lora_request=asked(folder, "all"))
    for settings, words in (
        ({"adapter": str(folder / "all")}, "leave one of them out"),
        ({"pipeline_parallel_size": 2}, "runs on one device, or on tensor parallel ranks"),
        ({"lora_target_modules": ("embed",)}, "has no 'embed'"),
        ({"max_cpu_loras": 2}, "must be at least max_loras"),
    ):
        with pytest.raises(ValueError, match=words):
            LLM(str(folder / "model"), **SETTINGS, **settings)


@pytest.mark.parametrize(
    "native", [pytest.param(False, marks=pytest.mark.prove, id="torch"), pytest.param(None, id="C++")]
)
def test_tensor_parallel_ranks_have_their_parts_of_each_adapter(adapters, two_ranks, native) -> None:
    """More of them than the ranks hold at once; the plans of both are compared in every step."""
    folder, expected = adapters
    more = {"tensor_parallel_size": 2, "max_loras": 1, "max_cpu_loras": 2, "check_plans": True, "native": native}
    ranks = LLM(str(folder / "model"), ranks=two_ranks, **SETTINGS, **more)
    for names in (("all", "small", "", "all"), ("stabilized", "all"), ("small", "stabilized")):
        found = ranks.generate([PROMPT] * len(names), PARAMS, lora_request=[asked(folder, name) for name in names])
        assert tokens(found) == [expected[name] for name in names]
    ranks.close()


async def test_an_engine_process_reads_adapters_while_others_stream(adapters, tmp_path) -> None:
    folder, expected = adapters
    async with await AsyncEngine.start(model=str(folder / "model"), **SETTINGS, max_loras=2, max_cpu_loras=2) as engine:

        async def answer(name: str) -> list[int]:
            final = None
            async for output in engine.generate(PROMPT, PARAMS, lora_request=asked(folder, name)):
                final = output
            return list(final.outputs[0].token_ids)

        names = [*expected, *KINDS, ""]
        assert await asyncio.gather(*map(answer, names)) == [expected[name] for name in names]
        make_adapter(folder / "model", tmp_path / "dora", target_modules=["q_proj"], use_dora=True)
        files = AdapterFiles.of(tmp_path / "dora")
        with pytest.raises(ValueError, match="is DoRA"):
            await engine.load_adapter(files)
        with pytest.raises(ValueError, match="is DoRA"):
            async for _ in engine.generate(PROMPT, PARAMS, lora_request=LoRARequest("dora", str(tmp_path / "dora"))):
                pass
        kept = AdapterFiles.of(folder / "all")
        await engine.load_adapter(kept)
        await engine.forget_adapter(kept)
        assert await answer("all") == expected["all"]
