"""Sampling defaults of generation_config.json and of GGUF files, and what goes over them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from transect.engine.frontends.inputs import default_params
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.text.sampling_defaults import sampling_defaults

FILE = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "do_sample": True,
    "max_new_tokens": 64,
    "eos_token_id": [2, 7],
    "transformers_version": "4.51.0",
    "min_p": None,
}


def directory(path, values=FILE):
    (path / "generation_config.json").write_text(json.dumps(values))
    return SimpleNamespace(kind="hf", path=path, text_folder=path)


def gguf(**metadata):
    return SimpleNamespace(kind="gguf", text_folder=None, gguf=SimpleNamespace(metadata=metadata))


def test_the_model_s_own_file(tmp_path):
    found = sampling_defaults(directory(tmp_path))
    assert found.values == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert (found.max_new_tokens, found.eos_token_ids) == (64, (2, 7))
    shown = "sampling defaults temperature=0.6, top_p=0.95, top_k=20, max_new_tokens=64 (generation_config.json)"
    assert str(found) == shown
    assert default_params(found) == SamplingParams(temperature=0.6, top_p=0.95, top_k=20, max_tokens=64)
    assert [found.limit(asked) for asked in (None, 8, 100)] == [64, 8, 64]


@pytest.mark.parametrize("word", ["none", "vllm"])
def test_none_is_none(tmp_path, word):
    found = sampling_defaults(directory(tmp_path), word)
    assert not found.values and found.max_new_tokens is None and str(found) == ""
    assert default_params(found) == SamplingParams() and found.limit(None) is None


def test_another_folder_or_file(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    directory(other, {"repetition_penalty": 1.1})
    for where in (other, other / "generation_config.json"):
        found = sampling_defaults(directory(tmp_path), str(where))
        assert found.values == {"repetition_penalty": 1.1} and str(other) in found.origin
    with pytest.raises(ValueError, match="neither auto, none, nor a folder"):
        sampling_defaults(directory(tmp_path), str(tmp_path / "nowhere"))


def test_what_is_given_by_hand_goes_over_it(tmp_path):
    found = sampling_defaults(directory(tmp_path), override={"top_k": 5, "min_p": 0.1, "top_p": None})
    assert found.values == {"temperature": 0.6, "top_p": 0.95, "top_k": 5, "min_p": 0.1}
    assert found.origin == "generation_config.json and override_generation_config"
    assert sampling_defaults(directory(tmp_path), "none", {"temperature": 0.0}).values == {"temperature": 0.0}
    with pytest.raises(ValueError, match="no key 'temprature'; it takes temperature, "):
        sampling_defaults(directory(tmp_path), override={"temprature": 1})


def test_a_gguf_file_s_own():
    found = sampling_defaults(
        gguf(**{"general.sampling.temp": np.float32(0.7), "general.sampling.top_k": 40, "general.sampling.mirostat": 2})
    )
    assert found.values == {"temperature": 0.7, "top_k": 40} and found.origin == "the GGUF file"
    assert sampling_defaults(gguf()).values == {}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": "hot"}, "temperature must be a finite number, got 'hot'"),
        ({"top_p": 7}, r"top_p must be in \(0, 1\], got 7"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1"),
        ({"eos_token_id": "x"}, "eos_token_id must be a token id or a list of them"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, values, words):
    with pytest.raises(ValueError, match=f"^generation_config.json: {words}.*start with generation_config none"):
        default_params(sampling_defaults(directory(tmp_path, values)))
