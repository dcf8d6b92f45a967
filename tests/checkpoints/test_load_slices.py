"""The loader reads what a shard needs of a file, and nothing else."""

import dataclasses

import pytest
import torch
from tiny_checkpoints import make_model, write_gguf

from transect.checkpoints.hf import safe_open
from transect.checkpoints.load import fill, load_model, stored_weights
from transect.checkpoints.resolve import resolve
from transect.formats.ggml_blocks import QuantizedTensor
from transect.models.decoder import Decoder
from transect.models.stored import Stored

ROWS, COLUMNS = slice(3, 11), slice(32, 64)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Files of a llama in safetensors and in GGUF types, and of a GPT-2, whose q, k and v are one transposed matrix."""
    folder = tmp_path_factory.mktemp("checkpoints")
    llama = make_model("llama")
    llama.save_pretrained(folder / "llama")
    make_model("gpt2").save_pretrained(folder / "gpt2")
    files = {name: write_gguf(folder / f"{name}.gguf", llama, name) for name in ("Q8_0", "F16")}
    files["gpt2 Q8_0"] = write_gguf(folder / "gpt2.gguf", make_model("gpt2"), "Q8_0")
    named = {"llama": folder / "llama", "gpt2": folder / "gpt2", **files}
    return {name: resolve(str(path)) for name, path in named.items()}


def numbers(values):
    return torch.from_numpy(values.dequantize()) if isinstance(values, QuantizedTensor) else values


@pytest.mark.parametrize("name", ["llama", "gpt2", "Q8_0", "F16", "gpt2 Q8_0"])
def test_a_slice_is_a_part_of_the_whole(sources, name):
    for each, stored in stored_weights(sources[name]):
        whole = numbers(stored.read())
        assert tuple(whole.shape) == stored.shape, each
        assert torch.equal(numbers(stored.read(ROWS)), whole[ROWS]), each
        if whole.ndim == 2:
            assert torch.equal(numbers(stored.read(columns=COLUMNS)), whole[:, COLUMNS]), each
            assert torch.equal(numbers(stored.read(ROWS, COLUMNS)), whole[ROWS, COLUMNS]), each


def test_blocks_of_a_file_are_not_parted(sources):
    stored = dict(stored_weights(sources["Q8_0"]))["layers.0.mlp.down.weight"]
    with pytest.raises(ValueError, match=r"'blk.0.ffn_down.weight' packs 32 numbers of a row together"):
        stored.read(columns=slice(0, 40))


class CountingFile:
    """A safetensors file that notes the bytes that are read."""

    def __init__(self, file, read):
        self._file, self._read = file, read

    def keys(self):
        return self._file.keys()

    def get_tensor(self, name):
        tensor = self._file.get_tensor(name)
        self._read.append(tensor.nbytes)
        return tensor

    def get_slice(self, name):
        view, read = self._file.get_slice(name), self._read

        class View:
            get_shape, get_dtype = view.get_shape, view.get_dtype

            def __getitem__(self, part):
                tensor = view[part]
                read.append(tensor.nbytes)
                return tensor

        return View()


def local(config, ranks):
    """The sizes of one of ``ranks`` shards."""
    return dataclasses.replace(
        config, n_heads=config.n_heads // ranks, n_kv_heads=config.n_kv_heads // ranks, ffn_dim=config.ffn_dim // ranks
    )


def test_a_rank_reads_its_slices_of_safetensors_alone(sources, monkeypatch):
    source, read = sources["llama"], []

    class Opened:
        def __init__(self, path, framework):
            self._file = safe_open(path, framework=framework)

        def __enter__(self):
            return CountingFile(self._file.__enter__(), read)

        def __exit__(self, *exception):
            return self._file.__exit__(*exception)

    monkeypatch.setattr("transect.checkpoints.hf.safe_open", Opened)
    whole = load_model(source, dtype="float32", native=False)
    everything = sum(read)
    assert everything == sum(p.nbytes for p in whole.parameters())
    shards = []
    for rank in range(2):
        read.clear()
        shard = Decoder(local(source.config, 2), dtype=torch.float32).requires_grad_(False)
        shards.append(fill(shard, stored_weights(source), rank=rank, ranks=2))
        matrices = sum(w.nbytes for name, w in whole.weights() if name != "head")
        assert sum(read) == sum(p.nbytes for p in shard.parameters()) == everything - matrices // 2
    for name, weight in whole.weights():
        if name == "head":
            continue
        dim = "in" if name.endswith((".o", ".down")) else "out"
        for rank, shard in enumerate(shards):
            assert torch.equal(dict(shard.weights())[name].dense(), weight.shard(dim, rank, 2).dense()), name


@pytest.mark.parametrize(("name", "ranks"), [("Q8_0", 3), ("gpt2 Q8_0", 4)])
def test_a_rank_reads_its_slices_of_gguf(sources, name, ranks):
    source, seen = sources[name], []
    whole = load_model(source, dtype="float32", native=False)

    def watched(stored: Stored) -> Stored:
        def read(rows, columns):
            values = stored.read(rows, columns)
            if isinstance(values, QuantizedTensor):
                seen.append(values.nbytes)
            return values

        return Stored(stored.shape, read)

    config = source.config
    # Only the width of the MLP is cut here: heads of the tiny files are narrower than a block of 32.
    for rank in range(ranks):
        seen.clear()
        shard = Decoder(dataclasses.replace(config, ffn_dim=config.ffn_dim // ranks), dtype=torch.float32)
        fill(shard, ((n, watched(s)) for n, s in stored_weights(source)), rank=rank, ranks=ranks)
        down, up = whole.layers[1].mlp.down, whole.layers[1].mlp.up
        assert torch.equal(shard.layers[1].mlp.down.dense(), down.shard("in", rank, ranks).dense())
        assert torch.equal(shard.layers[1].mlp.up.dense(), up.shard("out", rank, ranks).dense())
        assert sum(seen) == sum(p.numel() for p in shard.parameters() if p.ndim == 2) * 8.5 / 8


def test_a_model_that_is_no_shard_is_refused(sources):
    source = sources["llama"]
    third = Decoder(dataclasses.replace(source.config, ffn_dim=source.config.ffn_dim // 4))
    with pytest.raises(ValueError, match=r"layers.0.mlp.up.weight is \[\d+, 64\] in the files and \[\d+, 64\] in the"):
        fill(third, stored_weights(source), rank=0, ranks=2)
