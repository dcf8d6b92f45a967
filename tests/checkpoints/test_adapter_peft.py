"""Adapters in PEFT's layout: what PEFT made computes here what it computes there."""

import dataclasses
import json

import pytest
import torch
from peft_models import logits_of_model, make_adapter
from tiny_checkpoints import make_model
from tiny_llm import save_tiny_llm
from transformers import GPT2Config, GPT2LMHeadModel, Phi3Config, Phi3ForCausalLM

from transect.checkpoints.adapter_peft import read_adapter, write_adapter
from transect.checkpoints.adapter_start import as_plain_lora
from transect.checkpoints.hf_out import save_hf
from transect.checkpoints.load import load_model, stored_weights
from transect.checkpoints.peft_config import read_header
from transect.checkpoints.resolve import resolve
from transect.models.native import NativeStack
from transect.models.staging import dense_values
from transect.models.weights.adapted import Adapted

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS = {
    "lora": {"target_modules": ATTENTION},
    "rslora": {"target_modules": "all-linear", "use_rslora": True},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "modules to save": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "tables": {"target_modules": ["v_proj", "embed_tokens", "lm_head"]},
    "patterns": {
        "target_modules": ATTENTION,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"1.self_attn.v_proj": 3},
    },
    "some layers": {"target_modules": r".*\.1\..*(up|down)_proj"},
    "pissa": {"target_modules": [*ATTENTION, "lm_head"], "init_lora_weights": "pissa", "rank_pattern": {"q_proj": 2}},
    "olora": {"target_modules": "all-linear", "init_lora_weights": "olora", "use_rslora": True},
    "pissa and dora": {"target_modules": ATTENTION, "init_lora_weights": "pissa", "use_dora": True},
    "orthogonal": {"target_modules": ATTENTION, "init_lora_weights": "orthogonal"},
}


def our_logits(source, native=False, **options):
    return logits_of_model(load_model(source, dtype="float32", native=native, **options))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_tiny_llm(folder)
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    save_tiny_llm(folder, tie_word_embeddings=True)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_peft_gives_its_logits(kind: str, base, tmp_path) -> None:
    expected = make_adapter(base, tmp_path, **KINDS[kind])
    torch.testing.assert_close(our_logits(resolve(str(base), adapter=str(tmp_path))), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("kind", ["modules to save", "tables"])
def test_tied_tables_become_two_where_peft_makes_two(kind: str, tied, tmp_path) -> None:
    expected = make_adapter(tied, tmp_path, **KINDS[kind])
    source = resolve(str(tied), adapter=str(tmp_path))
    assert not source.config.tied_embeddings
    torch.testing.assert_close(our_logits(source), expected, atol=1e-4, rtol=1e-4)


def test_gpt_2_s_joined_matrix_is_taken_apart_and_put_together(tmp_path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    expected = make_adapter(tmp_path / "gpt2", tmp_path / "a", target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    source = resolve(str(tmp_path / "gpt2"), adapter=str(tmp_path / "a"))
    torch.testing.assert_close(our_logits(source), expected, atol=1e-4, rtol=1e-4)
    (tmp_path / "b").mkdir()
    stored = read_adapter(tmp_path / "a", source.config)
    write_adapter(tmp_path / "b", stored, source.config, base=str(tmp_path / "gpt2"))
    again = resolve(str(tmp_path / "gpt2"), adapter=str(tmp_path / "b"))
    torch.testing.assert_close(our_logits(again), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_matrices_that_peft_joins_are_decomposed_as_one(kind: str, tmp_path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Phi3Config(vocab_size=300, num_hidden_layers=2, pad_token_id=0, **sizes)
    Phi3ForCausalLM(config).save_pretrained(tmp_path / "phi3")
    settings = {"target_modules": ["qkv_proj", "gate_up_proj"], "init_lora_weights": kind}
    expected = make_adapter(tmp_path / "phi3", tmp_path / "a", **settings)
    source = resolve(str(tmp_path / "phi3"), adapter=str(tmp_path / "a"))
    torch.testing.assert_close(our_logits(source), expected, atol=1e-4, rtol=1e-4)


def test_the_same_adapter_has_the_same_bytes(tmp_path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    make_adapter(tmp_path / "gpt2", tmp_path / "a", target_modules=["c_attn"], fan_in_fan_out=True)
    source = resolve(str(tmp_path / "gpt2"), adapter=str(tmp_path / "a"))
    adapter = read_adapter(tmp_path / "a", source.config)
    files = set()
    for number in range(20):
        (tmp_path / str(number)).mkdir()
        write_adapter(tmp_path / str(number), adapter, source.config, base="gpt2")
        files.add((tmp_path / str(number) / "adapter_model.safetensors").read_bytes())
    assert len(files) == 1
    assert len(read_header(tmp_path / "0")[1]) == 3
    again = read_adapter(tmp_path / "0", source.config)
    assert all(torch.equal(again.factors[name].b, low.b) for name, low in adapter.factors.items())


def test_a_start_in_the_base_needs_the_base_s_own_numbers(base, tmp_path) -> None:
    make_adapter(base, tmp_path / "a", **KINDS["pissa"])
    source = resolve(str(base))
    state = {name: dense_values(stored.read()) for name, stored in stored_weights(source)}
    (tmp_path / "packed").mkdir()
    save_hf(state, source.config, tmp_path / "packed", quantization="fp8")
    with pytest.raises(ValueError, match=r"is quantized here: .*merge_and_unload"):
        our_logits(resolve(str(tmp_path / "packed"), adapter=str(tmp_path / "a")))
    adapter = read_adapter(tmp_path / "a", source.config)
    one_table = dataclasses.replace(source.config, tied_embeddings=True)
    with pytest.raises(ValueError, match="on a head that is tied"):
        as_plain_lora(adapter, iter(()), one_table)


def test_an_adapter_of_shared_experts_beside_packed_weights(tmp_path) -> None:
    """The C++ layers have no room for it, so that layers run one by one."""
    widths = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "vocab_size": 300}
    make_model("qwen2_moe", **widths).save_pretrained(tmp_path / "m")
    make_adapter(tmp_path / "m", tmp_path / "a", target_modules=r".*shared_expert\.(up|down)_proj")
    plain, source = (resolve(str(tmp_path / "m"), adapter=each) for each in (None, str(tmp_path / "a")))
    changes = [
        our_logits(source, **how) - our_logits(plain, **how) for how in ({}, {"native": True, "quantization": "int8"})
    ]
    assert (changes[1] - changes[0]).norm() < 0.5 * changes[0].norm()
    kinds = [
        type(load_model(each, dtype="float32", quantization="int8").stack) is NativeStack for each in (plain, source)
    ]
    assert kinds == [True, False]


def test_an_adapter_s_directory_stands_for_model_and_adapter(base, tmp_path) -> None:
    make_adapter(base, tmp_path, **KINDS["lora"])
    source = resolve(str(tmp_path))
    assert source.path == base.resolve() and source.adapter is not None
    with pytest.raises(ValueError, match="is an adapter already"):
        resolve(str(tmp_path), adapter=str(tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "LOHA"}, "'LOHA' are not supported"),
        ({"bias": "all"}, 'bias = "all" is not supported'),
        ({"use_qalora": True}, "use_qalora"),
        ({"use_dora": True}, "magnitudes are missing"),
        ({"r": "many"}, "wrong type"),
        ({"init_lora_weights": "pissa_niter_4"}, 'init_lora_weights = "pissa_niter_4".*merge_and_unload'),
        ({"init_lora_weights": "loftq"}, 'init_lora_weights = "loftq"'),
        ({"init_lora_weights": "lora_ga"}, 'init_lora_weights = "lora_ga"'),
    ],
)
def test_what_cannot_be_used_is_refused(change, words: str, base, tmp_path) -> None:
    make_adapter(base, tmp_path, **KINDS["lora"])
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=words):
        our_logits(resolve(str(base), adapter=str(tmp_path)))


def test_an_adapter_of_another_model_is_refused(base, tmp_path) -> None:
    save_tiny_llm(tmp_path / "other", hidden_size=32)
    make_adapter(base, tmp_path / "a", **KINDS["lora"])
    with pytest.raises(ValueError, match="the adapter is of another model"):
        our_logits(resolve(str(tmp_path / "other"), adapter=str(tmp_path / "a")))
    source = resolve(str(base), adapter=str(tmp_path / "a"))
    fewer = dataclasses.replace(source.config, n_layers=1)
    with pytest.raises(ValueError, match=r"no module 'model\.layers\.1"):
        read_adapter(tmp_path / "a", fewer)


def test_damaged_and_missing_files_are_named(base, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        resolve(str(base), adapter=str(tmp_path))
    make_adapter(base, tmp_path, **KINDS["lora"])
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": 3}))
    with pytest.raises(ValueError, match=r"adapter_config\.json has a setting of the wrong type \(base_model"):
        resolve(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"12345678{")
    with pytest.raises(ValueError, match="is damaged"):
        resolve(str(base), adapter=str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "bits"), [("lora", "int4"), ("dora", "int4"), ("tables", "int4"), ("lora", "fp8"), ("dora", "int8")]
)
def test_over_a_base_in_few_bits_it_stays_beside(kind: str, bits: str, tmp_path) -> None:
    torch.set_num_threads(1)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    save_tiny_llm(tmp_path / "model", **sizes)
    make_adapter(tmp_path / "model", tmp_path / "a", **KINDS[kind])
    source = resolve(str(tmp_path / "model"), adapter=str(tmp_path / "a"))
    try:
        packed = load_model(source, dtype="float32", native=True, quantization=bits)
    except ValueError as reason:
        pytest.skip(str(reason))
    adapted = {name for name, weight in packed.weights() if isinstance(weight, Adapted)}
    assert adapted == {name for name in read_adapter(tmp_path / "a", source.config).factors if "layers" in name}
    assert packed.layers[0].attention.v.base.format.bits <= {"int4": 5, "fp8": 9, "int8": 10}[bits]
    if bits != "int4":  # torch rounds the sum of base and adapter to 8 bits
        plain = logits_of_model(load_model(source, dtype="float32", native=False))
        bare = logits_of_model(load_model(resolve(str(tmp_path / "model")), dtype="float32", native=False))
        assert 0 < (logits_of_model(packed) - plain).norm() < 0.3 * (bare - plain).norm()
        return
    merged = logits_of_model(load_model(source, dtype="float32", native=False, quantization="int4"))
    torch.testing.assert_close(logits_of_model(packed), merged, atol=2e-4, rtol=2e-4)
