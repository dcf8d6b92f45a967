"""The least time of one PyTorch operator, from the shapes and types of its inputs as a trace has them.

Products are bound by FLOPs or bytes, all others by bytes: each input read once, one output written that is as large as
the largest input. That is the roofline bound of an operator that runs alone; several operators fused take less. Of
operators that are neither PyTorch's nor simple ones of this project nobody knows what they compute.
"""

from __future__ import annotations

import math
from typing import Any

from ..hardware.ceilings import Ceilings
from ..ops.registry import Cost
from .trace import Key

SIZES = {
    "float": 4,
    "double": 8,
    "c10::half": 2,
    "c10::bfloat16": 2,
    "long int": 8,
    "int": 4,
    "short int": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "c10::complex<float>": 8,
}
DTYPES = {"float": "float32", "double": "float64", "c10::half": "float16", "c10::bfloat16": "bfloat16"}
OURS = "transect::matmul"
"""Its second factor is transposed, as a layer's weight is."""
PRODUCTS = {OURS, "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_int_mm", "aten::addmv", "aten::mv"}
CONVOLUTIONS = {
    "aten::mkldnn_convolution",
    "aten::cudnn_convolution",
    "aten::thnn_conv2d",
    "aten::_slow_conv2d_forward",
}
ATTENTION = ("_scaled_dot_product", "_flash_attention_forward", "_efficient_attention_forward")
_FREE = """
t transpose as_strided view expand select slice permute unsqueeze squeeze detach resolve_conj empty
empty_like empty_strided reshape _unsafe_view resolve_neg chunk split narrow unbind alias
result_type is_nonzero _reshape_alias lift_fresh detach_ to contiguous item unfold set_ resize_
broadcast_tensors flatten matmul linear movedim diagonal view_as layer_norm dropout softmax
cross_entropy_loss conv2d convolution _convolution einsum embedding_bag
"""
FREE = frozenset({"detach", *(f"aten::{name}" for name in _FREE.split())})
"""They move no data themselves; some call others that do."""


UNKNOWN = ("cross_entropy", "attention", "linear", "grouped")
"""Parts of the names of this project's operators whose inputs do not say all that they compute."""


def _known(name: str) -> bool:
    if name.startswith("transect::"):
        return name in PRODUCTS or not any(each in name for each in UNKNOWN)
    return name.startswith("aten::") or name in FREE


def cost(key: Key) -> Cost | None:
    """FLOPs and bytes of an operator; None where its shapes, or what it computes, are not known."""
    tensors = _tensors(key)
    if not tensors or not _known(key.name):
        return None
    sizes = [(math.prod(shape), width) for shape, width in tensors]
    read = sum(count * width for count, width in sizes)
    if key.name in FREE:
        return Cost(0, 0, 0)
    shapes = [shape for shape, _ in tensors]
    width = tensors[0][1]
    if key.name in PRODUCTS:
        return _product(key.name, shapes, width)
    if key.name in CONVOLUTIONS and len(shapes) > 1 and shapes[0] and shapes[1]:
        return _convolution(key, shapes, width, read)
    if any(name in key.name for name in ATTENTION) and len(shapes) > 2 and len(shapes[0]) == len(shapes[1]) == 4:
        batch, heads, queries, dim = shapes[0]
        flops = 4.0 * batch * heads * queries * shapes[1][2] * dim
        return Cost(flops, sum(math.prod(each) for each in shapes[:3]) * width, math.prod(shapes[0]) * width)
    if key.name == "aten::embedding" and len(shapes) > 1 and shapes[0]:
        rows = math.prod(shapes[1])
        moved = rows * shapes[0][-1] * width
        return Cost(0, moved + rows * 8, moved)
    if key.name in ("aten::index", "aten::index_select", "aten::gather", "aten::_index_put_impl_"):
        return Cost(0, 0, 0)
    if key.name in ("aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_"):
        return Cost(0, 0, sizes[0][0] * sizes[0][1])
    largest = max(count for count, _ in sizes)
    if key.name == "aten::copy_" and len(tensors) > 1:
        return Cost(0, sizes[1][0] * sizes[1][1], sizes[0][0] * sizes[0][1])
    if key.name == "aten::cat":
        return Cost(0, read, read)
    reduces = key.name in ("aten::sum", "aten::mean", "aten::max", "aten::min", "aten::argmax", "aten::norm")
    return Cost(largest, read, 0 if reduces else largest * width)


def floor(key: Key, ceilings: Ceilings) -> float | None:
    """The fewest seconds that the operator needs; None where that cannot be said."""
    found = cost(key)
    if found is None:
        return None
    return found.floor(_rate(key, ceilings), ceilings.copy_bytes_per_second)


def dtype_of(key: Key) -> str:
    """The name of the floating-point type that an operator computes in; float32 where none is known."""
    return next((DTYPES[each] for each in key.types if each in DTYPES), "float32")


def _rate(key: Key, ceilings: Ceilings) -> float:
    """FLOP/s of products of this operator's type; float64 is taken as half of float32."""
    dtype = dtype_of(key)
    rates = ceilings.flops_per_second
    if dtype == "float64":
        return rates.get("float64", rates["float32"] / 2)
    return rates.get(dtype, rates["float32"])


def _product(name: str, shapes: list[list[int]], width: int) -> Cost | None:
    if name in ("aten::addmm", "aten::baddbmm", "aten::addmv"):
        shapes = shapes[1:]
    if len(shapes) < 2 or not shapes[0] or not shapes[1]:
        return None
    left, right = shapes[0], shapes[1]
    inner = left[-1]
    outer = math.prod(left[:-1])
    columns = right[0] if name == OURS else right[-1] if len(right) > 1 else 1
    written = outer * columns
    return Cost(2.0 * written * inner, (math.prod(left) + math.prod(right)) * width, written * width)


def _convolution(key: Key, shapes: list[list[int]], width: int, read: int) -> Cost | None:
    """The output has the input's extent over the stride; padding is taken to be "same"."""
    image, kernel = shapes[0], shapes[1]
    strides = [text for text in key.values if text.startswith("[")]
    stride = json_list(strides[1] if len(strides) > 1 else strides[0]) if strides else [1]
    spatial = 1.0
    for index, extent in enumerate(image[2:]):
        spatial *= max(1, extent // max(1, stride[min(index, len(stride) - 1)]))
    written = image[0] * kernel[0] * spatial
    return Cost(2.0 * written * math.prod(kernel[1:]), read, written * width)


def json_list(text: str) -> list[int]:
    """``[1, 2]`` as numbers; [1] where it is something else."""
    parts = text.strip("[]").split(",")
    try:
        return [int(part) for part in parts] or [1]
    except ValueError:
        return [1]


def _tensors(key: Key) -> list[tuple[list[int], int]]:
    """(shape, bytes of a number) of each input that is a tensor, those in lists of tensors among them."""
    if not isinstance(key.shapes, list):
        return []
    found: list[tuple[list[int], int]] = []
    for shape, kind in zip(key.shapes, key.types, strict=False):
        if kind in SIZES and _is_shape(shape):
            found.append((shape, SIZES[kind]))
        elif kind in ("TensorList", "GenericList") and isinstance(shape, list):
            found.extend((each, 4) for each in shape if _is_shape(each))
    return found


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and each >= 0 for each in value)
