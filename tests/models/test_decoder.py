"""The decoder as a module: names, tying, initialisation, the stack, and the same bits in any batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from transect.models.context import PagedContext, VarlenContext
from transect.models.decoder import Decoder
from transect.ops.opset import OpSet, resolve_ops
from transect.spec.hf import from_hf
from transect.spec.model import ModelConfig
from transect.spec.weights import parameter_count, weight_shapes

TINY = ModelConfig("llama", 61, 48, 2, 6, 2, 8, 72, 128, tied_embeddings=True)
CONFIGS = {
    "tied": TINY,
    "untied": dataclasses.replace(TINY, tied_embeddings=False),
    "qwen3": dataclasses.replace(TINY, architecture="qwen3", qk_norm=True),
    "qwen2": dataclasses.replace(TINY, architecture="qwen2", qkv_bias=True),
    "gpt2": from_hf({"model_type": "gpt2", "vocab_size": 61, "n_embd": 48, "n_head": 6, "n_positions": 64}),
}


def build(config: ModelConfig = TINY, ops: OpSet | None = None) -> Decoder:
    decoder = Decoder(config, ops=ops).init_weights(0.3, torch.Generator().manual_seed(0))
    return decoder.requires_grad_(False)


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_the_canonical_ones(name: str) -> None:
    config = CONFIGS[name]
    decoder = Decoder(config, device="meta", dtype=torch.bfloat16)
    state = {key: tuple(value.shape) for key, value in decoder.state_dict().items()}
    if config.tied_embeddings:
        assert state.pop("head.weight") == state["embed.weight"]
    assert state == weight_shapes(config)
    assert sum(weight.numel() for weight in decoder.parameters()) == parameter_count(config)
    assert all(weight.is_meta and weight.dtype == torch.bfloat16 for weight in decoder.parameters())


def test_tied_head_is_the_embedding_table() -> None:
    decoder = build()
    assert decoder.head.weight is decoder.embed.weight
    decoder.embed.weight = torch.nn.Parameter(torch.ones(61, 48))
    decoder.tie_weights()
    assert decoder.head.weight is decoder.embed.weight
    untied = Decoder(CONFIGS["untied"])
    untied.tie_weights()
    assert untied.head.weight is not untied.embed.weight


def test_init_draws_every_weight() -> None:
    decoder = Decoder(CONFIGS["gpt2"])
    for weight in decoder.parameters():
        weight.data.fill_(torch.nan)
    decoder.init_weights(0.02, torch.Generator().manual_seed(0))
    for name, weight in decoder.named_parameters():
        if name.endswith("bias"):
            assert (weight == 0).all()
        elif "norm" in name:
            assert (weight == 1).all()
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_model_filled_after_meta_has_the_right_angles() -> None:
    decoder = build()
    empty = Decoder(TINY, device="meta")
    empty.load_state_dict(decoder.state_dict(), assign=True)
    empty.tie_weights()
    context = VarlenContext(torch.tensor([0, 9], dtype=torch.int32))
    tokens = torch.arange(9)
    assert torch.equal(empty(tokens, context.positions(), context), decoder(tokens, context.positions(), context))


def test_stack_may_be_replaced() -> None:
    decoder = build()
    decoder.stack = lambda x_TD, positions_T, context: torch.zeros_like(x_TD)
    context = VarlenContext(torch.tensor([0, 3], dtype=torch.int32))
    assert (decoder(torch.arange(3), context.positions(), context) == 0).all()


def test_bfloat16_model_gives_float32_logits() -> None:
    decoder = build().bfloat16()
    context = VarlenContext(torch.tensor([0, 3], dtype=torch.int32))
    hidden = decoder(torch.arange(3), context.positions(), context)
    assert hidden.dtype == torch.bfloat16
    assert decoder.logits(hidden).dtype == torch.float32


def test_only_weights_hold_matrices() -> None:
    """What replaces a Weight replaces every matrix but the tables that are gathered from."""
    decoder = Decoder(CONFIGS["gpt2"], device="meta")
    matrices = {name for name, weight in decoder.named_parameters() if weight.ndim == 2}
    weights = {f"{name}.weight" for name, _ in decoder.weights()}
    assert weights - matrices == {"head.weight"}  # which is the embedding's table
    assert matrices - weights == {"embed.weight", "position_embed.weight"}


def serve(decoder: Decoder, sequences: list[list[int]], chunks: list[list[int]]) -> list[torch.Tensor]:
    """Logits of every token of each sequence; step i computes ``chunks[i][row]`` tokens of each row."""
    config = decoder.config
    columns = 8
    shape = (config.n_layers, len(sequences) * columns, config.n_kv_heads, 4, config.head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    tables = torch.arange(len(sequences) * columns, dtype=torch.int32).view(-1, columns)
    done = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in chunks:
        rows = [row for row, count in enumerate(step) if count]
        counts = [step[row] for row in rows]
        tokens = [token for row in rows for token in sequences[row][done[row] : done[row] + step[row]]]
        for row in rows:
            done[row] += step[row]
        starts = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
        lengths = torch.tensor([done[row] for row in rows], dtype=torch.int32)
        context = PagedContext(k_cache, v_cache, tables[rows], starts, lengths, decoder.ops)
        hidden = decoder(torch.tensor(tokens), context.positions(), context)
        for row, part in zip(rows, decoder.logits(hidden).split(counts), strict=True):
            logits[row].append(part)
    assert done == [len(tokens) for tokens in sequences]
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_bits_in_any_batch(name: str) -> None:
    """With the batch-invariant operators: alone or with others, in any chunks, logits are equal to the bit."""
    decoder = build(CONFIGS[name], resolve_ops(batch_invariant=True))
    sequences = [[(7 * i + 13 * row) % 61 for i in range(length)] for row, length in enumerate((23, 9, 30))]
    together = serve(
        decoder, sequences, [[10, 0, 1], [1, 5, 1], [0, 1, 20], [5, 1, 1], [1, 1, 1], [1, 1, 1], [5, 0, 5]]
    )
    for row, tokens in enumerate(sequences):
        for chunks in ([[len(tokens)]], [[1]] * len(tokens), [[5], [len(tokens) - 5]]):
            assert torch.equal(serve(decoder, [tokens], chunks)[0], together[row]), (row, chunks)


def test_contexts_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens must be a vector of int32.*torch\.int64 of shape \[2\]"):
        VarlenContext(torch.tensor([0, 3]))
    int32 = {"dtype": torch.int32}
    with pytest.raises(ValueError, match="k_cache and v_cache must be"):
        PagedContext(
            torch.zeros(1, 2, 3, 4, 5),
            torch.zeros(1, 2, 3, 4, 6),
            torch.zeros(1, 1, **int32),
            torch.tensor([0, 1], **int32),
            torch.ones(1, **int32),
        )
