"""All families of models: one file of this folder an entry, found by its record.

A file holds a ``Family`` as a name of its module. Nothing else lists them: readers and writers of files, shapes by
name, parity tests and the table of the docs ask here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from ..fields import shown
from ..records import records_in
from .family import Family


@cache
def families() -> Mapping[str, Family]:
    """Return all families by name.

    Raises:
        ValueError: two records have one name.
    """
    return records_in(__package__, Family, "families")


@cache
def _by_model_type() -> Mapping[str, Family]:
    return {name: each for each in families().values() for name in (each.name, *each.other_names)}


def is_known(model_type: object) -> bool:
    """Return True if ``model_type`` of config.json names a family."""
    return isinstance(model_type, str) and model_type in _by_model_type()


def family(model_type: object) -> Family:
    """Return the family of that ``model_type`` of config.json.

    Raises:
        ValueError: there is none; the message lists those that there are.
    """
    if model_type is None:
        raise ValueError(
            "config.json has no 'model_type', so its architecture is not known: add the key (\"llama\" for models of "
            "Llama's kind), or fetch the model again"
        )
    if not isinstance(model_type, str) or model_type not in _by_model_type():
        name = repr(model_type) if isinstance(model_type, str) else shown(model_type)
        raise ValueError(f"architecture {name} is not supported; supported are: {', '.join(families())}")
    return _by_model_type()[model_type]


@cache
def by_gguf() -> Mapping[str, tuple[Family, ...]]:
    """Return the families of GGUF files by ``general.architecture``; those with a condition first."""
    ordered = sorted(families().values(), key=lambda each: each.gguf_if is None)
    return {each.gguf: tuple(one for one in ordered if one.gguf == each.gguf) for each in ordered if each.gguf}
