"""GGUF files of random 4-bit weights in the shapes of larger models, with SmolLM2's tokenizer.

Values do not matter for speed; random tokens come out. Each matrix is of the block type Q4_0, embeddings and head too;
norms are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BLOCK, BLOCK_BYTES = 32, 18
"""Numbers and bytes of a block of Q4_0."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder, and its architecture as GGUF names it."""

    architecture: str
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    experts: int = 0
    used: int = 0

    def matrices(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of a layer's matrices."""
        q, kv = self.heads * self.head, self.kv_heads * self.head
        yield from (("attn_q", (q, self.dim)), ("attn_k", (kv, self.dim)), ("attn_v", (kv, self.dim)))
        yield "attn_output", (self.dim, q)
        stack, end = ((self.experts,), "_exps") if self.experts else ((), "")
        yield from ((f"ffn_{name}{end}", (*stack, self.ffn, self.dim)) for name in ("gate", "up"))
        yield f"ffn_down{end}", (*stack, self.dim, self.ffn)


SHAPES = {
    "1.7b": Shape("llama", 2048, 24, 32, 32, 64, 8192),
    "4b": Shape("qwen3", 2560, 36, 32, 8, 128, 9728),
    "mixture": Shape("qwen3moe", 2048, 16, 16, 16, 128, 1024, experts=64, used=8),
}
"""SmolLM2-1.7B, Qwen3-4B, and OLMoE-1B-7B's sizes: 64 experts, of which a token uses 8."""


def write(name: str, folder: Path) -> Path:
    """Write the file of a shape, and return its path.

    Raises:
        ValueError: an unknown shape.
    """
    if name not in SHAPES:
        raise ValueError(f"no shape {name!r}; choose from {', '.join(SHAPES)}")
    import gguf

    from transect.checkpoints.resolve import resolve

    shape, path = SHAPES[name], folder / f"{name}.gguf"
    source = gguf.GGUFReader(str(resolve("smollm2-135m").path))
    writer = gguf.GGUFWriter(str(path), shape.architecture)
    for field in source.fields.values():
        if field.name.startswith("tokenizer."):
            kind = field.types[0]
            writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    vocab = len(source.fields["tokenizer.ggml.tokens"].contents())
    writer.add_block_count(shape.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.dim)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.ffn)
    random = np.random.default_rng(0)

    def matrix(tensor: str, sizes: tuple[int, ...]) -> None:
        *outer, columns = sizes
        blocks = random.integers(0, 256, (*outer, columns // BLOCK, BLOCK_BYTES), dtype=np.uint8)
        scale = np.float16(1 / (4.6 * columns**0.5))  # codes have a standard deviation of 4.6
        blocks[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
        writer.add_tensor(tensor, blocks.reshape(*outer, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def norm(tensor: str, size: int) -> None:
        writer.add_tensor(tensor, np.ones(size, np.float32))

    matrix("token_embd.weight", (vocab, shape.dim))
    matrix("output.weight", (vocab, shape.dim))
    norm("output_norm.weight", shape.dim)
    for layer in range(shape.layers):
        prefix = f"blk.{layer}."
        for tensor, sizes in shape.matrices():
            matrix(f"{prefix}{tensor}.weight", sizes)
        norm(f"{prefix}attn_norm.weight", shape.dim)
        norm(f"{prefix}ffn_norm.weight", shape.dim)
        if shape.architecture.startswith("qwen3"):
            norm(f"{prefix}attn_q_norm.weight", shape.head)
            norm(f"{prefix}attn_k_norm.weight", shape.head)
        if shape.experts:
            router = random.standard_normal((shape.experts, shape.dim), dtype=np.float32)
            writer.add_tensor(f"{prefix}ffn_gate_inp.weight", router)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
