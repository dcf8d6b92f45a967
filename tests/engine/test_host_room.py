"""A model that cannot fit in the memory of the host is refused before it takes all of it."""

import pytest
from tiny_checkpoints import make_model, write_gguf
from tiny_llm import save_tiny_llm

from transect import LLM
from transect.checkpoints.resolve import resolve
from transect.costs.units import GIB
from transect.engine.build import check_weights
from transect.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("settings", "ranks", "fits", "message"),
    [
        ({}, 1, 15.5, "the weights take 15.0 GiB of memory, and 10.0 GiB are free: hold them in fewer bits"),
        ({"dtype": "float32"}, 1, 31.0, "the weights take 29.9 GiB"),
        ({"quantization": "int4"}, 1, 8.0, None),
        ({}, 2, 31.0, "the weights take 29.9 GiB of memory over 2 ranks of this host"),
    ],
)
def test_weights_beside_the_memory_that_is_free(settings, ranks, fits, message):
    config = EngineConfig(model="llama-3.1-8b", load_format="dummy", **settings)
    source = resolve(config.model, load_format="dummy")
    check_weights(config, source, int(fits * GIB), ranks=ranks)
    if message is None:
        check_weights(config, source, 10 * GIB, ranks=ranks)
        with pytest.raises(ValueError, match="are free: take a smaller model, or let layers come from a disk"):
            check_weights(config, source, GIB, ranks=ranks)
        return
    with pytest.raises(ValueError, match=message):
        check_weights(config, source, 10 * GIB, ranks=ranks)


def test_all_parts_of_a_gguf_file_count(tmp_path):
    write_gguf(tmp_path / "m.gguf", make_model("llama"), "Q8_0", part=4)
    files = sorted(tmp_path.glob("m-*.gguf"))
    source = resolve(str(files[1]))
    assert len(files) > 2 and source.gguf_files == tuple(files)
    with pytest.raises(ValueError, match="the weights take"):
        check_weights(EngineConfig(model=source.name), source, files[1].stat().st_size)
    check_weights(EngineConfig(model=source.name), source, sum(file.stat().st_size for file in files))


def test_an_engine_looks_before_it_loads(tmp_path, monkeypatch):
    save_tiny_llm(tmp_path)
    monkeypatch.setattr("transect.engine.build.free_memory", lambda: 1000)
    monkeypatch.setattr("transect.engine.build.load_model", lambda *rest, **more: pytest.fail("it loads"))
    with pytest.raises(ValueError, match="the weights take"):
        LLM(str(tmp_path), device="cpu", native=False)
