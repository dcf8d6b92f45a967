"""An adapter for the whole engine: ``LLM``, the server's options, and what cannot be served."""

import pytest
from peft_models import PROMPT, make_adapter
from tiny_llm import greedy_tokens, save_tiny_llm

from transect import LLM, SamplingParams
from transect.cli.serve import lora_module


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    model = save_tiny_llm(folder / "model")
    make_adapter(folder / "model", folder / "a", target_modules="all-linear", use_dora=True)
    from peft import PeftModel

    plain = greedy_tokens(model, PROMPT, 8)
    return folder, plain, greedy_tokens(PeftModel.from_pretrained(model, folder / "a").eval(), PROMPT, 8)


def answer(model, **settings):
    llm = LLM(str(model), device="cpu", dtype="float32", max_model_len=64, threads=1, **settings)
    return list(
        llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids
    )


def test_its_greedy_tokens_are_those_of_peft(adapted) -> None:
    folder, plain, expected = adapted
    assert expected != plain
    assert answer(folder / "model") == plain
    assert answer(folder / "model", adapter=str(folder / "a"), enable_lora=True, max_lora_rank=8) == expected
    assert answer(folder / "a") == expected


def test_the_server_s_options_name_one_adapter() -> None:
    assert lora_module(["mine=some/dir"], True, None, None) == ("mine", "some/dir")
    assert lora_module(['{"name": "mine", "path": "some/dir"}'], False, None, None) == ("mine", "some/dir")
    assert lora_module([], True, "dir", ["name"]) == (None, "dir")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([], True, None, None), "give --lora-modules NAME=DIR"),
        ((["a=x", "b=y"], True, None, None), "only one adapter at a time is served"),
        ((["a=x"], True, "y", None), "only one adapter at a time is served"),
        ((["x"], True, None, None), "takes NAME=DIR, not 'x'"),
        ((["a=x"], True, None, ["base"]), "not served beside a"),
    ],
)
def test_several_adapters_are_refused(arguments, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lora_module(*arguments)


def test_a_wrong_folder_is_named(adapted) -> None:
    with pytest.raises(ValueError, match=r"no directory 'nowhere' with an adapter"):
        answer(adapted[0] / "model", adapter="nowhere")
