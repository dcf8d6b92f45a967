"""The fleet file: what it takes, its errors, and the schema that is derived from the same dataclasses."""

import json

import jsonschema
import pytest

from transect.cluster import settings


def valid(**tables):
    return {"engine": {"model": "m"}, **tables}


def test_engine_and_server_take_the_names_of_options_and_of_fields():
    found = settings.build(
        valid(
            engine={"model": "m", "max-num-seqs": 4, "kv_cache_tokens": 512, "hung-after": 3, "cuda-graphs": "off"},
            server={"served-model-name": "chat", "api-key": ["k"], "port": 9000},
            replicas={"min": 2, "max": 5, "cpus": 4},
        )
    )
    assert (found.engine.max_num_seqs, found.engine.kv_cache_tokens, found.engine.hung_after_s) == (4, 512, 3.0)
    assert (found.server.model_names, found.server.api_keys, found.server.port) == (("chat",), ("k",), 9000)
    assert (found.replicas.most, found.engine.threads, found.gpus) == (5, 4, 0.0)
    assert settings.build(valid()).server.model_names == ("m",)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine": {}}, "engine.model is missing"),
        (valid(engin={}), "there is no setting 'engin'; did you mean 'engine'?"),
        (valid(engine={"model": "m", "kv_cache_token": 1}), "engine.kv_cache_token; did you mean 'kv_cache_tokens'?"),
        (valid(engine={"model": "m", "data-parallel-size": 2}), "there is no setting engine.data-parallel-size"),
        (valid(links={"port": "x"}), "links.port must be a value of type integer, not 'x'"),
        (valid(replicas={"min": 0}), "replicas.min must be a whole number of at least 1, not 0"),
        (valid(replicas={"min": 3, "max": 2}), "replicas.max must be at least min"),
        (valid(scaling={"policy": "guess"}), "scaling.policy must be 'backlog' or 'concurrency' or 'fixed'"),
        (valid(server={"port": 8001}), "links.port is server.port"),
        (valid(links={"ssl_certfile": "c"}), "ssl_certfile and ssl_ca_file go together"),
        (valid(name="a b"), "name must have"),
        (valid(server=3), "server must be a table"),
    ],
)
def test_errors_name_the_key(values, message):
    with pytest.raises(ValueError) as caught:
        settings.build(values)
    assert message in str(caught.value)


def test_the_schema_takes_what_the_reader_takes():
    schema = settings.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    check.validate(json.loads(json.dumps(valid(replicas={"min": 2}, server={"api-key": ["k"]}))))
    for bad in (valid(links={"port": "x"}), valid(replicas={"min": 0}), {"engine": {}}, valid(nothing=1)):
        assert not check.is_valid(bad)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.toml cannot be read"):
        settings.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(ValueError, match=r"bad\.toml is not valid TOML"):
        settings.read(tmp_path / "bad.toml")


def test_the_key_is_made_once_and_short_keys_are_refused(tmp_path):
    made = settings.build(valid(folder=str(tmp_path)))
    key = made.key()
    assert key == made.key() and len(key) > 32 and (tmp_path / "key").stat().st_mode & 0o077 == 0
    (tmp_path / "short").write_text("secret\n")
    with pytest.raises(ValueError, match="has 6 characters"):
        settings.build(valid(links={"key_file": str(tmp_path / "short")})).key()
