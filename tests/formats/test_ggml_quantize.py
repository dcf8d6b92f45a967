"""Rounding to GGUF block types against the gguf package, and its error against the step of the block."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from transect.formats.ggml_k_types import K_TYPES
from transect.formats.ggml_quantize import WRITABLE, quantize

MATRICES = arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.sampled_from([32, 96])),
    elements=st.floats(-1000, 1000, width=32, allow_subnormal=False),
    fill=st.just(0.25),
)
STEPS = {"Q8_0": 1 / 127, "Q4_0": 1 / 8, "Q4_1": 2 / 15, "Q5_0": 1 / 16, "Q5_1": 2 / 31, "F16": 2**-11, "BF16": 2**-8}


ROUNDED = [name for name in WRITABLE if name not in K_TYPES]


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("seed", range(5))
def test_packs_as_the_gguf_package_does(name, seed):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((7, 128)) * rng.lognormal(0, 3, (7, 1))).astype(np.float32)
    values[2, :32] = 0
    expected = gguf.quantize(values, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(quantize(values, name).blocks, np.ascontiguousarray(expected).view(np.uint8))


@pytest.mark.parametrize("name", ROUNDED)
@given(values=MATRICES)
@settings(max_examples=40)
def test_round_trip_stays_within_a_step_of_the_block(name, values):
    tensor = quantize(values, name)
    assert tensor.shape == values.shape and not tensor.has_nonfinite_scale()
    error = np.abs(tensor.dequantize() - values).reshape(-1, 32)
    peak = np.abs(values).reshape(-1, 32).max(axis=1, keepdims=True)
    # one step of the codes, and the rounding of scale and minimum to float16 (which has no numbers below 6e-8)
    assert (error <= peak * (STEPS.get(name, 0) + 2e-3 * (name != "F32")) + 1e-6 * (name != "F32")).all()


@pytest.mark.parametrize("name", ["F32", "Q8_0"])
def test_any_number_of_dimensions(name):
    values = np.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 64)
    np.testing.assert_allclose(quantize(values, name).dequantize(), values, atol=5e-3)
    assert quantize(values[0, 0], name).blocks.shape[0] == 1


def test_what_cannot_be_packed_is_refused():
    ones = np.ones((1, 32), np.float32)
    with pytest.raises(ValueError, match="cannot quantize to 'Q2_K'; choose one of"):
        quantize(ones, "Q2_K")
    with pytest.raises(ValueError, match="not a whole number of Q4_0 blocks"):
        quantize(ones[:, :31], "Q4_0")
    with pytest.raises(ValueError, match="scalar"):
        quantize(np.float32(1), "F32")
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="NaN or infinite"):
            quantize(ones * bad, "Q8_0")
    for name in ("F16", "Q8_0", "Q4_0", "Q4_1"):
        with pytest.raises(ValueError, match="beyond float16"):
            quantize(np.linspace(-3e38, 3e38, 32, dtype=np.float32)[None], name)


K_STEPS = {"Q4_K": 1 / 15, "Q5_K": 1 / 31, "Q6_K": 1 / 32}


@pytest.mark.parametrize("name", K_TYPES)
@pytest.mark.parametrize("seed", range(3))
def test_k_types_are_read_by_the_gguf_package_and_near(name, seed):
    """Bytes that its reader decodes to the values that ours does; a step of each group's range is the bound, and a
    scale in 6 bits (8 of Q6_K) beside the largest of the block another."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((6, 512)) * rng.lognormal(0, 1, (6, 1))).astype(np.float32)
    values[1, :256], values[2], values[3] = 0, 0.25, np.abs(values[3]) + 2
    tensor = quantize(values, name)
    read = tensor.dequantize()
    np.testing.assert_array_equal(gguf.dequantize(tensor.blocks, gguf.GGMLQuantizationType[name]), read)
    assert not read[1, :256].any() and not tensor.has_nonfinite_scale()
    blocks = values.reshape(-1, 256)
    span = blocks.max(1, initial=0) - blocks.min(1, initial=0)
    error = np.abs(read - values).reshape(-1, 256).max(1)
    assert (error <= span * (K_STEPS[name] + 1 / 63) + 1e-6).all()
    most = {"Q4_K": 0.10, "Q5_K": 0.05, "Q6_K": 0.03}[name]
    assert np.square(read[0] - values[0]).mean() ** 0.5 < most * values[0].std()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", *K_TYPES])
def test_important_columns_are_nearer(name):
    """The weighted error falls, by a good part where a few columns count much."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((16, 512)).astype(np.float32)
    importance = rng.lognormal(0, 2, 512)
    errors = [
        (np.square(quantize(values, name, how).dequantize() - values) * importance).sum() for how in (None, importance)
    ]
    assert errors[1] < 0.9 * errors[0]
    nothing = quantize(values, name, np.zeros(512))  # no text reached it: all columns the same
    np.testing.assert_array_equal(nothing.blocks, quantize(values, name, np.ones(512)).blocks)
    for bad in (importance[:-1], -importance, importance * np.nan):
        with pytest.raises(ValueError, match="importance of 512 columns"):
            quantize(values, name, bad)


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1", *K_TYPES])
@pytest.mark.parametrize("seed", range(4))
def test_a_block_of_one_number_is_kept(name, seed):
    """Whatever its columns count: no scale follows from codes that are all alike."""
    importance = np.random.default_rng(seed).lognormal(0, 2, 512)
    for value in (0.3, -0.3):
        values = np.full((2, 512), value, np.float32)
        np.testing.assert_allclose(quantize(values, name, importance).dequantize(), values, rtol=2e-3)


@pytest.mark.parametrize("name", K_TYPES)
def test_numbers_too_small_for_the_type_become_no_larger(name):
    values = (1e-5 * np.random.default_rng(0).standard_normal((4, 256))).astype(np.float32)
    for small in (values, values / 100):
        error = quantize(small, name).dequantize() - small
        assert np.square(error).sum() <= 1.01 * np.square(small).sum()
