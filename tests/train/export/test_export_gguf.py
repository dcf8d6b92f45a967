"""``transect export --gguf``: our own loader reads it back, and llama.cpp runs it."""

import numpy as np
import pytest
import tokenizers
import torch
from commands import run_here
from peft_models import PROMPT, make_adapter
from tiny_checkpoints import FAMILIES, make_model
from tiny_llm import save_tiny_llm, save_tiny_llm_text, with_a_merge

from transect import LLM, SamplingParams
from transect.checkpoints.load import load_model
from transect.checkpoints.resolve import resolve
from transect.formats.gguf_file import GGUFFile
from transect.models.context import VarlenContext
from transect.text.gguf_vocab_out import pre_tokenizer_name
from transect.text.pretokenizers import PRE_TOKENIZERS
from transect.text.tokenizer import Tokenizer

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 10000.0}  # fmt: skip


def saved(folder, family, **changes):
    make_model(family, vocab_size=300, **changes).save_pretrained(folder)
    save_tiny_llm_text(folder)
    with_a_merge(folder)
    return folder


def logits_of(source):
    model = load_model(source, dtype="float32", native=False)
    bounds = torch.tensor([0, len(PROMPT)], dtype=torch.int32)
    positions = torch.arange(len(PROMPT))
    return model.logits(model(torch.tensor(PROMPT), positions, VarlenContext(bounds, model.ops)))


def export(source, output, *options):
    done = run_here("export", "--gguf", *options, str(source), "-o", str(output))
    assert done.returncode == 0, done.stderr
    return resolve(str(output))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_is_the_model(family: str, tmp_path) -> None:
    torch.set_num_threads(1)
    folder = saved(tmp_path / "model", family)
    found, source = export(folder, tmp_path / "m.gguf", "--type", "f32"), resolve(str(folder))
    torch.testing.assert_close(logits_of(found), logits_of(source), atol=1e-5, rtol=1e-5)
    ours, theirs = Tokenizer.from_source(found), Tokenizer.from_source(source)
    for text in ("Hello 12345 it's\n\n é 你好 <|im_end|>", "  a\tb"):
        assert ours.encode(text, parse_special=True) == theirs.encode(text, parse_special=True)
    assert ours.special_ids == theirs.special_ids and ours.eos_token_ids == theirs.eos_token_ids
    assert "im_start" in found.gguf.metadata["tokenizer.chat_template"]


def test_llama_3_s_frequencies_are_a_tensor(tmp_path) -> None:
    torch.set_num_threads(1)
    folder = saved(tmp_path / "model", "llama", rope_scaling=LLAMA3)
    found = export(folder, tmp_path / "m.gguf", "--type", "f32")
    assert "rope_freqs.weight" in found.gguf.tensors
    torch.testing.assert_close(logits_of(found), logits_of(resolve(str(folder))), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_matrices_have_the_type_that_was_asked_for(kind: str, tmp_path) -> None:
    tensors = export(saved(tmp_path / "model", "llama"), tmp_path / "m.gguf", "--type", kind).gguf.tensors
    assert tensors["blk.1.ffn_down.weight"].type_name == kind.upper()
    assert tensors["blk.1.attn_norm.weight"].type_name == "F32"
    assert tensors["output.weight"].type_name == ("Q8_0" if kind[:2] in ("q4", "q5") else kind.upper())


def test_what_has_the_type_is_not_rounded_anew(tmp_path) -> None:
    first = export(saved(tmp_path / "model", "llama"), tmp_path / "a.gguf", "--type", "q4_1")
    second = export(tmp_path / "a.gguf", tmp_path / "b.gguf", "--type", "q4_1")
    for name, tensor in first.gguf.tensors.items():
        assert np.array_equal(tensor.blocks, second.gguf.tensors[name].blocks), name
    assert second.gguf.metadata["tokenizer.ggml.tokens"] == first.gguf.metadata["tokenizer.ggml.tokens"]


def test_an_adapter_is_merged(tmp_path) -> None:
    torch.set_num_threads(1)
    (tmp_path / "model").mkdir()
    save_tiny_llm(tmp_path / "model")
    with_a_merge(tmp_path / "model")
    expected = make_adapter(tmp_path / "model", tmp_path / "a", target_modules="all-linear", use_dora=True)
    found = export(tmp_path / "a", tmp_path / "m.gguf", "--type", "f32")
    torch.testing.assert_close(logits_of(found), expected, atol=1e-4, rtol=1e-4)


def test_an_adapter_stays_beside_the_blocks_of_a_file(tmp_path) -> None:
    torch.set_num_threads(1)
    (tmp_path / "model").mkdir()
    save_tiny_llm(tmp_path / "model")
    with_a_merge(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "m.gguf", "--type", "q8_0")
    make_adapter(tmp_path / "model", tmp_path / "a", target_modules="all-linear", modules_to_save=["lm_head"])
    answers = []
    for native in (None, False):
        llm = LLM(
            str(tmp_path / "m.gguf"), adapter=str(tmp_path / "a"), dtype="float32", device="cpu", threads=1,
            max_model_len=64, native=native,
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        answers.append(llm.generate([PROMPT], params)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["smollm", "gpt-2", "qwen2", "llama-bpe", "tekken"])
def test_a_way_to_cut_text_is_known_by_what_it_does(name: str) -> None:
    known = PRE_TOKENIZERS[name]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    cuts = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in known.patterns]
    last = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*cuts, last])
    if known.nfc:
        backend.normalizer = tokenizers.normalizers.NFC()
    assert pre_tokenizer_name(backend, known.ignore_merges, "it") == name
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match=r"llama\.cpp could not do the same"):
        pre_tokenizer_name(backend, known.ignore_merges, "it")


def test_mistakes_are_one_line(tmp_path) -> None:
    folder = saved(tmp_path / "model", "llama")
    for options, words in (
        (("--gguf", "--type", "q6_kk"), "--type q6_kk cannot be written"),
        (("--type", "f16"), "give --gguf"),
    ):
        done = run_here("export", *options, str(folder), "-o", str(tmp_path / "m.gguf"))
        assert done.returncode == 2 and words in done.stderr
    (folder / "tokenizer.json").unlink()
    done = run_here("export", "--gguf", str(folder), "-o", str(tmp_path / "m.gguf"))
    assert done.returncode == 2 and "no tokenizer.json" in done.stderr
    assert not list(tmp_path.glob("*m.gguf"))


@pytest.mark.prove
@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen2", "qwen3", "gpt2", "llama 3"])
def test_llama_cpp_draws_the_engine_s_greedy_tokens(family: str, tmp_path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    changes = {"rope_scaling": LLAMA3} if family == "llama 3" else {}
    folder = saved(tmp_path / "model", family.split()[0], **changes)
    path = tmp_path / "m.gguf"
    export(folder, path, "--type", "f32")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    llm = LLM(str(folder), dtype="float32", device="cpu", threads=1, max_model_len=64)
    ours = list(llm.generate([PROMPT], params)[0].outputs[0].token_ids)
    theirs = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, verbose=False)
    drawn = theirs.generate(PROMPT, temp=0.0, top_k=1, repeat_penalty=1.0)
    assert [next(drawn) for _ in ours] == ours
    text = "Hello 12345 it's\n\n é 你好 <|im_end|>"
    own = llm.tokenizer.encode(text, parse_special=True)
    assert theirs.tokenize(text.encode(), add_bos=False, special=True) == own
    assert GGUFFile.open(path).metadata["tokenizer.chat_template"] == theirs.metadata["tokenizer.chat_template"]
