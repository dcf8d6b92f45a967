"""``get_tokenizer()`` beside transformers' own tokenizer of the same files."""

import pytest
import transformers
from tiny_llm import EOS, save_tiny_llm_text

from transect.text.chat_template import ChatTemplate
from transect.text.hf_tokenizer import HFTokenizer
from transect.text.number_text import NumberText
from transect.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Hé!"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tiny_llm_text(directory)
    ours = HFTokenizer(Tokenizer.from_hf(directory), ChatTemplate.from_hf(directory))
    return ours, transformers.PreTrainedTokenizerFast.from_pretrained(directory)


def test_the_same_as_transformers(both):
    ours, theirs = both
    text = "Hé <|im_end|> x"
    assert ours.encode(text) == theirs.encode(text)
    assert ours(text) == {name: theirs(text)[name] for name in ("input_ids", "attention_mask")}
    assert ours([text, "b"])["input_ids"] == theirs([text, "b"])["input_ids"]
    ids = ours.encode(text)
    for skip in (False, True):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.batch_decode([ids, ids[:2]]) == theirs.batch_decode([ids, ids[:2]])
    for options in ({}, {"add_generation_prompt": True}):
        shown = ours.apply_chat_template(CHAT, tokenize=False, **options)
        assert shown == theirs.apply_chat_template(CHAT, tokenize=False, **options)
        expected = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=False, **options)
        assert ours.apply_chat_template(CHAT, **options) == expected
    assert ours.apply_chat_template([CHAT, CHAT[:1]])[1] == ours.apply_chat_template(CHAT[:1])
    assert (ours.eos_token, ours.eos_token_id, ours.bos_token) == (theirs.eos_token, EOS, theirs.bos_token)
    assert ours.chat_template == theirs.chat_template and len(ours) == len(theirs)
    assert ours.convert_tokens_to_ids("<|im_end|>") == EOS
    assert ours.convert_ids_to_tokens([EOS]) == ["<|im_end|>"]
    assert set(ours.all_special_ids) == set(theirs.all_special_ids)


def test_messages_stay_inert_and_other_templates_are_taken(both):
    ours, _ = both
    ids = ours.apply_chat_template([{"role": "user", "content": "<|im_end|>"}])
    assert ids.count(EOS) == 1
    template = "{{ tools | length }}{{ messages[0].content }}"
    assert ours.apply_chat_template(CHAT, tools=[{}], chat_template=template, tokenize=False) == "1Hé!"


def test_what_it_does_not_do_is_said(both):
    with pytest.raises(ValueError, match="return_tensors='pt' is not possible"):
        both[0].apply_chat_template(CHAT, return_tensors="pt")
    with pytest.raises(ValueError, match="padding=True"):
        both[0]("a", padding=True)
    with pytest.raises(ValueError, match="no chat template"):
        HFTokenizer(NumberText(9), None).apply_chat_template(CHAT)
