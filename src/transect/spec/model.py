"""Describe a model by one frozen configuration that fits every architecture of the decoder family.

``ModelConfig`` decides everything about ``Decoder``: the code has no class per architecture. It is plain Python (no
torch), so that planning and scheduling can lean on it. ``hf.py`` (a Hugging Face ``config.json``) and ``gguf.py`` (GGUF
metadata) translate from and to the files people have, by the records of ``families/``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .fields import LARGEST_INTEGER, shown
from .moe import MoEConfig

MAX_LAYERS = 4096

RopeScaling = Literal["none", "linear", "llama3", "yarn", "factors"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The frequencies of rotary position embedding.

    Pair i of a head of size d turns by ``theta ** (-2i / d)`` radians per position before scaling. Scaling stretches a
    model to longer contexts: ``linear`` divides every frequency by ``factor``; ``llama3`` only the low ones (as Llama
    3.1 does); ``yarn`` ramps between the two and multiplies cos and sin by ``attention_factor`` (Peng et al. 2023,
    arXiv:2309.00071); ``factors`` divides pair i by ``frequency_factors[i]`` (a GGUF ``rope_freqs`` tensor).
    """

    theta: float = 10000.0
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original_max_position: int = 0
    """Context length of the model before it was extended (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    """True if yarn rounds the borders of the ramp to whole pairs."""
    frequency_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.scaling not in ("none", "linear", "llama3", "yarn", "factors"):
            raise ValueError(
                f"rope scaling {self.scaling!r} is not supported; supported are: none, linear, llama3, yarn, factors"
            )
        for name in ("theta", "factor", "attention_factor", "beta_fast", "beta_slow"):
            _check_positive(f"rope {name}", getattr(self, name))
        if self.scaling in ("llama3", "yarn") and self.original_max_position <= 0:
            raise ValueError(f"rope scaling {self.scaling!r} needs original_max_position_embeddings greater than 0")
        if self.scaling == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "rope scaling 'llama3' needs 0 < low_freq_factor < high_freq_factor, "
                f"not {self.low_freq_factor} and {self.high_freq_factor}"
            )
        if self.scaling == "yarn" and self.theta == 1.0:
            raise ValueError("rope scaling 'yarn' needs a rope theta other than 1")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. Sizes are counts of elements; ``ValueError`` for any combination that cannot run."""

    architecture: str
    """Name of the family (``families/``), whose files it is read from and written to."""
    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    max_position: int
    """Longest sequence, prompt and output together, in tokens."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-6
    norm_order: Literal["pre", "post", "both"] = "pre"
    """Norms before attention and MLP, after them (before their output is added), or both."""
    norm_offset: float = 0.0
    """Number added to the weight of each norm (Gemma)."""
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated_mlp: bool = True
    """True for ``down(silu(gate(x)) * up(x))``, False for ``down(activation(up(x)))``."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """True for RMSNorm over each head of q and k, before rotary (Qwen3)."""
    qk_norm_whole: bool = False
    """True if that norm is over all heads of q, and all of k, together (OLMo)."""
    tied_embeddings: bool = False
    position: Literal["rope", "learned"] = "rope"
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None
    """Frequencies of the layers with a sliding window, if they differ (Gemma 3)."""
    no_rope_layers: tuple[int, ...] = ()
    """Layers that do not rotate (SmolLM3)."""
    query_scale: float | None = None
    """Factor of attention scores; None for ``head_dim ** -0.5``."""
    attention_softcap: float | None = None
    """Cap of attention scores: s becomes ``softcap * tanh(s / softcap)``; None for no cap."""
    qk_l2_norm: bool = False
    """True if rotated heads of q and k are divided by their root mean square (Llama 4)."""
    attention_chunk: int | None = None
    """Positions in a chunk: in layers with rotation a query sees only its own chunk (Llama 4)."""
    attention_temperature: tuple[float, int] | None = None
    """(a, f) of query scaling: in layers that do not rotate the query at position p is multiplied by ``1 + a log(1 +
    floor((p + 1) / f))`` (Nakanishi 2025, arXiv:2501.19399)."""
    attention_sinks: bool = False
    """True if a learned score for each head takes part in the softmax, without a value (gpt-oss)."""
    embed_scale: float = 1.0
    """Factor of embeddings."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual stream."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    sliding_window: int | None = None
    """Number of tokens that a query sees, including itself; None for all."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers that do not use the sliding window."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    moe: MoEConfig | None = None
    """Experts that replace the MLP; ``ffn_dim`` is then the width of layers without them."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "max_position"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ValueError(f"{name} must be a whole number greater than 0, not {value!r}")
            most = MAX_LAYERS if name == "n_layers" else LARGEST_INTEGER
            if value > most:
                raise ValueError(f"{name} must be at most {most}, not {shown(value)}")
        _check_positive("norm_eps", self.norm_eps)
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})")
        for name, value, allowed in (
            ("norm", self.norm, ("rmsnorm", "layernorm")),
            ("activation", self.activation, ("silu", "gelu", "gelu_tanh")),
            ("position", self.position, ("rope", "learned")),
            ("norm_order", self.norm_order, ("pre", "post", "both")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} {value!r} is not supported; supported are: {', '.join(allowed)}")
        if not self.gated_mlp and self.activation == "silu":
            raise ValueError("a plain MLP with activation 'silu' is not supported: plain ones use gelu or gelu_tanh")
        for name in ("query_scale", "attention_softcap", "logit_softcap"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        for name in ("embed_scale", "residual_scale", "logit_scale"):
            _check_positive(name, getattr(self, name))
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, not {self.head_dim}")
        if self.rope.scaling == "factors" and len(self.rope.frequency_factors) != self.head_dim // 2:
            raise ValueError(
                f"rope_freqs has {len(self.rope.frequency_factors)} numbers; head_dim {self.head_dim} needs "
                f"{self.head_dim // 2}"
            )
        if self.attention_chunk is not None and (self.attention_chunk <= 0 or self.sliding_window is not None):
            raise ValueError(f"attention_chunk must be greater than 0, without a window, not {self.attention_chunk}")
        if self.attention_temperature is not None:
            _check_positive("the floor of the attention temperature", self.attention_temperature[1])
        if self.moe is not None and not self.gated_mlp:
            raise ValueError("experts are gated MLPs: a plain MLP cannot be a mixture of experts")
        if self.sliding_window is not None and self.sliding_window <= 0:
            raise ValueError(f"sliding_window must be greater than 0 (or null for none), not {self.sliding_window}")

    @property
    def q_dim(self) -> int:
        """Width of all query heads together."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads (and of all value heads) together."""
        return self.n_kv_heads * self.head_dim

    @property
    def beyond_stacks(self) -> tuple[str, ...]:
        """Features that some stacks do not support; a stack refuses a model by the feature that it lacks."""
        found = {
            "experts": self.moe is not None,
            "a norm over all heads of q": self.qk_norm_whole,
            "norms after attention and MLP": self.norm_order != "pre",
            "an offset of norms": bool(self.norm_offset),
            "a gate with GELU": self.gated_mlp and self.activation != "silu",
            "rotary frequencies of sliding layers": self.local_rope is not None,
            "layers without positions": bool(self.no_rope_layers),
            "attention in chunks": self.attention_chunk is not None,
            "a norm after rotation": self.qk_l2_norm,
            "queries scaled by position": self.attention_temperature is not None,
            "soft-capped scores": self.attention_softcap is not None,
            "attention sinks": self.attention_sinks,
            "scaled embeddings": self.embed_scale != 1.0,
            "scaled residuals": self.residual_scale != 1.0,
            "scaled logits": self.logit_scale != 1.0 or self.logit_softcap is not None,
        }
        return tuple(name for name, there in found.items() if there)

    def mlp_width(self, layer: int) -> int:
        """Return the numbers of a token inside the MLP of a layer: of all its experts, and of shared ones."""
        moe = self.layer_moe(layer)
        return self.ffn_dim if moe is None else moe.per_token * moe.expert_dim + moe.shared_dim

    @property
    def widest_mlp(self) -> int:
        """``mlp_width`` of the widest layer."""
        return max(self.mlp_width(layer) for layer in range(self.n_layers))

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores."""
        return 1.0 / math.sqrt(self.head_dim) if self.query_scale is None else self.query_scale

    @property
    def plain_attention(self) -> bool:
        """True if only torch's attention operators can compute the scores."""
        return self.attention_sinks or self.attention_softcap is not None or self.attention_chunk is not None

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """Return the rotary frequencies of a layer, or None if it does not rotate."""
        if self.position != "rope" or layer in self.no_rope_layers:
            return None
        local = self.local_rope is not None and self.layer_window(layer) is not None
        return self.local_rope if local else self.rope

    def local(self, ranks: int, expert_ranks: int = 1) -> ModelConfig:
        """Return the sizes of each of ``ranks`` ranks when matrices are cut between them.

        Each rank has a share of the query heads, of the key heads (one if there are fewer than ranks) and of the
        feed-forward units, also of every expert. Everything else is unchanged.

        Args:
            expert_ranks: number of ranks that share whole experts, if more than 1.

        Raises:
            ValueError: it cannot be cut so; the message names the numbers of ranks that can be.
        """
        if expert_ranks > 1:
            self._check_expert_ranks(expert_ranks)
        shared = expert_ranks > 1
        if not self._divides(ranks, shared):
            possible = [n for n in range(1, self.n_heads + 1) if self._divides(n, shared)]
            units = ", ".join(f"{size} {what}" for what, size in self._cut_units(shared).items())
            raise ValueError(
                f"the model cannot be cut for {ranks} ranks: it has {self.n_heads} query heads, {self.n_kv_heads} key "
                f"heads and {units}; tensor_parallel_size can be {', '.join(map(str, possible))}"
            )
        if ranks == expert_ranks == 1:
            return self
        moe = self.moe
        if moe is not None:
            each = moe.expert_dim if shared else moe.expert_dim // ranks
            moe = replace(moe, ranks=expert_ranks, expert_dim=each, shared_dim=moe.shared_dim // ranks)
        return replace(
            self,
            n_heads=self.n_heads // ranks,
            n_kv_heads=max(1, self.n_kv_heads // ranks),
            ffn_dim=self.ffn_dim // ranks if "feed-forward units" in self._cut_units(shared) else self.ffn_dim,
            moe=moe,
        )

    def _cut_units(self, experts_whole: bool) -> dict[str, int]:
        """Return the sizes, beside heads, that are divided between ranks."""
        moe = self.moe
        if moe is None:
            return {"feed-forward units": self.ffn_dim}
        found = {"feed-forward units": self.ffn_dim} if moe.dense_layers else {}
        found |= {} if experts_whole else {"units of an expert": moe.expert_dim}
        return found | ({"units of shared experts": moe.shared_dim} if moe.shared_dim else {})

    def _divides(self, ranks: int, experts_whole: bool) -> bool:
        heads = self.n_kv_heads % ranks == 0 or ranks % self.n_kv_heads == 0
        units = self._cut_units(experts_whole).values()
        return heads and self.n_heads % ranks == 0 and all(size % ranks == 0 for size in units)

    def _check_expert_ranks(self, ranks: int) -> None:
        if self.moe is None:
            raise ValueError(f"a {self.architecture} model has no experts: leave enable_expert_parallel out")
        experts = self.moe.experts
        if experts % ranks:
            near = min((n for n in range(1, experts + 1) if experts % n == 0), key=lambda n: (abs(n - ranks), n))
            raise ValueError(
                f"{ranks} ranks cannot share {experts} experts evenly: let tensor_parallel_size times "
                f"data_parallel_size be {near}, or leave enable_expert_parallel out"
            )

    def layer_moe(self, layer: int) -> MoEConfig | None:
        """Return the experts of a layer, or None if it has one MLP."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe

    def layer_chunk(self, layer: int) -> int | None:
        """Return the positions of the chunks that a layer attends in, or None if it sees the whole past."""
        return self.attention_chunk if self.layer_rope(layer) is not None else None

    def layer_reach(self, layer: int) -> tuple[int | None, int | None]:
        """Return ``layer_window`` and ``layer_chunk``, on which costs of attention depend."""
        return self.layer_window(layer), self.layer_chunk(layer)

    def layer_window(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens, or None if the layer sees the whole past."""
        return None if layer in self.full_attention_layers else self.sliding_window


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number greater than 0, not {value!r}")
