"""Fingerprints: equal for equal weights and settings, another where one of them changes."""

import shutil

import pytest
import torch
from tiny_llm import save_tiny_llm

from transect.checkpoints.resolve import resolve
from transect.engine.config import EngineConfig
from transect.engine.numerics import Numerics, numerics_of, weights_digest


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(folder)
    return folder


def found(folder, exact=True, **settings):
    config = EngineConfig(model=str(folder), **settings)
    return numerics_of(config, resolve(str(folder)), torch.device("cpu"), "torch", exact)


def test_a_copy_has_the_same_fingerprint_and_promises_the_same(tiny, tmp_path):
    copy = shutil.copytree(tiny, tmp_path / "copy")
    one, other = found(tiny), found(copy, max_num_seqs=3)
    assert one == other and one.fingerprint == other.fingerprint and one.promises(other)
    assert not found(copy, exact=False).promises(one) and not one.promises(found(copy, exact=False))


@pytest.mark.parametrize("changed", [{"block_size": 32}, {"dtype": "float32"}, {"kv_cache_dtype": "fp8"}])
def test_a_setting_that_changes_bits_changes_the_fingerprint(tiny, changed):
    one, other = found(tiny), found(tiny, **changed)
    assert one.differences(other) == list(changed) and not one.promises(other)
    assert one.fingerprint != other.fingerprint


def test_one_byte_of_the_weights_is_seen(tiny, tmp_path):
    copy = shutil.copytree(tiny, tmp_path / "copy")
    file = copy / "model.safetensors"
    body = bytearray(file.read_bytes())
    body[len(body) // 2 // 4096 * 4096] ^= 1
    file.write_bytes(body)
    config = EngineConfig(model=str(tiny))
    assert weights_digest(config, resolve(str(copy))) != weights_digest(config, resolve(str(tiny)))
    random = EngineConfig(model=str(tiny), load_format="dummy", seed=3)
    other = EngineConfig(model=str(tiny), load_format="dummy", seed=4)
    assert weights_digest(random, resolve(str(tiny))) != weights_digest(other, resolve(str(tiny)))


def test_differences_are_named():
    one, other = Numerics({"a": "1", "b": "2"}, True), Numerics({"a": "1", "c": "2"}, True)
    assert one.differences(other) == ["b", "c"]
