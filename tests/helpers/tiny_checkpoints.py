"""Tiny random models of every family as transformers saves them, and as a GGUF converter would write them.

The GGUF writer takes its names from the gguf package and does what llama.cpp's converter does to the rows of q and k,
so it knows nothing of the code under test.
"""

import json

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FEW_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def make_config(family, **changes):
    t = transformers
    return {
        "llama": lambda: t.LlamaConfig(**SMALL | changes),
        "smollm2": lambda: t.LlamaConfig(**SMALL | changes, tie_word_embeddings=True),
        "llama-bias": lambda: t.LlamaConfig(**SMALL | changes, attention_bias=True, mlp_bias=True),
        "mistral": lambda: t.MistralConfig(**SMALL | changes, sliding_window=5),
        "qwen2": lambda: t.Qwen2Config(**SMALL | changes, tie_word_embeddings=True),
        "qwen3": lambda: t.Qwen3Config(**SMALL | changes, head_dim=32),
        "gpt2": lambda: t.GPT2Config(
            vocab_size=changes.get("vocab_size", 96),
            n_embd=64,
            n_layer=changes.get("num_hidden_layers", 2),
            n_head=4,
            n_positions=128,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "mixtral": lambda: t.MixtralConfig(**SMALL | changes, num_local_experts=4),
        "qwen2-moe": lambda: t.Qwen2MoeConfig(
            **SMALL | changes, **FEW_EXPERTS, shared_expert_intermediate_size=40, mlp_only_layers=[1]
        ),
        "qwen3-moe": lambda: t.Qwen3MoeConfig(**SMALL | changes, **FEW_EXPERTS, head_dim=16, norm_topk_prob=True),
        "olmoe": lambda: t.OlmoeConfig(**SMALL | changes, num_experts=6, num_experts_per_tok=2),
        "dots1": lambda: t.Dots1Config(
            **SMALL | changes,
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
        "gpt-oss": lambda: t.GptOssConfig(
            **SMALL | changes, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=7
        ),
        "gemma2": lambda: t.Gemma2Config(
            **SMALL | changes, head_dim=16, sliding_window=7, attn_logit_softcapping=2.0, final_logit_softcapping=8.0
        ),
        "gemma3": lambda: t.Gemma3TextConfig(
            **SMALL | changes, head_dim=16, sliding_window=7, layer_types=["sliding_attention", "full_attention"]
        ),
        "olmo2": lambda: t.Olmo2Config(**SMALL | changes),
        "granite": lambda: t.GraniteConfig(
            **SMALL | changes, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.6
        ),
        "smollm3": lambda: t.SmolLM3Config(**SMALL | changes, no_rope_layers=[1, 0], pad_token_id=0),
        "llama4": lambda: t.Llama4TextConfig(
            **SMALL | changes,
            head_dim=16,
            intermediate_size_mlp=96,
            num_local_experts=4,
            num_experts_per_tok=1,
            moe_layers=[0],
            no_rope_layers=[1, 0],
            attention_chunk_size=16,
            floor_scale=8,
            attn_scale=0.5,
        ),
    }[family]()


EXPERTS = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "dots1", "gpt-oss")
"""Families of mixtures of experts."""
FAMILIES = ("llama", "smollm2", "llama-bias", "mistral", "qwen2", "qwen3", "gpt2")


def make_model(family, seed=0, **changes):
    """A transformers model with weights so large that each of them shows in the logits; ``changes`` of its sizes."""
    config = make_config(family, **changes)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            is_scale = weight.ndim == 1 and name.endswith("weight")
            weight.copy_(1 + 0.2 * noise if is_scale else (0.1 if weight.ndim == 1 else 0.15) * noise)
    return model


def save_mxfp4(folder, **changes):
    """A gpt-oss model with random experts in MXFP4: blocks of 32 inputs, gate and up in turn."""
    model = make_model("gpt-oss", **changes)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, weight in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = weight.bfloat16().contiguous()
            continue
        experts, inputs, outputs = weight.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = torch.randint(120, 125, blocks.shape[:3], generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    settings = model.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(settings))


def write_gguf(path, model, type_name="F32", *, leave_out=(), change=None):
    """The model as a GGUF file, matrices in ``type_name``. ``change(name, array)`` may replace a tensor."""
    config = model.config
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for hf_name, weight in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = weight.detach().numpy()
        if config.model_type == "gpt2" and array.ndim == 2 and ".h." in hf_name:
            array = np.ascontiguousarray(array.T)
        if architecture == "llama" and ".q_proj." in hf_name:
            array = interleave(array, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in hf_name:
            array = interleave(array, config.num_key_value_heads)
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if name in leave_out:
            continue
        if change is not None:
            array = change(name, array)
        kind = gguf.GGMLQuantizationType[type_name if array.ndim == 2 else "F32"]
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(array, heads):
    """Rows from half-rotation order to neighbouring pairs, in each head."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def _write_metadata(writer, config):
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type == "mistral":
        writer.add_sliding_window(config.sliding_window)
