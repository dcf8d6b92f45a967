"""Number formats are described once: what options take, weights hold and accounts count is what the records say."""

import ast
import pickle
from pathlib import Path

import pytest
import torch

import transect
from transect.checkpoints import quantized_out
from transect.costs.storage import storage_for
from transect.engine.config import EngineConfig
from transect.models.quantized_layouts import byte_values, listed_values, to_listed
from transect.models.staging import Staging
from transect.models.weights.kinds import ROUNDED, kinds_for
from transect.models.weights.packed import Packed, refuses
from transect.ops.attention.paged.cache_codes import stored_width
from transect.ops.cpu.library import KV_DTYPES
from transect.ops.opset import resolve_ops
from transect.spec.numbers import registry
from transect.spec.numbers.codebook import codebook_format, codebook_of
from transect.spec.numbers.dense import DTYPES
from transect.spec.numbers.gguf import BLOCK_TYPES, UNITS
from transect.spec.numbers.layouts import BlockLayout, GroupLayout, ListedLayout, ScaledLayout
from transect.spec.numbers.number_format import Codebook
from transect.train.adapters.qlora import BASES
from transect.train.config.adapters import LoRAConfig

TERNARY = Codebook((-1.0, 0.0, 1.0), 32)


def test_each_format_has_a_use_or_is_plain():
    found = registry.formats().values()
    used = [form for form in found if form.rounding or form.cache or form.base or form.file or form.methods]
    assert set(found) - set(used) == set(DTYPES)
    assert {name for form in found for name in form.methods} == set(registry.methods()) - {"codebook"}
    assert all(form.summary and form.accuracy and form.bits > 0 for form in registry.formats().values())


@pytest.mark.parametrize("name", registry.roundings())
def test_a_weight_of_the_format_has_the_bits_of_its_record(name):
    """512 rows of 1024: a float32 scale for each row is 1/32 bit."""
    kind = kinds_for(name, "cpu")("mlp.down")
    weight = kind(512, 1024, ops=resolve_ops("cpu"), dtype=torch.bfloat16)
    weight.load(torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)), Staging("cpu"))
    assert 0 <= weight.format.bits - registry.roundings()[name].bits <= 1 / 32
    assert storage_for(2, name).linear == registry.roundings()[name].bits


@pytest.mark.parametrize("name", registry.roundings())
def test_the_kernels_of_the_processor_hold_what_the_record_says(name, library):
    form = registry.roundings()[name]
    assert (refuses(form) is None) == (form.rounding.native_bits is not None)
    weight = Packed(512, 1024, library=library, rounding=form)
    weight.load(torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)), Staging("cpu"))
    assert weight.format.bits == form.rounding.native_bits == storage_for(2, name, native=True).linear


@pytest.fixture
def library():
    from transect.ops.cpu import library as cpu_library
    from transect.ops.registry import Unavailable

    try:
        return cpu_library.load(1)
    except Unavailable as reason:
        pytest.skip(str(reason))


def test_plain_torch_knows_the_values_of_codes_that_it_does_not_hold():
    gone = {form for form in registry.roundings().values() if not form.rounding.kept_on_cpu}
    assert set(ROUNDED) == gone


def test_caches_of_the_kernels_of_the_processor():
    native = {getattr(torch, use.dtype) for use in registry.cache_uses().values() if use.native}
    assert native == set(KV_DTYPES) - {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", registry.cache_formats())
def test_a_cache_takes_the_bits_of_its_record(name, head_dim):
    dtype = getattr(torch, registry.cache_uses()[name].dtype)
    assert registry.cache_bits(name, 16, head_dim) == 8 * dtype.itemsize * stored_width(head_dim, dtype) / head_dim
    assert registry.cache_bits("auto", 16, head_dim) == 16


def test_each_format_that_is_written_is_made_somewhere():
    uses = registry.file_uses()
    made = {form.name for form in (*quantized_out._SCALED, *quantized_out._GROUPED)}
    assert made == {name for name in uses if registry.formats()[name].codebook is None}
    assert {form.name for form in quantized_out._GROUPED} == {name for name, use in uses.items() if use.grouped}
    for name, use in uses.items():
        registry.check_method(use.settings(64 if use.grouped else None))
        assert set(registry.formats()[name].methods) <= set(registry.methods())
    assert set(BASES) == set(registry.base_formats())


def test_what_users_type():
    assert EngineConfig(model="m", kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"
    for name in registry.roundings():
        assert EngineConfig(model="m", quantization=name).quantization == name
    for setting, name in (("quantization", "int3"), ("kv_cache_dtype", "int4")):
        with pytest.raises(ValueError, match=rf"{setting} must be .*fp8.* not '{name}'"):
            EngineConfig(model="m", **{setting: name})
    assert EngineConfig(model="m", dtype="half").dtype == "float16"
    with pytest.raises(ValueError, match="dtype must be auto, float32, bfloat16 or float16, not 'float64'"):
        EngineConfig(model="m", dtype="float64")
    with pytest.raises(ValueError, match=r"lora.base_format must be int4 or nf4, not 'fp8'"):
        LoRAConfig(base_format="fp8")


@pytest.mark.parametrize("layout", [
    ScaledLayout(fp8=True), ScaledLayout(fp8=False), GroupLayout(64, ordered=True), BlockLayout(UNITS["Q4_K"]),
    ListedLayout(TERNARY),
])  # fmt: skip
def test_one_kind_of_weight_holds_each_layout(layout):
    """Also after a pickle, as other processes get it."""
    layout = pickle.loads(pickle.dumps(layout))
    kind = kinds_for(None, "cpu", layouts=(("mlp.down", layout),))("mlp.down")
    weight = kind(32, 256, ops=resolve_ops("cpu"), dtype=torch.bfloat16)
    assert weight.inner.takes(layout) and weight.takes(layout)
    assert not weight.inner.takes(GroupLayout(32))
    assert layout.label and abs(weight.format.bits - layout.bits) <= 1.01 and repr(layout) == repr(layout)


def test_units_of_a_gpu_are_of_types_that_files_have():
    assert set(UNITS) == {name for name, kind in BLOCK_TYPES.items() if kind.packed}
    for name, units in UNITS.items():
        assert BLOCK_TYPES[name].file_bits <= units.bits <= BLOCK_TYPES[name].file_bits + 0.5


@pytest.mark.parametrize("inputs", [64, 72])
@pytest.mark.parametrize("codebook", [
    TERNARY, Codebook((-1.0, 1.0), 8), Codebook(tuple(map(float, range(-7, 9))), 16, "bfloat16"),
    Codebook(tuple(map(float, range(-100, 101))), 32, "float32"),
])  # fmt: skip
def test_codes_of_a_codebook(codebook, inputs):
    """Numbers that codes can say come back to the bit; others within the distance to the next value."""
    generator = torch.Generator().manual_seed(1)
    values = torch.tensor(codebook.values)
    codes = torch.randint(len(values), (6, inputs), generator=generator)
    codes[:, :: codebook.group] = values.abs().argmax()
    exact = values[codes] * 0.25
    packed, scale = to_listed(exact, codebook)
    assert packed.dtype == torch.uint8 and packed.shape == (6, -(-inputs * codebook.code_bits // 8))
    assert torch.equal(listed_values(packed, scale, byte_values(codebook), codebook.group, inputs), exact)
    noise = torch.randn(6, inputs, generator=generator)
    again = listed_values(*to_listed(noise, codebook), byte_values(codebook), codebook.group, inputs)
    assert (again - noise).norm() < 0.75 * noise.norm()
    nothing = listed_values(*to_listed(0 * noise, codebook), byte_values(codebook), codebook.group, inputs)
    assert not nothing.any()


def test_what_is_no_codebook():
    for values, group, message in (((1.0,), 8, "2 to 256"), ((1.0, 0.0), 8, "ascending"), ((0.0, 1.0), 12, "bytes")):
        with pytest.raises(ValueError, match=message):
            codebook_format("odd", values, group, summary="")
    with pytest.raises(ValueError, match="must list the values"):
        registry.check_method({"quant_method": "codebook", "group_size": 32})
    with pytest.raises(ValueError, match="group_size"):
        registry.check_method({"quant_method": "codebook", "values": [0, 1]})
    with pytest.raises(ValueError, match="float16, bfloat16, float32, not 'int8'"):
        registry.check_method({"quant_method": "codebook", "values": [0, 1], "group_size": 8, "scale_dtype": "int8"})


def test_a_checkpoint_says_its_codebook():
    for scale_dtype in ("float16", "bfloat16", "float32"):
        form = codebook_format("odd", (-1.5, -0.5, 0.5, 1.5), 64, summary="", scale_dtype=scale_dtype)
        assert codebook_of(form.file.settings(None)) == form.codebook
        assert form.bits == 2 + (32 if scale_dtype == "float32" else 16) / 64


COMPARED = {"ops/linear/packed/gguf/gguf_layout.py"}
"""The reader of each block type's bits on a GPU: it takes them by name, as their layouts have nothing in common."""


def names_compared(text: str, names: set[str]) -> set[str]:
    """The names that a source compares something with, by ``==``, ``in`` or ``match``."""
    found: set[str] = set()
    if not any(f'"{name}"' in text for name in names):
        return found
    for node in ast.walk(ast.parse(text)):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        sides += [node.value] if isinstance(node, ast.MatchValue) else []
        for side in sides:
            values = side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
            found |= {value.value for value in values if isinstance(value, ast.Constant) and value.value in names}
    return found


def test_no_code_compares_the_names_of_formats():
    """It asks the record, or the weight; else a format in one file could not be complete."""
    packed = {name for name, kind in BLOCK_TYPES.items() if kind.packed}
    names = {*registry.formats(), *registry.methods(), *packed} - {form.name for form in DTYPES}
    assert names_compared('a == "fp8"\nb in ("gptq", 1)\nmatch c:\n    case "Q4_K": pass', names) == {
        "fp8",
        "gptq",
        "Q4_K",
    }
    root = Path(transect.__file__).parent
    files = {str(file.relative_to(root)): names_compared(file.read_text(), names) for file in root.rglob("*.py")}
    assert {name for name, found in files.items() if found} == COMPARED
