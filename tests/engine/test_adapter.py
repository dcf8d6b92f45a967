"""An adapter for the whole engine: ``LLM``, the server's options, and what cannot be served."""

import pytest
from peft_models import PROMPT, make_adapter
from tiny_llm import greedy_tokens, save_tiny_llm

from transect import LLM, SamplingParams


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
    assert answer(folder / "model", adapter=str(folder / "a")) == expected
    assert answer(folder / "a") == expected


def test_a_wrong_folder_is_named(adapted) -> None:
    with pytest.raises(ValueError, match=r"no directory 'nowhere' with an adapter"):
        answer(adapted[0] / "model", adapter="nowhere")
