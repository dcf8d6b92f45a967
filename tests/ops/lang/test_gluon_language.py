"""The names that differ between versions of Triton, and what happens where one is missing."""

import importlib.util
import types

import pytest

from transect.ops.lang import gluon_language, jit

pytest.importorskip("triton")


def loaded_anew():
    """The module once more, under another name: what it would be with the Triton that the test has arranged."""
    spec = importlib.util.spec_from_file_location("transect.ops.lang.gluon_language_anew", gluon_language.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_installed_triton_has_everything():
    assert gluon_language.GLUON_MISSING == ""
    for name in ("gluon", "gl", "tma", "mbarrier", "block_barrier", "async_load", "reinterpreted", "tensor_descriptor"):
        assert getattr(gluon_language, name) is not None, name


def test_the_newer_name_comes_first_and_the_older_one_does():
    both = types.SimpleNamespace(old="old", new="new")
    assert gluon_language._first_of(both, "new", "old") == "new"
    assert gluon_language._first_of(types.SimpleNamespace(old="old"), "new", "old") == "old"
    with pytest.raises(AttributeError, match="none of new, old"):
        gluon_language._first_of(types.SimpleNamespace(), "new", "old")


def test_a_gluon_that_lacks_a_name_is_none_and_says_so(monkeypatch):
    for name in ("barrier", "thread_barrier"):
        monkeypatch.delattr(gluon_language.gl, name, raising=False)
    anew = loaded_anew()
    assert anew.gluon is None and anew.async_load is None
    assert "has none of barrier, thread_barrier" in anew.GLUON_MISSING and "Triton" in anew.GLUON_MISSING

    def untouched():
        pass

    assert anew.gluon_kernel(untouched) is untouched


def test_without_triton(monkeypatch):
    monkeypatch.setattr(jit, "triton", None)
    monkeypatch.setitem(__import__("sys").modules, "triton.experimental", None)
    anew = loaded_anew()
    assert anew.gluon is None and anew.GLUON_MISSING.startswith("Triton is not installed: pip install")


def test_triton_3_6_interprets_with_older_numpy_only():
    assert jit.interpreter_refusal("3.6.0", "2.3.5") == ""
    assert jit.interpreter_refusal("3.7.1", "2.5.2") == jit.interpreter_refusal("3.10.0+git1", "2.4.0") == ""
    assert "install numpy<2.4" in jit.interpreter_refusal("3.6.0", "2.4.0")
    assert "install numpy<2.4" in jit.interpreter_refusal("3.6.0", "2.10.1")
