"""Blocks of GGUF files as a GPU holds them: the file's values to the bit, each bit where the kernels look for it."""

import numpy as np
import pytest
import torch

from transect.formats.ggml_blocks import QuantizedTensor
from transect.ops.linear.packed.gguf.gguf_layout import arrange, arranged_shape, dense
from transect.ops.linear.packed.gguf.gguf_matmul import dequantize
from transect.spec.numbers.gguf import BLOCK_TYPES, UNITS


def random_blocks(name: str, rows: int, columns: int, seed: int = 0) -> QuantizedTensor:
    """Random bytes; scales are finite."""
    kind = BLOCK_TYPES[name]
    data = np.random.default_rng(seed).integers(0, 256, (rows, columns // kind.block, kind.nbytes), dtype=np.uint8)
    for at in kind.halves:
        data[..., at + 1] &= 0xBF
    if name == "MXFP4":
        data[..., 0] = data[..., 0] % 100 + 60
    return QuantizedTensor(name, (rows, columns), data.reshape(rows, -1))


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (5, 768), (40, 512)])
def test_the_values_are_those_of_the_file(name: str, rows: int, columns: int) -> None:
    tensor = random_blocks(name, rows, columns)
    arranged = arrange(name, torch.from_numpy(tensor.blocks.copy()), columns)
    assert tuple(arranged.shape) == arranged_shape(UNITS[name], rows, columns)
    np.testing.assert_array_equal(dense(arranged, UNITS[name], rows, columns).numpy(), tensor.dequantize())


@pytest.mark.parametrize("name", [name for name in UNITS if BLOCK_TYPES[name].block == 32])
def test_rows_may_end_within_a_unit(name: str) -> None:
    tensor = random_blocks(name, 3, 288)
    arranged = arrange(name, torch.from_numpy(tensor.blocks.copy()), 288)
    np.testing.assert_array_equal(dense(arranged, UNITS[name], 3, 288).numpy(), tensor.dequantize())


@pytest.mark.parametrize("name", UNITS)
def test_the_kernel_finds_each_bit_where_the_description_puts_it(name: str) -> None:
    """It reads words and bytes by the places in ``gguf_layout.py``'s table, ``arrange`` permutes axes."""
    columns = 512 if BLOCK_TYPES[name].block == 256 else 288
    tensor = random_blocks(name, 19, columns)
    arranged = arrange(name, torch.from_numpy(tensor.blocks.copy()), columns)
    found = dequantize(arranged, name, 19, columns, torch.float32).numpy()
    np.testing.assert_allclose(found, tensor.dequantize(), rtol=3e-7, atol=0 if not UNITS[name].minimum else 1e-2)


@pytest.mark.parametrize("name", UNITS)
def test_bits_of_a_number(name: str) -> None:
    """Those of the file, but for scales of 4 and 6 bits that take 8."""
    kind, block = UNITS[name], BLOCK_TYPES[name]
    in_file = 8 * block.nbytes / block.block
    more = {"Q2_K": 0.5, "Q3_K": 0.125, "Q4_K": 0.125, "Q5_K": 0.125, "MXFP4": 0.25}.get(name, 0)
    assert kind.bits == in_file + more
    assert kind.unit % 16 == 0 and kind.offset == block.offset and kind.group == block.group


def test_other_types_are_named() -> None:
    with pytest.raises(ValueError, match="F16 is held as dense numbers on a GPU; held in blocks are Q4_0"):
        arrange("F16", torch.zeros(1, 2, dtype=torch.uint8), 1)
