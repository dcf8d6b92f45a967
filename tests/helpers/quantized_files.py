"""Matrices as other programs quantize them, written code by code: (values, tensors of a checkpoint)."""

import json

import torch
import torch.nn.functional as F

from transect.spec.numbers.nf4 import CODES

GROUP = 16
"""Inputs that share a scale, where nothing else is said."""


def words(codes, bits=4):
    """``[..., 32 n / bits]`` codes as int32 ``[..., n]``, the first in the lowest bits."""
    shifted = codes.long().unflatten(-1, (-1, 32 // bits)) << (bits * torch.arange(32 // bits))
    return shifted.sum(-1).to(torch.int32)


def groups_of(inputs, order, size=GROUP):
    """The group of each input; with act-order they are shuffled."""
    group = torch.arange(inputs) // size
    return group[torch.randperm(inputs, generator=torch.Generator().manual_seed(7))] if order else group


def four_bits(weight, group):
    """(codes, zeros, scales, values): asymmetric, ``[O, I]`` and ``[O, G]``."""
    count = int(group.max()) + 1
    codes = torch.zeros_like(weight, dtype=torch.int64)
    zeros = torch.zeros(len(weight), count, dtype=torch.int64)
    scales = torch.zeros(len(weight), count)
    for g in range(count):
        part = weight[:, group == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scales[:, g] = ((high - low) / 15).clamp(min=1e-3).half().float()
        zeros[:, g] = (-low / scales[:, g]).round().clamp(0, 15)
        codes[:, group == g] = (part / scales[:, g, None] + zeros[:, g, None]).round().clamp(0, 15).long()
    values = (codes - zeros[:, group]).float() * scales[:, group]
    return codes, zeros, scales, values


def gptq(weight, order=False, size=GROUP):
    group = groups_of(weight.shape[1], order, size)
    codes, zeros, scales, values = four_bits(weight, group)
    qweight, qzeros = words(codes).T.contiguous(), words((zeros - 1).T)
    return values, {
        "qweight": qweight, "qzeros": qzeros,
        "scales": scales.T.contiguous().half(), "g_idx": group.int(),
    }  # fmt: skip


def awq(weight, size=GROUP):
    codes, zeros, scales, values = four_bits(weight, groups_of(weight.shape[1], False, size))
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    qweight, qzeros = (words(each.T.unflatten(1, (-1, 8))[..., order].flatten(1)) for each in (codes, zeros))
    return values, {
        "qweight": qweight, "qzeros": qzeros,
        "scales": scales.T.contiguous().half(),
    }  # fmt: skip


def packed(weight, size=GROUP):
    scales = (weight.unflatten(1, (-1, size)).abs().amax(-1) / 7).bfloat16()
    wide = scales.float().repeat_interleave(size, 1)
    codes = (weight / wide).round().clamp(-8, 7).long()
    return codes * wide, {
        "weight_packed": words(codes + 8), "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }  # fmt: skip


def packed8(weight, size=None):
    """8 bits in words, with a scale for each row; with ``size`` for each group, and zeros."""
    wide = weight.unflatten(1, (-1, size or weight.shape[1]))
    scales = wide.abs().amax(-1) / 120
    zeros = torch.arange(scales.numel()).view(scales.shape) % 7 - 3 if size else torch.zeros_like(scales).long()
    codes = ((wide / scales[..., None]).round().long() + zeros[..., None]).clamp(-128, 127)
    values = ((codes - zeros[..., None]) * scales[..., None]).flatten(1)
    parts = {"weight_packed": words(codes.flatten(1) + 128, 8), "weight_scale": scales}
    parts |= {"weight_shape": torch.tensor(weight.shape)}
    return values, parts | ({"weight_zero_point": words(zeros.T + 128, 8).T.contiguous()} if size else {})


def fp8(weight, rows, columns, name="weight_scale"):
    """A scale for each block of ``rows`` by ``columns``; at the ends blocks are cut off."""
    outputs, inputs = weight.shape
    scale = torch.zeros(-(-outputs // rows), -(-inputs // columns))
    values, codes = torch.zeros_like(weight), torch.zeros_like(weight, dtype=torch.float8_e4m3fn)
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            block = (slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns))
            scale[r, c] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scale[r, c]).to(torch.float8_e4m3fn)
            values[block] = codes[block].float() * scale[r, c]
    return values, {"weight": codes, name: scale.reshape(1) if scale.numel() == 1 else scale}


def int8(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return codes.float() * scale, {"weight": codes, "weight_scale": scale}


def bitsandbytes(weight, nested=True, block=64):
    """4 bits of a table of 16 numbers; with ``nested`` the scales of blocks are 8 bits of another table."""
    table = torch.tensor(CODES) if nested else torch.linspace(-1, 1, 16)
    blocks = F.pad(weight.reshape(-1), (0, -weight.numel() % block)).view(-1, block)
    absmax, told = blocks.abs().amax(1), {"shape": list(weight.shape), "blocksize": block, "quant_type": "nf4"}
    parts = {"weight.quant_map": table}
    if nested:
        offset, scale_table = float(absmax.mean()), torch.linspace(-1, 1, 256)
        wide = (absmax - offset).abs().max()
        codes = ((absmax - offset)[:, None] / wide - scale_table).abs().argmin(1)
        absmax = scale_table[codes] * wide + offset
        groups = wide.expand(-(-len(absmax) // 256)).clone()
        parts |= {"weight.absmax": codes.byte(), "weight.nested_absmax": groups, "weight.nested_quant_map": scale_table}
        told |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        parts["weight.absmax"] = absmax
    codes = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1)
    values = (table[codes] * absmax[:, None]).view(-1)[: weight.numel()].view(weight.shape)
    pairs = codes.view(-1)[: weight.numel()].view(-1, 2)
    parts["weight"] = (16 * pairs[:, :1] + pairs[:, 1:]).byte()
    name = "weight.quant_state.bitsandbytes__nf4"
    return values, parts | {name: torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)}
