"""The decoder against transformers, in float32, on tiny random models of every architecture.

Logits must agree to 1e-4 (they are of the order of 10), and greedy tokens must be the same, 64 with ``--prove``: by
whole sequences (varlen), and by chunked prefill and decode of two sequences in one paged batch whose unowned slots hold
NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
import transformers
from effort import proving
from safetensors.torch import load_file, save_file

from transect.checkpoints.load import load_model
from transect.checkpoints.resolve import resolve
from transect.models.context import PagedContext, VarlenContext
from transect.models.decoder import Decoder
from transect.spec.hf import from_hf
from transect.spec.model import ModelConfig, RopeConfig
from transect.spec.weights import weight_shapes

NEW_TOKENS = 64 if proving() else 24
PROMPT_LENGTHS = (37, 5)
BLOCK_SIZE = 4
CHUNK = 7

SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,  # one plane of each kind: kept, blended, divided
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def rope(kind: str, **values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, **values}}


def make_configs() -> dict[str, transformers.PreTrainedConfig]:
    t = transformers
    head16 = {"head_dim": 16}
    return {
        "llama2": t.LlamaConfig(**SMALL | {"num_key_value_heads": 4}, **rope("default", rope_theta=10000.0)),
        "llama3": t.LlamaConfig(**SMALL, **head16, **rope("default", rope_theta=500000.0)),
        "llama3.1": t.LlamaConfig(**SMALL, rope_parameters=LLAMA3),
        "llama-linear": t.LlamaConfig(**SMALL, **rope("linear", rope_theta=10000.0, factor=4.0)),
        "llama-yarn": t.LlamaConfig(**SMALL, **head16, rope_parameters=YARN),
        "llama-bias": t.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
        "smollm2": t.LlamaConfig(
            **SMALL | {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3},
            tie_word_embeddings=True,
            **rope("default", rope_theta=100000.0),
        ),
        "mistral": t.MistralConfig(**SMALL, sliding_window=9),
        "qwen2": t.Qwen2Config(**SMALL, **rope("default", rope_theta=1000000.0), tie_word_embeddings=True),
        "qwen2-window-yarn": t.Qwen2Config(
            **SMALL,
            use_sliding_window=True,
            sliding_window=6,
            max_window_layers=1,
            rope_parameters=YARN | {"truncate": False, "beta_fast": 16.0},
        ),
        "qwen3": t.Qwen3Config(**SMALL, **head16, **rope("default", rope_theta=1000000.0)),
        "mixtral": t.MixtralConfig(**SMALL, num_local_experts=4, **rope("default", rope_theta=10000.0)),
        "qwen2-moe": t.Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=40, mlp_only_layers=[1]),
        "qwen3-moe": t.Qwen3MoeConfig(**SMALL, **head16, **EXPERTS, norm_topk_prob=True),
        "olmoe": t.OlmoeConfig(**SMALL, num_experts=6, num_experts_per_tok=2, eos_token_id=2),
        "dots1": t.Dots1Config(
            **SMALL | {"num_key_value_heads": 4},
            moe_intermediate_size=24,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            sliding_window=None,
        ),
        "gpt-oss": t.GptOssConfig(
            **SMALL | {"num_attention_heads": 4},
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=7,
            rope_parameters=YARN | {"truncate": False},
        ),
        "gemma2": t.Gemma2Config(
            **SMALL,
            head_dim=16,
            sliding_window=7,
            query_pre_attn_scalar=9,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=8.0,
        ),
        "gemma3": t.Gemma3TextConfig(
            **SMALL,
            head_dim=16,
            sliding_window=7,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "phi3": t.Phi3Config(**SMALL, pad_token_id=0, eos_token_id=2),
        "olmo2": t.Olmo2Config(**SMALL, eos_token_id=2),
        "granite": t.GraniteConfig(
            **SMALL, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.6, attention_multiplier=0.4
        ),
        "smollm3": t.SmolLM3Config(**SMALL, no_rope_layers=[1, 0, 1], bos_token_id=1, eos_token_id=2, pad_token_id=0),
        "llama4": t.Llama4TextConfig(
            **SMALL,
            head_dim=16,
            intermediate_size_mlp=40,
            num_local_experts=4,
            num_experts_per_tok=1,
            moe_layers=[0, 2],
            no_rope_layers=[1, 0, 1],
            attention_chunk_size=16,
            floor_scale=8,
            attn_scale=0.5,
            rope_parameters=LLAMA3,
        ),
        "gpt2": t.GPT2Config(vocab_size=101, n_embd=32, n_layer=3, n_head=4, n_positions=256),
        "gpt2-exact-gelu": t.GPT2Config(
            vocab_size=101, n_embd=32, n_layer=3, n_head=4, n_positions=256, n_inner=40, activation_function="gelu"
        ),
    }


FAMILIES = tuple(make_configs())


def spread_weights(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough that everything in the model shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1 or "_bias" in name:
                centred = "bias" in name or "sinks" in name or "Gemma" in type(model).__name__
                weight.copy_(0.3 * noise if centred else 1 + 0.3 * noise)
            elif "wpe" in name:
                weight.copy_(0.5 * noise)
            elif "embed" in name or "wte" in name or "lm_head" in name:
                weight.copy_(noise)
            else:
                weight.copy_(noise * 1.5 / 32**0.5)


def canonical(state: dict[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """A transformers state dict under the decoder's names: written anew, so that loading is not its own judge."""
    if config.architecture == "gpt2":
        out = {
            "embed.weight": state["transformer.wte.weight"],
            "position_embed.weight": state["transformer.wpe.weight"],
        }
        pairs = {"ln_1": "attention_norm", "ln_2": "mlp_norm", "attn.c_proj": "attention.o"}
        pairs |= {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
        for layer in range(config.n_layers):
            theirs, ours = f"transformer.h.{layer}.", f"layers.{layer}."
            for part in ("weight", "bias"):
                for old, new in pairs.items():
                    value = state[f"{theirs}{old}.{part}"]
                    out[f"{ours}{new}.{part}"] = value.T if value.ndim == 2 else value
                fused = state[f"{theirs}attn.c_attn.{part}"]
                for name, value in zip("qkv", fused.chunk(3, dim=-1), strict=True):
                    out[f"{ours}attention.{name}.{part}"] = value.T if value.ndim == 2 else value
        for part in ("weight", "bias"):
            out[f"norm.{part}"] = state[f"transformer.ln_f.{part}"]
    else:
        renames = {
            "model.layers.": "layers.",
            "feed_forward.": "mlp.",
            "self_attn.": "attention.",
            "_proj": "",
            "model.norm": "norm",
        }
        renames |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
        renames |= {"model.embed_tokens": "embed", "lm_head": "head"}
        if config.norm_order != "pre":
            renames |= {"post_attention_layernorm": "attention_post_norm"}
            renames |= {"pre_feedforward_layernorm": "mlp_norm", "post_feedforward_layernorm": "mlp_post_norm"}
        state = llama4(state, config) if config.architecture == "llama4_text" else apart(state, config)
        out = {}
        for name, value in (state if config.moe is None else with_experts(state, config)).items():
            for old, new in renames.items():
                name = name.replace(old, new)
            out[name] = value
        if config.tied_embeddings:
            del out["head.weight"]
    return out


def llama4(state: dict[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Llama 4's rows of q and k, which turn in neighbouring pairs, with the first of all pairs before the second; its
    stacks of experts, one below the other and turned round."""
    out = {}
    for name, value in state.items():
        if "q_proj" in name or "k_proj" in name:
            first, second = value.unflatten(0, (-1, config.head_dim // 2, 2)).unbind(2)
            out[name] = torch.stack([first, second], 1).flatten(0, 2)
        elif name.endswith("experts.gate_up_proj"):
            for part, own in zip(("gate", "up"), value.chunk(2, dim=-1), strict=True):
                out[name.replace("experts.gate_up_proj", f"experts_{part}.weight")] = own.mT.flatten(0, 1)
        elif name.endswith("experts.down_proj"):
            out[name.replace("experts.down_proj", "experts_down.weight")] = value.mT.flatten(0, 1)
        else:
            out[name.replace("shared_expert.", "shared_")] = value
    return out


def apart(state: dict[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """What Phi-3 keeps in one matrix as several."""
    out = {}
    for name, value in state.items():
        if "qkv_proj" in name:
            parts = value.split((config.q_dim, config.kv_dim, config.kv_dim))
            out |= {name.replace("qkv_proj", f"{part}_proj"): own for part, own in zip("qkv", parts, strict=True)}
        elif name.endswith("mlp.gate_up_proj.weight"):
            for part, own in zip(("gate", "up"), value.chunk(2), strict=True):
                out[name.replace("gate_up_proj", f"{part}_proj")] = own
        else:
            out[name] = value
    return out


def with_experts(state: dict[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Experts one below the other, routers under their names here; attention as it is."""
    out = {}
    for name, value in state.items():
        if config.architecture == "gpt_oss" and ".experts." in name:
            layer, _, what = name.partition("experts.")
            kind = "bias" if what.endswith("_bias") else "weight"
            value = value if kind == "bias" else value.mT
            if what.startswith("gate_up"):
                out[f"{layer}experts_gate.{kind}"] = value[:, ::2].flatten(0, 1)
                out[f"{layer}experts_up.{kind}"] = value[:, 1::2].flatten(0, 1)
            else:
                out[f"{layer}experts_down.{kind}"] = value.flatten(0, 1)
        elif name.endswith("experts.gate_up_proj"):
            layer = name.removesuffix("experts.gate_up_proj")
            gate, up = value.chunk(2, dim=1)
            out |= {f"{layer}experts_gate.weight": gate.flatten(0, 1), f"{layer}experts_up.weight": up.flatten(0, 1)}
        elif name.endswith("experts.down_proj"):
            out[name.replace("experts.down_proj", "experts_down.weight")] = value.flatten(0, 1)
        else:
            name = name.replace("mlp.gate.e_score_correction_bias", "mlp.router.score_bias")
            name = name.replace("mlp.gate.", "mlp.router.").replace("mlp.shared_expert_gate", "mlp.shared_router")
            out[name.replace("mlp.shared_experts.", "mlp.shared_").replace("mlp.shared_expert.", "mlp.shared_")] = value
    return out


@functools.cache
def theirs(family: str) -> transformers.PreTrainedModel:
    config = make_configs()[family]
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    spread_weights(model, seed=len(family))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)).flip(0))
    return model


def build(family: str, **changes: object) -> Decoder:
    """Our model with their weights; ``changes`` are made to the configuration they would have chosen."""
    model = theirs(family)
    config = from_hf(model.config.to_dict())
    weights = canonical(model.state_dict(), config)
    assert {name: tuple(value.shape) for name, value in weights.items()} == weight_shapes(config)
    decoder = Decoder(dataclasses.replace(config, **changes))
    decoder.load_state_dict(weights, strict=False)
    return decoder.requires_grad_(False)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 101, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@functools.cache
def expected(family: str) -> list[tuple[list[int], torch.Tensor]]:
    """For each prompt, prompt + greedy tokens, and the logits of every position."""
    results = []
    for prompt in prompts():
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                tokens.append(int(theirs(family)(torch.tensor([tokens])).logits[0, -1].argmax()))
            results.append((tokens, theirs(family)(torch.tensor([tokens])).logits[0]))
    return results


def varlen_logits(decoder: Decoder, documents: list[list[int]]) -> torch.Tensor:
    ends = torch.tensor([0, *(len(document) for document in documents)]).cumsum(0, dtype=torch.int32)
    context = VarlenContext(ends, decoder.ops)
    tokens = torch.tensor([token for document in documents for token in document])
    return decoder.logits(decoder(tokens, context.positions(), context))


class Pool:
    """A paged cache full of NaN, and sequences that take scattered blocks of it as they grow."""

    def __init__(self, decoder: Decoder, sequences: int, longest: int) -> None:
        config = decoder.config
        self.decoder = decoder
        columns = -(-longest // BLOCK_SIZE)
        shape = (config.n_layers, sequences * columns + 1, config.n_kv_heads, BLOCK_SIZE, config.head_dim)
        self.k = torch.full(shape, torch.nan)
        self.v = torch.full(shape, torch.nan)
        order = torch.randperm(sequences * columns + 1, generator=torch.Generator().manual_seed(2))
        self.tables = order[: sequences * columns].view(sequences, columns).to(torch.int32)
        self.lengths = [0] * sequences

    def step(self, rows: dict[int, list[int]]) -> torch.Tensor:
        """Run the next tokens of some sequences in one batch; logits of the last token of each, by row."""
        for row, tokens in rows.items():
            self.lengths[row] += len(tokens)
        which = list(rows)
        starts = torch.tensor([0, *(len(tokens) for tokens in rows.values())]).cumsum(0, dtype=torch.int32)
        lengths = torch.tensor([self.lengths[row] for row in which], dtype=torch.int32)
        context = PagedContext(self.k, self.v, self.tables[which], starts, lengths, self.decoder.ops)
        tokens = torch.tensor([token for row in rows.values() for token in row])
        hidden = self.decoder(tokens, context.positions(), context)
        return self.decoder.logits(hidden[starts[1:].long() - 1])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str) -> None:
    sequences = expected(family)
    ours = varlen_logits(build(family), [tokens for tokens, _ in sequences])
    reference = torch.cat([logits for _, logits in sequences])
    assert reference.std() > 1
    assert (ours - reference).abs().max() <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_varlen(family: str) -> None:
    decoder = build(family)
    sequences = prompts()
    for _ in range(NEW_TOKENS):
        logits = varlen_logits(decoder, sequences)
        end = 0
        for tokens in sequences:
            end += len(tokens)
            tokens.append(int(logits[end - 1].argmax()))
    assert sequences == [tokens for tokens, _ in expected(family)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_paged(family: str) -> None:
    decoder = build(family)
    sequences = prompts()
    pool = Pool(decoder, len(sequences), max(PROMPT_LENGTHS) + NEW_TOKENS)
    want = [tokens for tokens, _ in expected(family)]
    while any(pool.lengths[row] < len(want[row]) for row in range(len(sequences))):
        # The short prompt decodes while chunks of the long one are still coming in.
        rows = {}
        for row, tokens in enumerate(sequences):
            if pool.lengths[row] < len(want[row]):
                rows[row] = tokens[pool.lengths[row] : pool.lengths[row] + CHUNK]
        logits = pool.step(rows)
        for row, row_logits in zip(rows, logits, strict=True):
            reference = expected(family)[row][1][pool.lengths[row] - 1]
            assert (row_logits - reference).abs().max() <= 1e-4
            if pool.lengths[row] == len(sequences[row]) < len(want[row]):
                sequences[row].append(int(row_logits.argmax()))
    assert sequences == want


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama3.1", {"rope": RopeConfig(theta=500000.0)}),
        ("llama3.1", {"rope": RopeConfig(500000.0, "llama3", 8.0, 256, high_freq_factor=2.0)}),
        ("llama-linear", {"rope": RopeConfig(theta=10000.0)}),
        ("llama-yarn", {"rope": RopeConfig(theta=10000.0)}),
        ("llama-yarn", {"rope": RopeConfig(10000.0, "yarn", 4.0, 64, attention_factor=1.0)}),
        ("llama-bias", {"o_bias": False}),
        ("llama-bias", {"mlp_bias": False}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 10}),
        ("qwen2-window-yarn", {"full_attention_layers": ()}),
        ("qwen2", {"qkv_bias": False}),
        ("qwen3", {"qk_norm": False}),
        ("qwen3", {"norm_eps": 1e-2}),
        ("olmoe", {"qk_norm": False, "qk_norm_whole": False}),
        ("gpt-oss", {"attention_sinks": False}),
        ("gemma2", {"attention_softcap": None}),
        ("gemma2", {"logit_softcap": None}),
        ("gemma2", {"query_scale": None}),
        ("gemma3", {"local_rope": None}),
        ("gemma3", {"norm_offset": 0.5}),
        ("olmo2", {"norm_order": "pre"}),
        ("olmo2", {"qk_norm": False, "qk_norm_whole": False}),
        ("granite", {"residual_scale": 1.0}),
        ("granite", {"embed_scale": 1.0}),
        ("granite", {"logit_scale": 1.0}),
        ("smollm3", {"no_rope_layers": ()}),
        ("llama4", {"attention_chunk": None}),
        ("llama4", {"attention_temperature": None}),
        ("llama4", {"qk_l2_norm": False}),
        ("gpt2", {"activation": "gelu"}),
        ("gpt2", {"norm_eps": 1e-2}),
    ],
)
def test_parity_would_notice(family: str, changes: dict[str, object]) -> None:
    """Each feature that a family adds moves the logits of these models far more than parity allows."""
    sequences = expected(family)
    ours = varlen_logits(build(family, **changes), [tokens for tokens, _ in sequences])
    near = (ours - torch.cat([logits for _, logits in sequences])).abs().max() <= 1e-3
    assert not near  # NaN is not near either: norms at other places have no weights in the file


def test_float64_agrees_to_rounding() -> None:
    """The same weights in float64 stay within the rounding of float32 of the float32 logits."""
    decoder = build("qwen3")
    documents = prompts()
    single = varlen_logits(decoder, documents)
    double = varlen_logits(decoder.double(), documents)
    assert double.dtype == torch.float64
    assert 0 < (single - double).abs().max() < 1e-3


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_gradients_match(family: str) -> None:
    """The loss over packed documents has transformers' gradient for every weight."""
    documents = prompts()
    decoder = build(family).requires_grad_(True)
    model = theirs(family)
    model.zero_grad()
    total = torch.zeros(())
    for tokens in documents:
        total = total + torch.nn.functional.cross_entropy(
            model(torch.tensor([tokens])).logits[0, :-1], torch.tensor(tokens[1:]), reduction="sum"
        )
    total.backward()
    logits = varlen_logits(decoder, documents).split(list(PROMPT_LENGTHS))
    loss = torch.zeros(())
    for row, tokens in zip(logits, documents, strict=True):
        loss = loss + torch.nn.functional.cross_entropy(row[:-1], torch.tensor(tokens[1:]), reduction="sum")
    loss.backward()
    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    table = "transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    gradients["lm_head.weight"] = gradients[table]
    for name, gradient in canonical(gradients, decoder.config).items():
        ours = decoder.get_parameter(name).grad
        assert ours is not None
        # Without rotary a key bias shifts all scores of a query alike: its gradient is 0 but for rounding.
        assert (ours - gradient).norm() <= 1e-4 * gradient.norm().clamp(min=0.5), name
    model.zero_grad()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_loads(family: str, tmp_path: Path) -> None:
    """What transformers writes to disk, read by ``load_model``: the same logits."""
    theirs(family).save_pretrained(tmp_path)
    decoder = load_model(resolve(str(tmp_path)), dtype="float32", native=False)
    sequences = expected(family)
    ours = varlen_logits(decoder, [tokens for tokens, _ in sequences])
    assert (ours - torch.cat([logits for _, logits in sequences])).abs().max() <= 1e-4


@pytest.mark.parametrize("sharded", [False, True])
def test_a_head_of_its_own_where_config_json_says_tied(sharded: bool, tmp_path: Path) -> None:
    """transformers keeps both tables where their values differ."""
    model = theirs("smollm2")
    head = model.lm_head.weight + torch.eye(101, 36)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    for path in tmp_path.glob("*.safetensors"):  # they have no head, as it is tied
        tensors = load_file(path)
        if "model.embed_tokens.weight" in tensors:
            save_file(tensors | {"lm_head.weight": head}, path, {"format": "pt"})
            if sharded:
                index = tmp_path / "model.safetensors.index.json"
                listed = json.loads(index.read_text())
                listed["weight_map"]["lm_head.weight"] = path.name
                index.write_text(json.dumps(listed))
    source = resolve(str(tmp_path))
    assert not source.config.tied_embeddings
    decoder = load_model(source, dtype="float32", native=False)
    tokens = prompts()[0]
    with torch.no_grad():
        want = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor([tokens])).logits[0]
        assert (varlen_logits(decoder, [tokens]) - want).abs().max() <= 1e-4
        assert (theirs("smollm2")(torch.tensor([tokens])).logits[0] - want).abs().max() > 0.1
