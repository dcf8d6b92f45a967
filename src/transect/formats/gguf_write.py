"""Writing GGUF files, by the ``gguf`` package: metadata, then tensors one at a time, so that no model is held whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.numbers.gguf import block_type
from .ggml_blocks import QuantizedTensor


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to be written: its name, shape in torch's order, type, and a function that makes it when needed."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    made: Callable[[], QuantizedTensor]


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Iterable[PlannedTensor]) -> None:
    """Write a file, which gets its name when it is complete.

    Args:
        metadata: key to value: str, int (written as uint32), float (float32), bool, or a list of one of these;
            ``general.architecture`` among them.

    Raises:
        ValueError: the file cannot be written.
    """
    import gguf

    tensors = list(tensors)
    partial = path.with_name(f".partial-{path.name}")
    writer: Any = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(partial, metadata["general.architecture"])
        for key, value in metadata.items():
            if key != "general.architecture":  # the writer has it
                _add(writer, key, value)
        for tensor in tensors:
            kind = block_type(tensor.type_name)
            stored = (*tensor.shape[:-1], kind.row_bytes(tensor.shape[-1]))
            dtype = np.dtype(np.uint8)
            raw = gguf.GGMLQuantizationType(kind.ggml_id)
            writer.add_tensor_info(tensor.name, stored, dtype, int(np.prod(stored)), raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            made = tensor.made()
            assert made.shape == tensor.shape and made.type_name == tensor.type_name, tensor.name
            writer.write_tensor_data(np.ascontiguousarray(made.blocks))
        writer.close()
        partial.replace(path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):  # a file system that is read-only refuses this even where there is no file
            partial.unlink(missing_ok=True)


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))
