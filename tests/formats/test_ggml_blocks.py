"""GGUF block types against the gguf package, and the affine form against both."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transect.formats.affine import AffineGroups
from transect.formats.ggml_blocks import QuantizedTensor
from transect.spec.numbers.gguf import BLOCK_TYPES

PACKED = [name for name, kind in BLOCK_TYPES.items() if kind.packed]


def random_tensor(name: str, rows: int, blocks: int, seed: int) -> QuantizedTensor:
    """Random bytes, with float16 fields of either sign and any exponent short of infinity, subnormals included."""
    kind = BLOCK_TYPES[name]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, blocks, kind.nbytes), dtype=np.uint8)
    for at in kind.halves:
        data[..., at + 1] = np.where(data[..., at + 1] & 0x7C == 0x7C, data[..., at + 1] & 0xBF, data[..., at + 1])
    if name == "MXFP4":
        data[..., 0] = data[..., 0] % 248
    if name in ("F32", "F16", "BF16"):
        values = rng.standard_normal((rows, blocks)).astype(np.float32)
        if name == "BF16":
            data = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            data = values.astype(np.float32 if name == "F32" else np.float16)
    return QuantizedTensor(name, (rows, blocks * kind.block), data.reshape(rows, -1).view(np.uint8))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_sizes_are_those_of_ggml(name):
    kind = BLOCK_TYPES[name]
    number = gguf.GGMLQuantizationType[name]
    assert (kind.block, kind.nbytes) == gguf.GGML_QUANT_SIZES[number]
    assert kind.ggml_id == number.value


@pytest.mark.parametrize("name", BLOCK_TYPES)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), blocks=st.integers(1, 4))
@settings(max_examples=25)
def test_dequantize_equals_the_gguf_package_bit_for_bit(name, seed, rows, blocks):
    tensor = random_tensor(name, rows, blocks, seed)
    data = tensor.blocks.view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[name])
    got = tensor.dequantize()
    assert got.dtype == np.float32 and got.shape == tensor.shape
    np.testing.assert_array_equal(got.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


def test_dequantize_in_several_chunks_equals_one_row_at_a_time():
    tensor = random_tensor("Q4_1", 300, 32, 1)
    whole = tensor.dequantize()
    one_by_one = np.concatenate([tensor.rows(slice(i, i + 1)).dequantize() for i in range(300)])
    np.testing.assert_array_equal(whole, one_by_one)
    np.testing.assert_array_equal(tensor.affine().values(), whole)


@pytest.mark.parametrize("name", PACKED)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_affine_is_exact_fused_or_not(name, seed):
    tensor = random_tensor(name, 3, 2, seed)
    groups = tensor.affine()
    kind = tensor.block_type
    assert (groups.group, groups.bits) == (kind.group, kind.bits)
    assert groups.codes.dtype == np.uint8 and groups.codes.max() < 2**groups.bits
    assert groups.scale.dtype == groups.zero.dtype == np.float32
    np.testing.assert_array_equal(groups.values(), tensor.dequantize())
    # the product has no rounding, so that a fused multiply-add gives the same sum
    scale = np.repeat(groups.scale, groups.group, axis=1)
    np.testing.assert_array_equal((scale * groups.codes).astype(np.float64), scale.astype(np.float64) * groups.codes)


@pytest.mark.parametrize("name", PACKED)
def test_half_exact_says_whether_halves_hold_the_scales(name):
    tensor = random_tensor(name, 4, 8, 3)
    groups = tensor.affine()
    with np.errstate(over="ignore"):
        halves_suffice = bool((groups.scale.astype(np.float16).astype(np.float32) == groups.scale).all())
        if not tensor.block_type.offset:
            halves_suffice &= bool((groups.zero.astype(np.float16).astype(np.float32) == groups.zero).all())
    assert groups.half_exact == halves_suffice
    if groups.half_exact and tensor.block_type.offset:
        np.testing.assert_array_equal(groups.zero, groups.scale * -tensor.block_type.offset)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_rows_picks_and_reorders(name):
    tensor = random_tensor(name, 6, 2, 4)
    order = np.array([5, 0, 0, 3])
    np.testing.assert_array_equal(tensor.rows(order).dequantize(), tensor.dequantize()[order])
    view = tensor.rows(slice(1, 4))
    np.testing.assert_array_equal(view.dequantize(), tensor.dequantize()[1:4])
    assert np.shares_memory(view.blocks, tensor.blocks)


def test_higher_and_lower_dimensions():
    tensor = random_tensor("Q8_0", 6, 1, 5)
    cube = QuantizedTensor("Q8_0", (2, 3, 32), tensor.blocks)
    np.testing.assert_array_equal(cube.dequantize().reshape(6, 32), tensor.dequantize())
    line = QuantizedTensor("F32", (4,), np.arange(4, dtype=np.float32).view(np.uint8)[None])
    np.testing.assert_array_equal(line.dequantize(), [0, 1, 2, 3])
    with pytest.raises(ValueError, match="needs a matrix"):
        line.rows(slice(0, 1))
    for tensor in (cube, line):
        with pytest.raises(ValueError, match="only a packed matrix has affine groups"):
            tensor.affine()


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_nonfinite_scales_are_found(name):
    tensor = random_tensor(name, 3, 2, 6)
    assert not tensor.has_nonfinite_scale()
    kind = tensor.block_type
    for at in kind.halves:
        blocks = tensor.blocks.copy()
        blocks.reshape(-1, kind.nbytes)[4, at : at + 2] = (0x00, 0x7C)  # infinity
        assert QuantizedTensor(name, tensor.shape, blocks).has_nonfinite_scale()
    if not kind.halves:
        blocks = tensor.blocks.copy()
        blocks[1, 0 if name == "MXFP4" else -2 :] = 0xFF  # NaN
        assert QuantizedTensor(name, tensor.shape, blocks).has_nonfinite_scale()


def test_impossible_tensors_are_refused():
    with pytest.raises(ValueError, match="unsupported tensor type 'IQ1_S'"):
        QuantizedTensor("IQ1_S", (1, 256), np.zeros((1, 84), np.uint8))
    with pytest.raises(ValueError, match="not a whole number of Q8_0 blocks"):
        QuantizedTensor("Q8_0", (1, 33), np.zeros((1, 34), np.uint8))
    with pytest.raises(ValueError, match=r"needs uint8 blocks \[2, 34\]"):
        QuantizedTensor("Q8_0", (2, 32), np.zeros((1, 34), np.uint8))
    with pytest.raises(ValueError, match="at least one dimension"):
        QuantizedTensor("F32", (), np.zeros((1, 4), np.uint8))
    with pytest.raises(ValueError, match="need scale and zero of shape"):
        AffineGroups(np.zeros((2, 64), np.uint8), np.zeros((2, 1)), np.zeros((2, 2)), 32, 4, half_exact=True)
