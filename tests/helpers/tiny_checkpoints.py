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

from transect.spec.families.family import TINY
from transect.spec.families.registry import families

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}

VARIANTS = {
    "smollm2": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
}
"""Other models of a family: its name, and keys of config.json."""
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "dots1", "gpt_oss")
"""Families of mixtures of experts."""
FAMILIES = ("llama", "smollm2", "llama-bias", "mistral", "qwen2", "qwen3", "gpt2")


def tiny_values(family, **sizes):
    """The keys of config.json of a family's tiny model (its record has them), with other sizes and settings."""
    name, more = VARIANTS.get(family, (family, {}))
    values = {"model_type": name, **TINY, **families()[name].tiny, **more, **sizes}
    layers = TINY["num_hidden_layers"]
    lists = {key: value for key, value in families()[name].tiny.items() if isinstance(value, list)}
    for key, value in lists.items():
        if key not in sizes and len(value) == layers:
            values[key] = (value * layers)[: values["num_hidden_layers"]]
    return values


def make_config(family, **changes):
    values = tiny_values(family, **SMALL | changes)
    return transformers.CONFIG_MAPPING[values.pop("model_type")](**values)


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
    model = make_model("gpt_oss", **changes)
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


GGUF_NAMES = {
    "mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3", "llama4_text": "llama4",
}  # fmt: skip
"""The architecture that converters write for a ``model_type``, where it is another."""


def write_gguf(path, model, type_name="F32", *, leave_out=(), change=None, metadata=None, part=0):
    """The model as a GGUF file, matrices in ``type_name``. ``change(name, array)`` may replace a tensor; ``metadata``
    adds keys; ``part``: several files, of so many tensors each."""
    config = model.config
    architecture = GGUF_NAMES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part)
    _write_metadata(writer, config)
    for key, value in (metadata or {}).items():
        getattr(writer, f"add_{key}")(value)
    for name, array in _gguf_tensors(model, architecture):
        if name in leave_out:
            continue
        if change is not None:
            array = change(name, array)
        packed = array.ndim >= 2 and name.endswith("weight") and not name.endswith("gate_inp.weight")
        packed = packed and array.shape[-1] % 32 == 0
        kind = gguf.GGMLQuantizationType[type_name if packed else "F32"]
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_tensors(model, architecture):
    """What a converter writes, (name, array) each."""
    config = model.config
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for hf_name, weight in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = weight.detach().numpy()
        if ".experts." in hf_name:
            yield from _experts(config, hf_name, array)
            continue
        if config.model_type == "gpt2" and array.ndim == 2 and ".h." in hf_name:
            array = np.ascontiguousarray(array.T)
        if architecture in ("llama", "granite", "smollm3") and ".q_proj." in hf_name:
            array = interleave(array, config.num_attention_heads)
        if architecture in ("llama", "granite", "smollm3") and ".k_proj." in hf_name:
            array = interleave(array, config.num_key_value_heads)
        if architecture.startswith("gemma") and hf_name.endswith("norm.weight"):
            array = array + 1
        if hf_name.endswith("shared_expert_gate.weight"):
            array = array[0]
        if hf_name.endswith("self_attn.sinks"):
            hf_name += ".weight"
        if hf_name.endswith("e_score_correction_bias"):
            hf_name = hf_name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        yield name, array


def _experts(config, hf_name, array):
    """Gate and up of all experts as two tensors ``[E, outputs, inputs]``, down as one."""
    block = f"blk.{hf_name.split('.')[2]}"
    kind = "bias" if "bias" in hf_name else "weight"
    if config.model_type in ("gpt_oss", "llama4_text") and kind == "weight":  # inputs by outputs
        array = array.swapaxes(1, 2)
    if "down_proj" in hf_name:
        yield f"{block}.ffn_down_exps.{kind}", array
        return
    half = array.shape[1] // 2
    turns = config.model_type == "gpt_oss"
    yield f"{block}.ffn_gate_exps.{kind}", array[:, ::2] if turns else array[:, :half]
    yield f"{block}.ffn_up_exps.{kind}", array[:, 1::2] if turns else array[:, half:]


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
    llama4 = config.model_type == "llama4_text"
    writer.add_feed_forward_length(config.intermediate_size_mlp if llama4 else config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"] if "full_attention" in rope else rope["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type in ("mistral", "gemma2", "gemma3_text", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    _write_moe(writer, config)


def _write_moe(writer, config):
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    experts = experts or getattr(config, "n_routed_experts", None)
    if experts is None:
        return
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type != "mixtral":
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if config.model_type == "dots1":
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.model_type == "llama4_text":
        writer.add_interleave_moe_layer_step(1)
