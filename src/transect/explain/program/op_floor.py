"""Compute the least time of one PyTorch operator from the shapes and types of its inputs in a trace.

Products are bound by FLOPs or bytes, all others by bytes: each input read once, one output written that is as large as
the largest input, but for those that read or write a part of a tensor (``_PARTS``), or write what they were given
(``signatures.py``). Numbers that a tensor repeats (``expand``) count once. That is the roofline bound of an operator
that runs alone; several operators fused take less. Of operators that are neither PyTorch's nor simple ones of this
project the work is unknown, as is that of recurrent layers, of types that are not in ``SIZES``, and of tensors
without strides (sparse and nested ones).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...costs.ceilings import Ceilings
from ...costs.work import Cost
from .signatures import Signature, signature
from .trace import Key, Trace

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
    "c10::complex<double>": 16,
    "c10::float8_e4m3fn": 1,
    "c10::float8_e4m3fnuz": 1,
    "c10::float8_e5m2": 1,
    "c10::float8_e5m2fnuz": 1,
}
FP8 = "float8_e4m3fn"
DTYPES = {"float": "float32", "double": "float64", "c10::half": "float16", "c10::bfloat16": "bfloat16"}
DTYPES |= {name: FP8 for name in SIZES if "float8" in name}
TF32 = re.compile(r"tf32|s1688|nvjet_(?:sm\d+_)?s")
"""Pattern of kernels that multiply float32 on tensor cores; the operator's types do not show this."""
LISTED = re.compile("BFloat16|Half")
"""Pattern in the name of a kernel on lists of tensors: the narrowest type in its template."""
OURS = "transect::matmul"
"""Operator whose second factor is transposed, like a layer's weight."""
ADDED = {"aten::addmm", "aten::baddbmm", "aten::addmv", "aten::_addmm_activation"}
"""Operators whose factors are the second and the third input."""
PRODUCTS = {OURS, "aten::mm", "aten::bmm", "aten::_int_mm", "aten::mv", "aten::_scaled_mm", *ADDED}
CONVOLUTIONS = {
    "aten::mkldnn_convolution",
    "aten::cudnn_convolution",
    "aten::miopen_convolution",
    "aten::thnn_conv2d",
    "aten::_slow_conv2d_forward",
    "aten::_conv_depthwise2d",
    "aten::convolution_backward",
    "aten::_slow_conv2d_backward",
    "aten::cudnn_convolution_transpose",
    "aten::miopen_convolution_transpose",
}
PADDING_FIRST = ("aten::mkldnn_convolution", "aten::cudnn_convolution", "aten::miopen_convolution")
"""Operators whose arguments are padding, stride and dilation; others have the kernel's size, stride and padding."""
ATTENTION = (
    "_scaled_dot_product",
    "_flash_attention_forward",
    "_flash_attention_backward",
    "_efficient_attention_forward",
    "_efficient_attention_backward",
    "_cudnn_attention_forward",
    "_cudnn_attention_backward",
)
TOKENS_FIRST = ("aten::_flash_attention", "aten::_efficient_attention")
"""Operators with inputs [batch, tokens, heads, size]; all others have [batch, heads, tokens, size]."""
CAUSAL = {
    "aten::_scaled_dot_product_flash_attention": 4,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 4,
    "aten::_scaled_dot_product_efficient_attention": 6,
    "aten::_scaled_dot_product_cudnn_attention": 6,
    "aten::_scaled_dot_product_fused_attention_overrideable": 5,
    "aten::_scaled_dot_product_attention_math": 5,
    "aten::_flash_attention_forward": 8,
    "aten::_efficient_attention_forward": 9,
    "aten::_cudnn_attention_forward": 10,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "aten::_scaled_dot_product_flash_attention_backward": 11,
    "aten::_scaled_dot_product_efficient_attention_backward": 11,
    "aten::_scaled_dot_product_cudnn_attention_backward": 14,
    "aten::_flash_attention_backward": 11,
    "aten::_efficient_attention_backward": 14,
    "aten::_cudnn_attention_backward": 14,
}
"""Index of the argument that sets causal attention: a boolean, or the kind of mask (0: none)."""
_FREE = """
t transpose as_strided view expand select slice permute unsqueeze squeeze detach resolve_conj empty
empty_like empty_strided reshape _unsafe_view resolve_neg chunk split narrow unbind alias
result_type is_nonzero _reshape_alias lift_fresh detach_ to contiguous item unfold set_ resize_
broadcast_tensors flatten matmul linear movedim diagonal view_as layer_norm dropout softmax
cross_entropy_loss conv1d conv2d conv3d convolution einsum embedding_bag _sparse_coo_tensor_with_dims_and_tensors
is_same_size as_strided_ transpose_ t_ squeeze_ unsqueeze_ _nnz new_empty empty_permuted resize_as_
"""
FREE = frozenset({"detach", *(f"aten::{name}" for name in _FREE.split())})
"""Operators that move no data themselves; some call others that do."""


UNKNOWN = ("cross_entropy", "attention", "linear", "grouped")
"""Parts of the names of this project's operators whose inputs do not determine their work."""
UNKNOWN_HERE = ("_rnn", "_grouped_mm", "_fused_lstm", "_fused_gru")
"""Parts of the names of PyTorch's operators whose inputs do not determine their work."""
_REDUCES = """
sum mean max min argmax argmin amax amin norm linalg_vector_norm all any var std var_mean std_mean prod logsumexp topk
count_nonzero avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d max_pool2d_with_indices _foreach_norm nansum aminmax
dist median nanmedian kthvalue mode histc bincount equal masked_select multinomial trapezoid unique_dim _unique2 dot
vdot avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d max_pool3d_with_indices
max_pool2d max_pool1d mse_loss smooth_l1_loss huber_loss binary_cross_entropy multi_margin_loss _ctc_loss
glu
"""
REDUCES = frozenset(f"aten::{name}" for name in _REDUCES.split())
"""Operators whose output is small beside their inputs."""
_TESTS = "eq ne lt le gt ge isnan isinf isposinf isneginf signbit logical_and logical_or logical_xor logical_not"
TESTS = frozenset(f"aten::{name}" for name in _TESTS.split())
"""Operators that write booleans, of one byte each."""
_FILLS = "fill zero copy normal uniform random exponential bernoulli geometric cauchy log_normal"
FILLS = frozenset(f"aten::{name}_" for name in _FILLS.split())
"""Operators that write tensors without reading them."""
_PICKS = """
index _index_put_impl_ index_put_ index_fill_ index_reduce_ take put_ trace scatter_reduce_
repeat_interleave grid_sampler_2d grid_sampler_3d
"""
PICKS = frozenset(f"aten::{name}" for name in _PICKS.split())
"""Operators whose work depends on values, which no trace contains."""
Sizes = list[tuple[int, int]]
"""(numbers, bytes of a number) of each input."""


def _bag(sizes: Sizes, dim: int) -> Cost:
    """Count a row for each index, summed for each bag."""
    (_, width), (rows, index), (bags, _) = sizes[:3]
    return Cost(rows * dim, rows * (dim * width + index), bags * dim * width)


def _into(sizes: Sizes, dim: int) -> Cost:
    """Count an operator whose first input receives as many numbers as the last has."""
    return Cost(0, sum(count * width for count, width in sizes[1:]), sizes[-1][0] * sizes[0][1])


def _picked(sizes: Sizes, dim: int) -> Cost:
    """Count a number for each index."""
    (_, width), (count, index) = sizes[:2]
    return Cost(0, count * (width + index), count * width)


def _looked_up(sizes: Sizes, dim: int) -> Cost:
    """Count a look-up of each number of the second input in the first."""
    count, width = sizes[1]
    return Cost(0, count * width, 4 * count)


def _loss_backward(sizes: Sizes, dim: int) -> Cost:
    """Count the gradient of all numbers, of which one in each row is nonzero."""
    (count, width), (rows, index) = sizes[1:3]
    return Cost(0, rows * index, count * width)


def _pool_backward(sizes: Sizes, dim: int) -> Cost:
    """Count the gradient of a pooled tensor, whose shape alone is read."""
    (gradients, width), (count, _) = sizes[:2]
    return Cost(gradients, gradients * width, count * width)


def _optimizer(sizes: Sizes, dim: int) -> Cost:
    """Count an optimizer's update: parameters, gradients and states are read; all but the gradients, the second input,
    are written."""
    read = sum(count * width for count, width in sizes)
    gradients, width = sizes[1]
    return Cost(3 * gradients, read, read - gradients * width)


_PARTS: dict[str, tuple[int, Callable[[Sizes, int], Cost]]] = {
    "aten::_embedding_bag": (3, _bag),
    "aten::_embedding_bag_forward_only": (3, _bag),
    "aten::index_copy_": (3, _into),
    "aten::index_add_": (3, _into),
    "aten::scatter_": (2, _into),
    "aten::scatter_add_": (3, _into),
    "aten::gather": (2, _picked),
    "aten::searchsorted": (2, _looked_up),
    "aten::nll_loss_forward": (2, _picked),
    "aten::nll_loss2d_forward": (2, _picked),
    "aten::nll_loss_backward": (3, _loss_backward),
    "aten::nll_loss2d_backward": (3, _loss_backward),
    "aten::_adaptive_avg_pool2d_backward": (2, _pool_backward),
    "aten::avg_pool2d_backward": (2, _pool_backward),
    "aten::avg_pool3d_backward": (2, _pool_backward),
    "aten::adaptive_max_pool2d_backward": (2, _pool_backward),
    "aten::max_pool2d_with_indices_backward": (2, _pool_backward),
    "aten::max_pool3d_with_indices_backward": (2, _pool_backward),
    "aten::_fused_adam_": (4, _optimizer),
    "aten::_fused_adamw_": (4, _optimizer),
    "aten::_fused_sgd_": (2, _optimizer),
    "aten::_fused_adagrad_": (3, _optimizer),
}
"""(fewest inputs, function that counts its bytes) of each operator."""


def _known(name: str) -> bool:
    if name.startswith("transect::"):
        return name in PRODUCTS or not any(each in name for each in UNKNOWN)
    return name in FREE or (name.startswith("aten::") and not any(each in name for each in UNKNOWN_HERE))


def cost(key: Key) -> Cost | None:
    """Return FLOPs and bytes of an operator; None if its shapes or its work are unknown."""
    tensors = _tensors(key)
    if not tensors or not _known(key.name):
        return None
    said = signature(key.name, key.types)
    transposed = key.name == "aten::_convolution" and key.values[6:7] == ("True",)
    if key.name in FREE or said.view or (key.name == "aten::_convolution" and not transposed):
        return Cost(0, 0, 0)
    read = sum(each.bytes for each in tensors)
    shapes = [each.shape for each in tensors]
    width = tensors[0].width
    if key.name in PRODUCTS:
        return _product(key.name, shapes, width)
    if (key.name in CONVOLUTIONS or transposed) and len(shapes) > 1 and len(shapes[0]) > 2 and len(shapes[1]) > 2:
        return _convolution(key, shapes, width, read)
    if any(name in key.name for name in ATTENTION):
        return _attention(key, shapes, width)
    if key.name in ("aten::embedding", "aten::index_select") and len(shapes) > 1 and shapes[0]:
        rows = math.prod(shapes[1])
        moved = rows * (math.prod(shapes[0]) // max(1, *shapes[0])) * width  # the dimension is taken to be the longest
        return Cost(0, moved + rows * 8, moved)
    least, part = _PARTS.get(key.name, (0, None))
    if part is not None and len(tensors) >= least:
        return part([(each.count, each.width) for each in tensors], shapes[0][-1] if shapes[0] else 1)
    if key.name in PICKS:
        return Cost(0, 0, 0)
    if key.name == "aten::cat":
        return Cost(0, read, read)
    return _moved(key, tensors, said)


def _moved(key: Key, tensors: list[_Tensor], said: Signature) -> Cost:
    """Compute the cost of an operator bound by bytes.

    Inputs are read; written are the inputs that the operator updates, or those named by ``out``, or a new tensor as
    large as the largest input.
    """
    updated = [each for each in tensors if each.place in said.updated]
    outputs = [each for each in tensors if each.place in said.outputs]
    inputs = [each for each in tensors if each not in outputs]
    largest = max(inputs or tensors, key=lambda each: (each.count, each.width))
    read = sum(each.bytes for each in inputs)
    if key.name in FILLS:
        first = tensors[0]
        return Cost(0, sum(each.bytes for each in inputs[1:]), first.bytes)
    if updated:
        return Cost(largest.count, read, sum(each.bytes for each in updated))
    if any(each.count for each in outputs):
        return Cost(largest.count, read, sum(each.bytes for each in outputs))
    width = outputs[0].width if outputs else 1 if key.name in TESTS else largest.width
    return Cost(largest.count, read, 0 if key.name in REDUCES else largest.count * width)


def floor(key: Key, ceilings: Ceilings, kernel: str = "") -> float | None:
    """Return the fewest seconds that the operator needs; None if unknown.

    ``kernel``: a GPU's, for it.
    """
    if kernel and "TensorList" in key.types:  # its template says what numbers lists hold
        found = LISTED.search(kernel)
        key = replace(key, listed=f"c10::{found[0].lower()}" if found else "float")
    least = cost(key)
    if least is None:
        return None
    return least.floor(_rate(key, ceilings, kernel), _bandwidth(key, least, ceilings))


def own_floors(trace: Trace, indices: Sequence[int], ceilings: Ceilings) -> np.ndarray:
    """Return the fewest seconds that each of these operators of one thread needs for its own work. Operators that it
    calls have floors of their own. NaN if unknown."""
    own = np.full(len(trace.ts), np.nan)
    wholes: dict[int, float | None] = {}
    delegating: dict[int, bool] = {}
    stack: list[tuple[float, int, int, list[float]]] = []

    def close() -> None:
        _, index, number, called = stack.pop()
        whole, inside = wholes[number], sum(called)
        if whole is not None:
            own[index] = 0.0 if inside and delegating[number] else max(0.0, whole - inside)
        if stack:
            stack[-1][3].append(max(whole or 0.0, inside))

    chosen = np.asarray(indices, dtype=np.int64)
    columns = (chosen, trace.ts[chosen], trace.ts[chosen] + trace.dur[chosen], trace.key[chosen])
    for index, begin, end, number in zip(*(column.tolist() for column in columns), strict=True):
        while stack and stack[-1][0] <= begin:
            close()
        if number not in wholes:
            wholes[number] = floor(trace.keys[number], ceilings)
            delegating[number] = _delegates(trace.keys[number])
        stack.append((end, index, number, []))
    while stack:
        close()
    return own


def _delegates(key: Key) -> bool:
    """Return True if an operator that moves numbers delegates the work to other operators on a CPU."""
    computes = key.name in PRODUCTS or key.name in CONVOLUTIONS or any(each in key.name for each in ATTENTION)
    return not computes and key.name != "aten::_convolution" and signature(key.name, key.types).composite


def _bandwidth(key: Key, least: Cost, ceilings: Ceilings) -> float:
    """Return the memory bandwidth in bytes per second: a processor updates numbers in place faster than it writes them
    elsewhere, and an operator that hardly writes counts as a read."""
    copied = ceilings.copy_bytes_per_second
    if least.bytes_written < least.bytes_read / 8:
        return max(copied, ceilings.read_bytes_per_second)
    said = signature(key.name, key.types)
    given = any(key.shapes[place] != [0] for place in said.outputs)
    in_place = key.name not in FILLS and (said.updated or given)
    return max(copied, ceilings.update_bytes_per_second or 0.0) if in_place else copied


def dtype_of(key: Key, kernel: str = "") -> str:
    """Return the name of the floating-point type that an operator, or this kernel of it, computes in; float32 if
    unknown."""
    found = next((DTYPES[each] for each in key.types if each in DTYPES), "float32")
    return "tf32" if found == "float32" and TF32.search(kernel) else found


def _rate(key: Key, ceilings: Ceilings, kernel: str) -> float:
    """Return the FLOP/s of products of this operator's type; float64 counts as half of float32, 8-bit integers as
    fp8."""
    dtype = FP8 if key.name == "aten::_int_mm" else dtype_of(key, kernel)
    rates = ceilings.flops_per_second
    if dtype == "float64":
        return rates.get("float64", rates["float32"] / 2)
    if dtype == FP8:
        return rates.get(FP8, max(rates.values()))
    return rates.get(dtype, rates["float32"])


def _product(name: str, shapes: list[list[int]], width: int) -> Cost | None:
    if name in ADDED:
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
    """Count a convolution. A backward pass has a product for each requested gradient, of input and weight. Without
    padding in the trace, the output is assumed to keep the input's extent."""
    if key.name.endswith("_backward"):
        if len(shapes) < 3:
            return None
        gradient, image, kernel = shapes[:3]
        transposed = key.values[7:8] == ("True",)
        asked = [text.strip() == "True" for text in key.values[-1].strip("[]").split(",")] if key.values else [True] * 2
        flops = 2.0 * math.prod(image if transposed else gradient) * math.prod(kernel[1:])
        sizes = [math.prod(each) for each, wanted in zip((image, kernel), asked, strict=False) if wanted]
        return Cost(flops * len(sizes), read, sum(sizes) * width)
    image, kernel = shapes[0], shapes[1]
    lists = [json_list(text) for text in key.values if text.startswith("[")]
    if key.name == "aten::_convolution" or key.name.endswith("_transpose"):  # each number meets the whole kernel
        return Cost(2.0 * math.prod(image) * math.prod(kernel[1:]), read, math.prod(image[:1]) * kernel[1] * width)
    if key.name in PADDING_FIRST:
        padding, stride, dilation = (*lists, [], [], [])[:3]
    else:
        _, stride, padding, dilation = (*lists, [], [], [], [])[:4]
    spatial = 1
    for index, (extent, taps) in enumerate(zip(image[2:], kernel[2:], strict=False)):
        reach = _at(dilation, index, 1) * (taps - 1)
        room = extent + 2 * _at(padding, index, reach // 2) - reach
        spatial *= max(1, (room - 1) // max(1, _at(stride, index, 1)) + 1)
    written = image[0] * kernel[0] * spatial
    return Cost(2.0 * written * math.prod(kernel[1:]), read, written * width)


def _at(values: list[int], index: int, otherwise: int) -> int:
    """Return a setting of one dimension; a single number applies to all of them."""
    return values[min(index, len(values) - 1)] if values else otherwise


def _attention(key: Key, shapes: list[list[int]], width: int) -> Cost | None:
    """Count attention: two products forward, five backward; under a causal mask only for visible pairs of tokens."""
    backward = key.name.endswith("_backward")
    shapes = shapes[backward:]
    if len(shapes) < 3 or any(len(each) != 4 for each in shapes[:3]):
        return None  # rows of several lengths, which no shape shows
    place = 1 if key.name.startswith(TOKENS_FIRST) else 2
    queries, keys = shapes[0][place], shapes[1][place]
    pairs = queries * keys
    if _is_causal(key):
        square = min(queries, keys)
        pairs -= square * (square - 1) // 2
    count = math.prod(shapes[0])
    flops = 2.0 * (5 if backward else 2) * pairs * (count // max(1, queries))
    both = sum(math.prod(each) for each in shapes[1:3])
    if backward:
        return Cost(flops, (3 * count + both) * width, (count + both) * width)
    return Cost(flops, (count + both) * width, count * width)


def _is_causal(key: Key) -> bool:
    where = CAUSAL.get(key.name, len(key.values))
    return key.values[where : where + 1] not in ((), ("False",), ("0",), ("",))


def json_list(text: str) -> list[int]:
    """Parse ``[1, 2]`` as numbers; [1] for other text."""
    parts = text.strip("[]").split(",")
    try:
        return [int(part) for part in parts] or [1]
    except ValueError:
        return [1]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An input: its index, its shape, its numbers (each once), the bytes of one. A list of tensors counts as one
    input."""

    place: int
    shape: list[int]
    count: int
    width: int

    @property
    def bytes(self) -> int:
        return self.count * self.width


def _tensors(key: Key) -> list[_Tensor]:
    """List the inputs that are tensors or lists of tensors; empty if one has an unknown type or no strides."""
    if not isinstance(key.shapes, list):
        return []
    found: list[_Tensor] = []
    strides = key.strides if isinstance(key.strides, list) else [None] * len(key.shapes)
    for place, (shape, kind, steps) in enumerate(zip(key.shapes, key.types, strides, strict=False)):
        if kind in SIZES and _is_shape(shape):
            if shape and steps == []:
                return []
            found.append(_Tensor(place, shape, _numbers(shape, steps), SIZES[kind]))
        elif kind.startswith("c10::"):
            return []
        elif kind in ("TensorList", "GenericList") and isinstance(shape, list):
            every = steps if isinstance(steps, list) and len(steps) == len(shape) else [None] * len(shape)
            pairs = [(each, own) for each, own in zip(shape, every, strict=True) if _is_shape(each)]
            if pairs:
                count = sum(_numbers(each, own) for each, own in pairs)
                found.append(_Tensor(place, pairs[0][0], count, SIZES.get(key.listed, 4)))
    return found


def _numbers(shape: list[int], strides: Any) -> int:
    """Return the number of elements of a tensor in memory: a stride of 0 repeats elements."""
    if not isinstance(strides, list) or len(strides) != len(shape):
        return math.prod(shape)
    return math.prod(extent for extent, step in zip(shape, strides, strict=True) if step or not extent)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and each >= 0 for each in value)
