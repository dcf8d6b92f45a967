"""The decoder against transformers, in float32, on tiny random models of every architecture.

Logits must agree to 1e-4 (they are of the order of 10), and greedy tokens must be the same, 64 with ``--prove``: by
whole sequences (varlen), and by chunked prefill and decode of two sequences in one paged batch whose unowned slots hold
NaN.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from effort import proving
from safetensors.torch import load_file, save_file
from tiny_checkpoints import tiny_values

from transect.checkpoints.hf import stored_hf
from transect.checkpoints.load import load_model
from transect.checkpoints.resolve import resolve
from transect.models.context import PagedContext, VarlenContext
from transect.models.decoder import Decoder
from transect.models.stored import read_all
from transect.spec.families.registry import families
from transect.spec.hf import from_hf
from transect.spec.model import RopeConfig
from transect.spec.weights import weight_shapes

NEW_TOKENS = 64 if proving() else 24
PROMPT_LENGTHS = (37, 5)
BLOCK_SIZE = 4
CHUNK = 7

SCALED = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256}  # fmt: skip
"""One plane of each kind: kept, blended, divided."""
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama3.1": ("llama", {"rope_parameters": SCALED}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("llama", {"head_dim": 16, "rope_parameters": YARN}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": (
        "llama",
        {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "qwen2-window-yarn": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "tie_word_embeddings": False,
         "rope_parameters": YARN | {"truncate": False, "beta_fast": 16.0}},
    ),
    "llama4-two-experts": ("llama4_text", {"num_experts_per_tok": 2, "rope_parameters": SCALED}),
    "gpt2-exact-gelu": ("gpt2", {"n_inner": 40, "activation_function": "gelu"}),
}  # fmt: skip
"""Further models of a family, by what differs from its tiny model."""


def make_config(family: str) -> transformers.PreTrainedConfig:
    name, changes = VARIANTS.get(family, (family, {}))
    values = tiny_values(name, **changes)
    return transformers.CONFIG_MAPPING[values.pop("model_type")](**values)


FAMILIES = (*families(), *VARIANTS)


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


def canonical(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of a transformers model under the decoder's names. Values at a wrong place show in the logits."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return dict(read_all(stored_hf(folder, from_hf(model.config.to_dict()))))


@functools.cache
def theirs(family: str) -> transformers.PreTrainedModel:
    config = make_config(family)
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
    weights = canonical(model)
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
        ("gpt_oss", {"attention_sinks": False}),
        ("gemma2", {"attention_softcap": None}),
        ("gemma2", {"logit_softcap": None}),
        ("gemma2", {"query_scale": None}),
        ("gemma3_text", {"local_rope": None}),
        ("gemma3_text", {"norm_offset": 0.5}),
        ("olmo2", {"norm_order": "pre"}),
        ("olmo2", {"qk_norm": False, "qk_norm_whole": False}),
        ("granite", {"residual_scale": 1.0}),
        ("granite", {"embed_scale": 1.0}),
        ("granite", {"logit_scale": 1.0}),
        ("smollm3", {"no_rope_layers": ()}),
        ("llama4_text", {"attention_chunk": None}),
        ("llama4_text", {"attention_temperature": None}),
        ("llama4_text", {"qk_l2_norm": False}),
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
    gradients = copy.deepcopy(model)
    for weight, found in zip(gradients.parameters(), model.parameters(), strict=True):
        weight.data = found.grad
    for name, gradient in canonical(gradients).items():
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
