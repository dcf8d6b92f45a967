"""Searches in an ``LLM`` with a model: seeds, stop strings, adapters, rewards of a classifier beside PEFT's."""

import pytest
import torch
from tiny_llm import save_tiny_llm

from transect import LLM, LoRARequest, SamplingParams, Search
from transect.search.judges import RewardHead
from transect.search.rows import row_of

SAID = [{"role": "user", "content": "2+2?"}]
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(path)
    return path


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), device="cpu", dtype="float32", threads=1, enable_lora=True, max_loras=2, max_lora_rank=8)


@pytest.fixture(scope="module")
def reward(folder, tmp_path_factory):
    """An adapter for classification as PEFT saves it, and the model with it."""
    import peft
    import transformers

    base = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, pad_token_id=0)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, task_type="SEQ_CLS"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    path = tmp_path_factory.mktemp("reward")
    model.save_pretrained(path)
    return path, model.eval()


def test_a_seed_gives_the_same_tree_and_prompts_do_not_share_their_luck(llm):
    search = Search("best_of_n", n=4)
    (first,), (again,) = llm.search(SAID, search, PARAMS), llm.search(SAID, search, PARAMS)
    assert first.to_dict() == again.to_dict() and first.text == again.text
    two = llm.search([SAID, SAID], search, PARAMS)
    assert two[0].to_dict()["branches"] != two[1].to_dict()["branches"]
    assert llm.stats().running == llm.stats().kv_blocks_used == 0


def test_branches_are_those_of_n_choices(llm):
    """A fork is a request with n choices, with a seed derived from the search's."""
    (found,) = llm.search(SAID, Search("best_of_n", n=3), PARAMS)
    from transect.engine.scheduling.arrivals import seed_of

    (plain,) = llm.chat(SAID, PARAMS.with_(n=3, seed=seed_of(3, 0), logprobs=0))
    assert [branch.tokens for branch in found.tree.branches] == [output.token_ids for output in plain.outputs]
    assert [branch.text for branch in found.tree.branches] == [output.text for output in plain.outputs]
    assert found.branch.mean_logprob == max(o.cumulative_logprob / len(o.token_ids) for o in plain.outputs)


def test_stop_strings_of_the_request_end_branches(llm):
    (whole,) = llm.search(SAID, Search("best_of_n", n=2), PARAMS)
    stop = whole.tree.branches[0].text[3]
    for method in ("best_of_n", "beam"):
        (found,) = llm.search(SAID, Search(method, n=2), PARAMS.with_(stop=[stop]))
        assert all(stop not in branch.text for branch in found.tree.branches)
        assert any(branch.stop_reason == stop for branch in found.tree.branches)


def test_rewards_are_those_of_peft(llm, reward):
    path, model = reward
    judge = RewardHead.read(path, "reward")
    search = Search("best_of_n", n=4, score="reward")
    adapters = [LoRARequest("reward", str(path))]
    (found,) = llm.search(SAID, search, PARAMS, judges={"reward": judge}, adapters=adapters)
    prompt = llm.chat(SAID, PARAMS)[0].prompt_token_ids
    for branch in found.tree.branches:
        with torch.no_grad():
            expected = model(torch.tensor([[*prompt, *branch.tokens]])).logits.item()
        assert branch.scores["reward"] == pytest.approx(expected, abs=2e-3)
    assert found.branch.scores["reward"] == max(branch.scores["reward"] for branch in found.tree.branches)


def test_a_mixture_draws_from_all_adapters(llm, reward):
    adapters = [LoRARequest("reward", str(reward[0]))]
    search = Search("mixture", n=2, adapters=["", "reward"])
    (found,) = llm.search(SAID, search, PARAMS, adapters=adapters)
    base, other = (found.tree.branches[at : at + 2] for at in (0, 2))
    assert {b.adapter for b in base} == {""} and {b.adapter for b in other} == {"reward"}
    assert base[0].tokens != other[0].tokens
    with pytest.raises(ValueError, match=r"search.adapters names 'none', which is no adapter here; there are: reward"):
        llm.search(SAID, Search("mixture", adapters=["none"]), PARAMS, adapters=adapters)


def test_functions_judge_and_report_progress(llm):
    seen = []
    search = Search("best_of_n", n=4, score="length")
    more = {"judges": {"length": lambda question, answer: -len(answer)}, "on_progress": lambda *each: seen.append(each)}
    (found,) = llm.search("2+2=", search, PARAMS, **more)
    assert len(found.text) == min(len(branch.text) for branch in found.tree.branches)
    assert seen[0][1]["alive"] == 4 and seen[-1][1]["alive"] == 0


def test_prompts_that_are_none_are_refused(llm):
    for prompt, sentence in ((5, "search takes a text"), ([], "the prompt is empty"), ("", "the prompt is empty")):
        with pytest.raises(ValueError, match=sentence):
            llm.search(prompt, Search("majority"), PARAMS)
    with pytest.raises(ValueError, match="give messages, not a prompt"):
        llm.search("2+2=", Search("refine"), PARAMS)


def test_searches_become_rows_of_training_data(llm):
    (found,) = llm.search(SAID, Search("best_of_n", n=6), PARAMS)
    pair = row_of(found, {"prompt": "2+2?"}, "dpo")
    assert pair["prompt"] == SAID and pair["chosen"][0]["content"] == found.text != pair["rejected"][0]["content"]
    assert row_of(found, {"prompt": "2+2?"}, "sft")["messages"][-1]["content"] == found.text
    with pytest.raises(ValueError, match="rows for grpo need the right answer"):
        row_of(found, {"prompt": "2+2?"}, "grpo")
    (voted,) = llm.search(SAID, Search("majority", n=6, extract="text"), PARAMS)
    truth = voted.tree.branches[2].answer
    row = row_of(voted, {"prompt": "2+2?", "answer": truth}, "grpo")
    assert row == {"prompt": "2+2?", "answer": truth, "share": 0.1667}
    assert row_of(voted, {"prompt": "2+2?", "answer": "never"}, "dpo") is None
