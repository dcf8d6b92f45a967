"""Options from a file and from the environment, help in groups, and what the command says of itself."""

import io
import json
import re

import pytest

from transect import __version__
from transect.cli import main
from transect.cli import models as models_command
from transect.cli.settings import COMMANDS
from transect.server import process
from transect.server.options import ServerOptions


class Reached(ValueError):
    """Where the server would bind its socket."""


@pytest.fixture
def run(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        return end.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def serve(run, monkeypatch):
    """Run ``transect serve`` up to its socket; what it would have bound, and the server's options."""
    seen = {}

    def bind(host, port):
        seen.update(host=host, port=port)
        raise Reached("stop here")

    def options(**fields):
        seen["options"] = ServerOptions(**fields)
        return seen["options"]

    monkeypatch.setattr(process, "bind", bind)
    monkeypatch.setattr("transect.cli.serve.ServerOptions", _Options(options))

    def serve(*arguments):
        seen.clear()
        code, _, errors = run("serve", *arguments)
        assert code == 2, errors
        return seen, errors

    return serve


class _Options:
    """``ServerOptions``, looked at when it is made."""

    max_prompts = ServerOptions.max_prompts

    def __init__(self, make):
        self._make = make

    def __call__(self, **fields):
        return self._make(**fields)


def test_the_command_line_goes_over_the_environment_and_that_over_the_file(serve, monkeypatch, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text(
        "model: my-model\nhost: 10.0.0.1\nport: 1\nmax-queue: 7\nserved_model_name: [a, b]\nallow-credentials: true\n"
        "allowed-origins: http://page\nrequest-timeout:\n"
    )
    seen, _ = serve("--config", str(file))
    assert (seen["host"], seen["port"]) == ("10.0.0.1", 1)
    options = seen["options"]
    assert options.model_names == ("a", "b") and options.max_prompts == 7 and options.allow_credentials
    assert options.allowed_origins == ("http://page",) and options.request_timeout_s is None
    monkeypatch.setenv("TRANSECT_SERVE_PORT", "2")
    assert serve("--config", str(file))[0]["port"] == 2
    assert serve("--config", str(file), "--port", "3")[0]["port"] == 3
    monkeypatch.setenv("TRANSECT_SERVE_CONFIG", str(file))
    assert serve()[0]["host"] == "10.0.0.1"


def test_a_toml_file(serve, tmp_path):
    file = tmp_path / "server.toml"
    file.write_text('port = 5\nserved-model-name = "one"\n')
    seen, _ = serve("--config", str(file))
    assert seen["port"] == 5 and seen["options"].model_names == ("one",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "has no option 'prot'; did you mean 'port'?"),
        ("- port", "must hold option names and values"),
        ("port: [", "is not valid yaml"),
        ("port: many", "--port"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(serve, tmp_path, text, words):
    file = tmp_path / "server.yaml"
    file.write_text(text)
    seen, errors = serve("--config", str(file))
    assert not seen and words in errors and errors.count("\n") == 1
    assert "cannot be read" in serve("--config", str(tmp_path / "none"))[1]


def test_api_keys_from_the_environment(serve, monkeypatch):
    assert serve()[0]["options"].api_keys == ()
    monkeypatch.setenv("TRANSECT_API_KEY", "one two")
    assert serve()[0]["options"].api_keys == ("one", "two")
    assert serve("--api-key", "three")[0]["options"].api_keys == ("three",)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), ("*",)),
        (("--allowed-origins", '["http://a", "http://b"]'), ("http://a", "http://b")),
        (("--allowed-origins", "http://a", "--allowed-origins", "http://b"), ("http://a", "http://b")),
        (("--allowed-origins", ""), ()),
    ],
)
def test_origins(serve, given, expected):
    assert serve(*given)[0]["options"].allowed_origins == expected


def test_origins_that_are_no_list(serve):
    assert "--allowed-origins '[http' is not a JSON list" in serve("--allowed-origins", "[http")[1]


def test_override_generation_config_is_json(run):
    _, _, errors = run("generate", "smollm2-135m", "x", "--override-generation-config", "{}")
    assert "--override-generation-config" in errors
    for value, words in (("{", "is not JSON"), ("[]", "must be a JSON object")):
        code, _, errors = run("serve", "--port", "0", "--override-generation-config", value)
        assert code == 2 and f"--override-generation-config {words}" in errors


def test_help_in_groups_by_either_name(run):
    code, long, _ = run("serve", "--help")
    assert code == 0 and run("serve", "-h")[1] == long
    titles = re.findall(r"^(\w[\w ]*):$", long, re.M)
    assert titles == ["Arguments", "Server", "Captures and releases", "Model and text", "Engine", "GPU", "Options"]
    server = long[long.index("\nServer:") : long.index("\nCaptures and releases:")]
    assert "--port" in server and "--dtype" not in server
    assert "TRANSECT_" not in long  # the page of settings has them


def test_version(run):
    assert run("--version") == (0, f"transect {__version__}\n", "")


def test_shell_completion(run, monkeypatch):
    monkeypatch.setenv("_TRANSECT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "transect serve --max-n")
    monkeypatch.setenv("COMP_CWORD", "2")
    code, out, _ = run()
    assert code == 0 and out.split() == ["--max-num-seqs", "--max-num-batched-tokens"]


def test_models(run, monkeypatch, tmp_path):
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path))
    monkeypatch.setattr(
        models_command, "_hub_models", lambda: [models_command.ModelEntry("org/name", "hub", "x", 5_000_000)]
    )
    code, out, _ = run("models", "--json")
    entries = {entry["name"]: entry for entry in json.loads(out)}
    assert code == 0 and entries["smollm2-135m"]["kind"] == "built-in" and entries["smollm2-135m"]["size"] == 0
    assert entries["qwen3-8b"]["kind"] == "shape" and "36 layers" in entries["qwen3-8b"]["about"]
    file = tmp_path / "models" / "smollm2-135m"
    file.mkdir(parents=True)
    (file / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"x" * 2_000_000)
    shown = run("models")[1]
    assert re.search(r"smollm2-135m +built-in .* 2 MB", shown) and re.search(r"org/name +hub .* 5 MB", shown)


def test_models_of_the_hub_s_cache(monkeypatch, tmp_path):
    import huggingface_hub

    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("abc")
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path))
    (entry,) = models_command._hub_models()
    assert (entry.name, entry.kind, entry.size) == ("org/name", "hub", 2)
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path / "none"))
    assert models_command._hub_models() == []


@pytest.mark.parametrize("group", [[], ["bench"], ["explain"], ["plan"], ["data"]])
def test_what_a_command_does_is_said_in_whole(run, group):
    """A list of commands does not cut sentences off, in a narrow terminal neither."""
    code, out, _ = run(*group, "--help")
    assert code == 0
    listed = out[re.search(r"^(Commands|Run):$", out, re.M).end() :]
    assert "..." not in listed.replace("warps, stages, ...)", "") and listed.count(".") >= 2


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "latency", "--json"),
        ("bench", "serve", "--plot"),
        ("bench", "collectives", "--out"),
        ("demo", "--svg"),
        ("roofline", "llama-3.1-8b", "--preset", "h200", "--json"),
        ("explain", "run", "--html"),
        ("trace", "vector_add", "--plot"),
    ],
    ids=lambda command: "-".join(command[:2]),
)
def test_a_file_that_cannot_be_written_is_said_before_the_work(run, tmp_path, command, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    rest = ("--", "python", "nothing.py") if command[0] == "explain" else ()
    code, out, errors = run(*command, str(tmp_path / "file" / "o.svg"), *rest)
    assert (code, out) == (2, "") and "cannot be written (a file has the path of its folder)" in errors
    code, out, errors = run(*command, str(tmp_path), *rest)
    assert (code, out) == (2, "") and errors == (
        f"transect: error: {tmp_path} cannot be written (it is a folder): choose another file\n"
    )
    monkeypatch.setattr("os.access", lambda place, mode: False)
    code, out, errors = run(*command, str(tmp_path / "new" / "o.svg"), *rest)
    assert (code, out) == (2, "") and "cannot be written (no permission to write there)" in errors


def test_letters_that_a_terminal_lacks_end_nothing(monkeypatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", newline="\n")
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("transect.cli._run", lambda arguments: print("caf\u00e9 \u8a9e, and more") or 0)
    with pytest.raises(SystemExit) as end:
        main(["generate"])
    out.flush()
    assert end.value.code == 0 and out.buffer.getvalue().decode("latin-1") == "caf\u00e9 ?, and more\n"


@pytest.mark.parametrize(
    "modules", [("--lora-modules", "a=x", "b=y"), ("--lora-modules", "a=x", "--lora-modules", "b=y")]
)
def test_several_values_after_one_flag_as_in_vllm(serve, modules):
    seen, _ = serve("--enable-lora", *modules, "--port", "7", "some/model")
    assert seen["port"] == 7 and seen["options"].lora_modules == ("a=x", "b=y")


def test_what_follows_the_values_of_a_flag_is_read_as_ever(serve):
    seen, _ = serve("--enable-lora", "--lora-modules", "a=x", "--port", "7", "some/model")
    assert seen["port"] == 7 and seen["options"].lora_modules == ("a=x",)
    seen, _ = serve("--enable-lora", "--lora-modules", "a=x", "some/model")
    assert seen["options"].lora_modules == ("a=x",) and seen["options"].model_names == ("some/model",)


def test_adapters_without_the_engine_setting_are_refused(run):
    code, _, errors = run("serve", "smollm2-135m", "--lora-modules", "a=x")
    assert code == 2 and "add --enable-lora" in errors


def test_a_mistyped_variable_is_named_with_the_nearest_right_one(run, monkeypatch):
    said = "transect: the environment variable {} is not known (did you mean {}?): it is ignored"
    for wrong, right in (
        ("TRANSECT_MODELS_JSN", "TRANSECT_MODELS_JSON"),
        ("TRANSECT_CASHE", "TRANSECT_CACHE"),
        ("TRANSECT_API_KEYS", "TRANSECT_API_KEY"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(wrong, "1")
            code, _, errors = run("models", "--json")
            assert code == 0 and said.format(wrong, right) in errors.splitlines()


def test_variables_of_other_commands_and_of_kubernetes_are_left_alone(run, monkeypatch):
    for name in ("TRANSECT_SERVE_PROT", "TRANSECT_DEBUG", "TRANSECT_TEST_PROVE", "TRANSECT_SERVICE_HOST"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TRANSECT_PORT", "tcp://10.0.0.1:80")
    code, _, errors = run("models", "--json")
    assert code == 0 and "environment variable" not in errors
    monkeypatch.setenv("TRANSECT_PORT", "80")
    assert "TRANSECT_PORT is not known: it is ignored" in run("models", "--json")[2]


def test_commands_stand_in_groups_and_begin_with_their_short_help(run):
    code, out, _ = run("--help")
    assert code == 0 and re.findall(r"^(\w[\w ]*):$", out, re.M) == ["Options", *COMMANDS]
    for name, short in {name: short for group in COMMANDS.values() for name, short in group.items()}.items():
        assert f"  {name.ljust(9)} {short}\n" in out and len(short) < 66
        assert run(name, "--help")[0] == 0


def test_settings_of_earlier_versions_say_what_to_give_now(run, tmp_path):
    for option, words in (
        ("--max-mixed-tokens", "512tokens"),
        ("--no-fill-steps", "fill or full"),
        ("--itl-target", "30ms"),
    ):
        code, _, errors = run("serve", option, "1")
        assert code == 2 and f"{option} was removed: give --mixed-step-limit" in errors and words in errors
    (tmp_path / "old.yaml").write_text("itl-target: 30\n")
    assert "itl-target was removed: give mixed_step_limit" in run("serve", "--config", str(tmp_path / "old.yaml"))[2]


def test_names_of_vllm_are_options_too(serve):
    for name in ("--prefix-caching", "--no-enable-prefix-caching", "--num-gpu-blocks-override=9"):
        assert serve(name)[0]["port"] == 8000
