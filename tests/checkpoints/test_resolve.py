"""Names to sources: the order, the nearest names, and a sentence for each thing that is not there."""

import json
import pickle
import shutil
import subprocess
import sys

import httpx
import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file
from tiny_checkpoints import make_model, write_gguf
from tiny_llm import save_tiny_llm

from transect.checkpoints import resolve as resolve_module
from transect.checkpoints.pull import BUILTIN_MODELS
from transect.checkpoints.resolve import ModelSource, described, resolve, tokenizer_files
from transect.spec.hf import to_hf
from transect.spec.model import ModelConfig
from transect.spec.shapes import PRESETS, WEIGHTS_OF

CONFIG = ModelConfig("llama", 96, 64, 2, 4, 2, 16, 96, 128)


@pytest.fixture
def directory(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf(CONFIG)))
    return folder


@pytest.fixture
def nothing_pulled(tmp_path, monkeypatch):
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path / "empty"))


def fails(name, message, **options):
    with pytest.raises(ValueError, match=message) as caught:
        resolve(name, **options)
    assert "\n" not in str(caught.value)


def test_a_directory(directory, monkeypatch):
    source = resolve(str(directory))
    assert source == ModelSource("hf", directory, CONFIG, str(directory))
    monkeypatch.chdir(directory.parent)
    assert resolve("model").path == directory


def test_a_directory_comes_before_a_builtin_name(directory, monkeypatch):
    directory.rename(directory.parent / "smollm2-135m")
    monkeypatch.chdir(directory.parent)
    assert resolve("smollm2-135m").kind == "hf"


def test_a_gguf_file(smollm2):
    source = resolve(str(smollm2.path))
    assert (source.kind, source.path, source.config) == ("gguf", smollm2.path, smollm2.config)
    assert source.gguf is source.gguf and len(source.gguf.tensors) == 272


def test_the_builtin_name(smollm2):
    assert smollm2.kind == "gguf" and smollm2.name == "smollm2-135m"
    config = smollm2.config
    assert (config.n_layers, config.dim, config.vocab_size, config.head_dim) == (30, 576, 49152, 64)
    assert config.tied_embeddings and config.eos_token_ids[0] == 2


def test_a_source_can_be_sent_to_another_process(smollm2):
    assert smollm2.gguf is not None
    data = pickle.dumps(smollm2)
    assert len(data) < 10_000 and pickle.loads(data) == smollm2


def test_resolving_needs_no_torch(smollm2):
    code = "import sys; from transect.checkpoints.resolve import resolve, tokenizer_files; resolve('smollm2-135m'); "
    subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], check=True)


@pytest.mark.parametrize("name", ["SmolLM2-135M", "smollm2", "smolm2-135m", "smollm-135"])
def test_unknown_names_get_the_nearest(name, nothing_pulled):
    fails(name, f"unknown model '{name}'; did you mean 'smollm2-135m'")


def test_unknown_names_without_a_near_one(nothing_pulled):
    fails("xyzzy", r"unknown model 'xyzzy'; give a model directory, .* built-in name \(smollm2-135m\)")
    fails("", "is not a model name")
    fails("a\0b", "is not a model name")
    fails("x" * 5000, "cannot read 'xxx|unknown model")


def test_paths_that_do_not_exist(tmp_path):
    (tmp_path / "model-q8.gguf").write_bytes(b"")
    fails(str(tmp_path / "model-q4.gguf"), r"no file or directory .*\(near it: model-q8.gguf\)")
    fails("./nowhere", "no file or directory './nowhere'; give")
    fails("nowhere/model.gguf", "no file or directory")


def test_files_and_directories_that_are_no_model(tmp_path, smollm2):
    fails(str(tmp_path), "has no config.json, so it is not a model in Hugging Face layout$")
    (tmp_path / "last").mkdir()
    fails(str(tmp_path), r"it is a training run, whose newest checkpoint is .*last$")
    (tmp_path / "last").rmdir()
    shutil.copy(smollm2.path.with_name(smollm2.path.name + ".checked"), tmp_path / "a.gguf")
    fails(str(tmp_path), "give one of its GGUF files: a.gguf")
    fails(str(tmp_path / "a.gguf"), "is not a GGUF file")
    (tmp_path / "a.txt").write_text("hello")
    fails(str(tmp_path / "a.txt"), "is not a .gguf file")
    (tmp_path / "config.json").write_text("{")
    fails(str(tmp_path), "config.json is not valid JSON")
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    fails(str(tmp_path), "architecture 'mamba' is not supported; supported are: dots1, gemma2")


def test_truncated_and_foreign_gguf_files(tmp_path, smollm2):
    data = smollm2.path.read_bytes()
    path = tmp_path / "m.gguf"
    for length in (100, 1_000_000, 2_000_000, len(data) - 1):
        path.write_bytes(data[:length])
        fails(str(path), f"{path} is a truncated or corrupt GGUF file")
    path.write_bytes(data.replace(b"llama", b"mamba", 1))
    fails(str(path), f"{path}: architecture 'mamba' is not supported")


def test_builtin_that_is_not_in_the_cache_and_may_not_be_fetched(nothing_pulled):
    fails("smollm2-135m", "is not in the cache .* run `transect pull smollm2-135m` first", allow_download=False)


def test_builtin_is_fetched_when_it_is_not_in_the_cache(nothing_pulled, monkeypatch, smollm2):
    asked = []
    monkeypatch.setattr(
        resolve_module, "pull_builtin", lambda model, progress: asked.append((model, progress)) or smollm2.path
    )
    assert resolve("smollm2-135m", progress=print).path == smollm2.path
    assert asked == [(BUILTIN_MODELS["smollm2-135m"], print)]


# ---- the hub, with huggingface_hub's download replaced: what it raises is what it raises in use


@pytest.fixture
def hub(monkeypatch):
    """Calls seen; ``outcome`` is the directory to return or the exception to raise."""

    class Hub:
        outcome = None
        calls = []  # noqa: RUF012

        def __call__(self, name, **options):
            self.calls.append((name, options))
            if isinstance(self.outcome, BaseException):
                raise self.outcome
            return str(self.outcome)

    fake = Hub()
    fake.calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_a_revision_of_a_hub_id(hub, directory):
    hub.outcome = directory
    resolve("someone/model", revision="v1")
    assert tokenizer_files("someone/tokens", revision="abc") == directory
    (_, options), (name, tokens) = hub.calls
    assert options["revision"] == "v1" and tokens["revision"] == "abc" and name == "someone/tokens"
    assert "*.safetensors" not in tokens["allow_patterns"]
    for wrong in (str(directory), "smollm2-135m"):
        with pytest.raises(ValueError, match="'v1' is for hub ids"):
            resolve(wrong, revision="v1")


def test_a_hub_id(hub, directory):
    hub.outcome = directory
    source = resolve("someone/model", allow_download=False)
    assert (source.kind, source.path, source.name) == ("hf", directory, "someone/model")
    ((name, options),) = hub.calls
    assert name == "someone/model" and options["local_files_only"]
    resolve("someone/model")
    assert not hub.calls[1][1]["local_files_only"]
    assert "*.safetensors" in options["allow_patterns"] and "*.bin" not in options["allow_patterns"]


def test_a_gguf_file_of_a_hub_id(hub, tmp_path):
    """In the hub's cache a file is a link to one without a suffix."""
    hub.outcome = tmp_path / "snapshot"
    hub.outcome.mkdir()
    write_gguf(tmp_path / "blob", make_model("llama"))
    names = ["m-Q4_K_M.gguf", "m-q4_k_s.gguf", "m-Q8_0.gguf", "mmproj-Q8_0.gguf", "UD/m-UD-Q4_K_XL.gguf", "F16/m.gguf"]
    names += ["m-BF16.gguf", "m_Q8_0_L.gguf", "m_Q6_K.gguf"]
    for name in names:
        (hub.outcome / name).parent.mkdir(exist_ok=True)
        (hub.outcome / name).symlink_to(tmp_path / "blob")
    source = resolve("someone/m-GGUF:q8_0", revision="v1")
    assert (source.kind, source.name) == ("gguf", "someone/m-GGUF:q8_0")
    assert hub.calls[0][0] == "someone/m-GGUF" and hub.calls[0][1]["revision"] == "v1"
    for wanted, fetched in (
        ("q8_0", names[2]),
        ("f16", "F16/m.gguf"),
        ("Q6_K", "m_Q6_K.gguf"),
        ("UD-Q4_K_XL", names[4]),
    ):
        source = resolve(f"someone/m-GGUF:{wanted}")
        options = hub.calls[-1][1]
        patterns = {"allow_patterns": options["allow_patterns"], "ignore_patterns": options["ignore_patterns"]}
        assert list(filter_repo_objects(names, **patterns)) == [fetched]
        assert source.path == hub.outcome / fetched and source.gguf_files == (source.path,)
    assert resolve("someone/m-GGUF:Q4_K_S").kind == "gguf"
    fails("someone/m-GGUF:Q4_K", "one GGUF file whose name says 'Q4_K', and has none")
    fails("someone/m-GGUF:m", r"has .*m-Q4_K_M.gguf, m-Q8_0.gguf.*: give another part")
    fails("someone/m-GGUF", r"no config.json; if it has GGUF files, name one by its type \(someone/m-GGUF:Q4_K_M\)")


def response(status):
    return httpx.Response(status, request=httpx.Request("GET", "http://hub"))


@pytest.mark.parametrize(
    "error, message",
    [
        (errors.GatedRepoError("no", response=response(403)), "'o/smollm2' is gated; accept its terms"),
        (errors.RepositoryNotFoundError("no", response=response(401)), r"no model 'o/smollm2' \(the built-in 'smoll"),
        (errors.LocalEntryNotFoundError("no"), "no network: cannot reach the hub for 'o/smollm2'"),
        (errors.HfHubHTTPError("500 broken\nlong text", response=response(500)), "cannot fetch .*: 500 broken; check"),
        (OSError(28, "No space left on device"), "cannot fetch .* No space left on device"),
    ],
)  # fmt: skip
def test_what_the_hub_may_answer(hub, error, message):
    hub.outcome = error
    fails("o/smollm2", message)


def test_the_hub_may_not_be_asked_and_the_model_is_not_here(hub):
    hub.outcome = errors.LocalEntryNotFoundError("no")
    fails("o/m", "'o/m' is not on this machine; allow downloads", allow_download=False)


def test_a_hub_model_without_a_config(hub, tmp_path):
    hub.outcome = tmp_path
    fails("o/m", "has no config.json")


def test_what_is_only_described_needs_no_weights(tmp_path):
    (tmp_path / "shape").mkdir()
    save_tiny_llm(tmp_path / "shape")
    assert described(str(tmp_path / "shape")).kind == "shape" and described("llama-3.2-1b").kind == "shape"
    (tmp_path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    settings["base_model_name_or_path"] = str(tmp_path / "shape")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    factors = {name.format("A"): torch.zeros(2, 64), name.format("B"): torch.zeros(64, 2)}
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    assert described(str(tmp_path / "adapter")).adapter is not None


def test_near_names_of_shapes_are_offered(nothing_pulled):
    fails("llama-3.1-70b", r"did you mean 'llama-3.3-70b' or 'llama-3.1-8b'.*\(shapes, without weights\)\?")
    fails("qwen3-8", r"did you mean 'qwen3-8b'")
    fails("llama-3.1-70b", r"no shape 'llama-3.1-70b'; did you mean 'llama-3.3-70b'", load_format="dummy")


def test_a_shape_says_where_its_weights_come_from(nothing_pulled):
    assert set(WEIGHTS_OF) == set(PRESETS)
    for name, hub_id in WEIGHTS_OF.items():
        fails(name, rf"shape without weights\. Weights come from a hub id \({hub_id}\).*load_format dummy")


def test_a_configuration_without_an_architecture_says_which_key_is_missing(tmp_path, smollm2):
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    fails(str(tmp_path), "config.json has no 'model_type', so its architecture is not known: add the key")
    key = b"general.architecture"
    (tmp_path / "m.gguf").write_bytes(smollm2.path.read_bytes().replace(key, b"general.architecturf", 1))
    fails(str(tmp_path / "m.gguf"), "the GGUF file has no 'general.architecture'")
