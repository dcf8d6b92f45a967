"""The GGUF reader against the gguf package's writer and reader, and against damaged files."""

import errno
import os
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from effort import quick_first
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transect.formats.ggml_quantize import WRITABLE, quantize
from transect.formats.gguf_file import GGUFFile
from transect.formats.gguf_write import write_gguf


def write(path, metadata=(), tensors=()):
    """A GGUF file of (adder name, key, value) entries and (name, QuantizedTensor) tensors; returns its bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    for adder, key, value in metadata:
        getattr(writer, adder)(key, value)
    for name, tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.type_name]
        data = tensor.blocks.reshape(*tensor.shape[:-1], -1)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


METADATA = [
    ("add_uint8", "a.u8", 200),
    ("add_int8", "a.i8", -3),
    ("add_uint16", "a.u16", 65000),
    ("add_int16", "a.i16", -300),
    ("add_uint32", "a.u32", 2**32 - 1),
    ("add_int32", "a.i32", -(2**31)),
    ("add_uint64", "a.u64", 2**64 - 1),
    ("add_int64", "a.i64", -(2**63)),
    ("add_float32", "a.f32", 0.5),
    ("add_float64", "a.f64", 0.1),
    ("add_bool", "a.bool", True),
    ("add_string", "a.string", "naïve 日本 \n"),
    ("add_array", "a.strings", ["", "a", "Ġthe", "日"]),
    ("add_array", "a.ints", [1, -2, 3]),
    ("add_array", "a.bools", [True, False]),
    ("add_array", "a.floats", [0.5, -1.0]),
]


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """Path and bytes of a file with every kind of metadata and every writable tensor type."""
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    rng = np.random.default_rng(0)
    tensors = [(f"t.{name}", quantize(rng.standard_normal((3, 256)), name)) for name in WRITABLE]
    tensors.append(("t.line", quantize(rng.standard_normal(5), "F32")))
    return path, write(path, METADATA, tensors)


def test_metadata_is_what_was_written(sample):
    metadata = GGUFFile.open(sample[0]).metadata
    for _, key, value in METADATA:
        assert metadata[key] == value and type(metadata[key]) is type(value)
    assert metadata["general.architecture"] == "llama"


def test_agrees_with_the_gguf_package(sample):
    ours, theirs = GGUFFile.open(sample[0]), gguf.GGUFReader(sample[0])
    assert set(ours.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.type_name == tensor.tensor_type.name
        assert mine.shape == tuple(int(n) for n in tensor.shape[::-1])
        np.testing.assert_array_equal(mine.blocks.ravel(), tensor.data.view(np.uint8).ravel())


def test_tensors_are_views_of_the_file_and_cannot_be_written(sample):
    tensor = GGUFFile.open(sample[0]).tensors["t.Q4_1"]
    with pytest.raises(ValueError):
        tensor.blocks[0, 0] = 1


def test_alignment_is_honoured(tmp_path):
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(128)
    for i in range(3):
        writer.add_tensor(f"t{i}", np.full(5, i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = GGUFFile.open(path).tensors
    for i in range(3):
        np.testing.assert_array_equal(tensors[f"t{i}"].dequantize(), np.full(5, i))


VALUES = st.one_of(
    st.text(max_size=8).filter(lambda s: "\0" not in s),
    st.lists(st.text(max_size=5), min_size=1, max_size=5),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5),
)


@given(entries=st.dictionaries(st.text("abc._", min_size=1, max_size=6), VALUES, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_round_trip(tmp_path, entries, seed):
    rng = np.random.default_rng(seed)
    names = rng.choice(WRITABLE, 3)
    values = [rng.standard_normal((int(rng.integers(1, 4)), 256)).astype(np.float32) for _ in names]
    tensors = [(f"t{i}", quantize(v, name)) for i, (v, name) in enumerate(zip(values, names, strict=True))]
    metadata = [("add_string" if isinstance(v, str) else "add_array", k, v) for k, v in entries.items()]
    write(tmp_path / "x.gguf", metadata, tensors)
    file = GGUFFile.open(tmp_path / "x.gguf")
    # the writer leaves out empty strings
    assert {k: v for k, v in file.metadata.items() if k != "general.architecture"} == {
        k: v for k, v in entries.items() if v != ""
    }
    for name, tensor in tensors:
        assert file.tensors[name].type_name == tensor.type_name and file.tensors[name].shape == tensor.shape
        np.testing.assert_array_equal(file.tensors[name].blocks, tensor.blocks)


# ---- damaged files


def open_bytes(tmp_path, data):
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    return GGUFFile.open(path)


def refuses(tmp_path, data, message):
    with pytest.raises(ValueError, match=message) as caught:
        open_bytes(tmp_path, data)
    assert "\n" not in str(caught.value) and "bad.gguf" in str(caught.value)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def build(entries=(), tensors=(), data=b"", version=3):
    """A GGUF file from raw parts: entries (key, type, value bytes) and tensors (name, dims, type, offset)."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    for key, kind, value in entries:
        out += text(key) + struct.pack("<I", kind) + value
    for name, dims, kind, offset in tensors:
        out += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return out + bytes(-len(out) % 32) + data


def test_the_raw_builder_makes_a_readable_file(tmp_path):
    nested = struct.pack("<IQ", 9, 2) + 2 * struct.pack("<IQ2I", 4, 2, 7, 8)
    file = open_bytes(tmp_path, build([("k", 9, nested)], [("t", [4, 2], 0, 0)], bytes(32)))
    assert file.metadata == {"k": [[7, 8], [7, 8]]} and file.tensors["t"].shape == (2, 4)
    assert open_bytes(tmp_path, build(version=2)).tensors == {}


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "is empty"),
        (b"GGU", "is not a GGUF file"),
        (b"PK\3\4" + bytes(100), "is not a GGUF file"),
        (b"GGUF", "truncated or corrupt"),
        (build(version=1), "GGUF version 1; versions 2 and 3"),
        (build(version=3 << 24), "big-endian GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensors and 0 metadata entries do not fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "metadata entries do not fit"),
        (build([("k", 4, bytes(4)), ("k", 4, bytes(4))]), "'k' occurs twice"),
        (build([("k", 99, bytes(32))]), "unknown type 99"),
        (build([("k", 9, struct.pack("<IQ", 4, 2**62))]), "claims 4611686018427387904 entries"),
        (build([("k", 9, struct.pack("<IQ", 4, 2**20))]), "runs past the end"),
        (build([("k", 9, struct.pack("<IQ", 8, 2**20))]), "claims 1048576 strings"),
        (build([("k", 9, struct.pack("<IQ", 9, 2**20))]), "claims 1048576 lists"),
        (build([("k", 9, struct.pack("<IQ", 9, 1) * 6 + bytes(64))]), "at depth 4"),
        (build([("k", 8, struct.pack("<Q", 2**40))]), "claims to be 1099511627776 bytes"),
        (build([("k", 8, struct.pack("<Q", 1000))]), "runs past the end"),
        (build([("k", 8, struct.pack("<Q", 2) + b"\xff\xfe")]), "is not UTF-8"),
        (build([("k", 9, struct.pack("<IQQ", 8, 1, 2) + b"\xff\xfe")]), "entry 0 of 'k' is not UTF-8"),
        (build([("k", 9, struct.pack("<IQQ", 8, 2, 2**63) + bytes(8))]), "entry 0 of 'k' runs past the end"),
        (build([("split.count", 2, b"\3\0")]), "one of 3 parts of a model and not named so"),
        (build([("general.alignment", 4, bytes(4))]), "general.alignment is 0"),
        (build([("general.alignment", 8, text("x"))]), "general.alignment is 'x'"),
        (build([], [("t", [], 0, 0)]), "'t' has 0 dimensions"),
        (build([], [("t", [1] * 5, 0, 0)]), "'t' has 5 dimensions"),
        (build([], [("t", [0], 0, 0)]), "empty shape"),
        (build([], [("t", [33], 8, 0)], bytes(64)), "rows of 33 values"),
        (build([], [("t", [256], 19, 0)], bytes(256)), "unsupported type IQ1_S; take a file quantized to one of F32"),
        (build([], [("t", [256], 77, 0)], bytes(256)), "unsupported type number 77"),
        (build([], [("t", [8], 0, 8)], bytes(256)), "not aligned to 32"),
        (build([], [("t", [8], 0, 0)], bytes(31)), "ends at byte"),
        (build([], [("t", [2**62, 2**62], 0, 0)], bytes(64)), "ends at byte"),
        (build([], [("t", [8], 0, 0), ("t", [8], 0, 32)], bytes(64)), "listed twice"),
        (build([], [("t", [16], 0, 0), ("u", [8], 0, 32)], bytes(64)), "'t' and 'u' overlap"),
    ],
)  # fmt: skip
def test_each_kind_of_damage_has_its_sentence(tmp_path, data, message):
    refuses(tmp_path, data, message)


def test_unreadable_paths(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ValueError, match="cannot read"):
            GGUFFile.open(path)


def try_to_use(path):
    """Open and dequantize everything; a ValueError is the one acceptable complaint."""
    try:
        file = GGUFFile.open(path)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    for tensor in file.tensors.values():
        assert tensor.dequantize().shape == tensor.shape
        if tensor.is_packed and len(tensor.shape) == 2:
            tensor.affine()


@pytest.mark.parametrize("seed", quick_first(range(8), 3))
def test_random_damage_never_makes_anything_but_a_value_error(tmp_path, sample, seed):
    rng = np.random.default_rng(seed)
    original = np.frombuffer(sample[1], np.uint8)
    header = sample[1].index(b"t.line") + 64  # damage after it only changes numbers
    path = tmp_path / "fuzzed.gguf"
    tracemalloc.start()
    for _ in range(250):
        data = original.copy()
        for at in rng.integers(0, header, rng.integers(1, 4)):
            data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, data[at] ^ (1 << rng.integers(8)), rng.integers(256)])
        path.write_bytes(data.tobytes())
        try_to_use(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_truncation_anywhere_is_noticed(tmp_path, sample):
    data = sample[1]
    end = len(data) - 32  # the last 32 bytes may be padding
    for cut in [*range(0, 400, 7), *np.random.default_rng(0).integers(0, end, 150)]:
        refuses(tmp_path, data[:cut], "truncated|is empty|is not a GGUF file")


def test_a_model_in_parts_is_whole_from_any_of_them(tmp_path):
    tensors = {f"t{number}": quantize(np.full((2, 32), number), "Q8_0") for number in range(5)}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    writer.add_string("a", "b")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("m-*-of-00003.gguf"))
    assert len(parts) == 3
    for path in parts:
        file = GGUFFile.open(path)
        assert file.metadata["a"] == "b" and file.parts == tuple(parts) and list(file.tensors) == list(tensors)
        for name, tensor in file.tensors.items():
            np.testing.assert_array_equal(tensor.blocks, tensors[name].blocks)
    contents = [path.read_bytes() for path in parts]
    parts[2].unlink()
    refuses_file(parts[0], r"one of 3 parts of a model, and 1 are not beside it \(m-00003-of-00003.gguf\)")
    parts[2].write_bytes(contents[1])
    refuses_file(parts[0], r"m-00003-of-00003.gguf says that it is part 1 \(from 0 on\) of 3")
    parts[2].write_bytes(contents[2].replace(b"t4", b"t3"))
    refuses_file(parts[1], "m-00003-of-00003.gguf: the tensor 't3' is in another part too")
    parts[2].write_bytes(contents[2][:-70])
    refuses_file(parts[1], "m-00003-of-00003.gguf is a truncated or corrupt GGUF file")


def refuses_file(path, message):
    with pytest.raises(ValueError, match=message) as caught:
        GGUFFile.open(path)
    assert "\n" not in str(caught.value)


def test_a_file_system_that_takes_nothing_is_named_by_the_file_that_was_asked_for(tmp_path, monkeypatch) -> None:
    """One that is read-only refuses to unlink, even where there is no file."""

    def refuse(*arguments: object, **keywords: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), ".partial-m.gguf")

    monkeypatch.setattr(gguf, "GGUFWriter", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ValueError, match=r"^cannot write .*/m\.gguf: Read-only file system$"):
        write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, [])
