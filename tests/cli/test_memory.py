"""``transect memory``: tables, JSON, advice, and mistakes in one line."""

import json

import pytest

from transect.cli import main


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["memory", *arguments])
    said = capsys.readouterr()
    return stopped.value.code, said.out, said.err


def test_training_that_fits(capsys):
    code, out, _ = run(capsys, "llama-3.2-1b", "--train", "--device-memory", "80GB", "--micro-batch", "8192")
    assert code == 0
    assert "checkpointing none" in out and "fits" in out and "(peak)" in out and "optimizer state" in out


def test_training_that_does_not_fit_names_a_change_that_does(capsys):
    arguments = ("llama-3.1-8b", "--train", "--micro-batch", "8192", "--device-memory", "24GB", "--json")
    code, out, _ = run(capsys, *arguments)
    found = json.loads(out)
    assert code == 1 and not found["fits"] and found["needed"] > 24e9
    change = found["change"]
    assert change == {"task": '"lora"'}
    assert json.loads(run(capsys, *arguments, "--task", "lora")[1])["fits"]


def test_a_base_of_4_bits_is_advised_in_groups_that_fit(capsys):
    arguments = ("smollm2-135m", "--train", "--micro-batch", "1024", "--device-memory", "700MB", "--json")
    found = json.loads(run(capsys, *arguments)[1])
    assert found["change"] == {"task": '"qlora"', "lora.group": "32"}
    settings = [each for name, value in found["change"].items() for each in ("--set", f"{name}={value}")]
    assert json.loads(run(capsys, *arguments, *settings)[1])["fits"]


def test_training_on_several_devices_is_per_rank(capsys):
    few = ("--train", "--precision", "mixed", "--device-memory", "80GB")
    code, out, _ = run(capsys, "llama-3.1-8b", *few, "--fsdp", "8", "--json")
    sharded = json.loads(out)
    assert code == 0 and sharded["fits"] and sharded["layout"] == "dp 8, zero 3"
    assert not json.loads(run(capsys, "llama-3.1-8b", *few, "--json")[1])["fits"]
    code, out, _ = run(capsys, "llama-3.1-8b", *few, "--dp", "2", "--zero", "1", "--tp", "2", "--pp", "2", "--cp", "2")
    assert code == 0 and "dp 2, tp 2, pp 2, cp 2, zero 1" in out and "activations in flight" in out
    code, out, _ = run(capsys, "llama-3.1-8b", *few, "--offload")
    assert code == 0 and "optimizer state (host)" in out
    small = ("--train", "--precision", "mixed", "--device-memory", "12GB", "--micro-batch", "4096", "--offload-all")
    code, out, _ = run(capsys, "llama-3.1-8b", *small, "--checkpointing", "full", "--json")
    found = json.loads(out)
    assert code == 0 and found["fits"] and {term["name"] for term in found["host"]} >= {"weights", "gradients"}
    assert "set parallel.zero to 3" in run(capsys, "llama-3.1-8b", *small, "--dp", "2", "--zero", "1")[2]
    code, out, _ = run(capsys, "qwen3-30b-a3b", *few, "--dp", "8", "--ep", "8", "--json")
    assert code == 1 and json.loads(out)["layout"] == "dp 8, experts shared"
    assert "set both to 4" in run(capsys, "qwen3-30b-a3b", *few, "--dp", "4", "--ep", "2")[2]


def test_what_is_asked_follows_from_the_options(capsys):
    code, out, _ = run(capsys, "llama-3.1-8b", "--task", "qlora", "--objective", "dpo", "--device-memory", "24GB")
    assert code == 0 and "qlora with dpo, bfloat16, adamw, micro-batches of 4096 tokens" in out and "fits" in out
    assert "full sequences" in run(capsys, "llama-3.1-8b", "--context", "4096", "--device-memory", "24GB")[1]


def test_a_document_is_as_long_as_a_small_model_allows(tmp_path, capsys):
    from tiny_llm import save_tiny_llm

    save_tiny_llm(tmp_path)
    assert run(capsys, str(tmp_path), "--task", "lora", "--device-memory", "24GB")[0] == 0
    code, _, err = run(capsys, str(tmp_path), "--task", "lora", "--seq-len", "999", "--device-memory", "24GB")
    assert code == 2 and "data.seq_len to at most 256" in err
    longer = ("--set", "data.seq_len=999", "--device-memory", "24GB")
    assert "data.seq_len to at most 256" in run(capsys, str(tmp_path), "--task", "lora", *longer)[2]


def test_the_file_of_a_run_is_asked_about_as_it_is(tmp_path, capsys):
    from transect.train.config import TrainConfig

    file = tmp_path / "run.toml"
    file.write_text(
        'model = "llama-3.2-1b"\ntask = "lora"\nprecision = "mixed"\naccumulate = 4\ndevice = "cpu"\n'
        "[data]\nseq_len = 512\nmicro_batch = 512\n[lora]\nrank = 8\n[parallel]\ndata = 2\n"
    )
    found = json.loads(run(capsys, str(file), "--device-memory", "24GB", "--json")[1])
    assert (found["task"], found["precision"], found["layout"]) == ("lora", "mixed", "dp 2")
    assert found["budget"] == 12e9  # two ranks share the memory of their host
    assert (
        "11.18 GiB, the share of one of 2 processes in 22.35 GiB"
        in run(capsys, str(file), "--device-memory", "24GB")[1]
    )
    adapters = 4 * 2 * 8 * 16 * sum((2048 + 2048, 2 * (2048 + 512), 2048 + 2048, 3 * (2048 + 8192)))
    assert {t["name"]: t["bytes"] for t in found["terms"]}["optimizer state"] == adapters
    changed = json.loads(
        run(capsys, str(file), "--device-memory", "24GB", "--rank", "16", "--set", "lora.alpha=4", "--json")[1]
    )
    assert {t["name"]: t["bytes"] for t in changed["terms"]}["optimizer state"] == 2 * adapters
    assert TrainConfig.from_toml(file).accumulate == 4  # what was not given stays the file's
    assert "for --train: give the model" in run(capsys, str(file), "--serve")[2]


def test_serving(capsys):
    code, out, _ = run(
        capsys,
        "llama-3.1-8b",
        "--serve",
        "--device-memory",
        "80GB",
        "--context",
        "8192",
        "--max-num-seqs",
        "16",
        "--json",
    )
    found = json.loads(out)
    assert code == 0 and found["fits"]
    assert found["kv_bytes_per_token"] == 131072
    assert found["cache_tokens"] <= 16 * 8192


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama-3.1-8b",), "--train or --serve"),
        (("llama-3.1-8b", "--train", "--serve"), "--train or --serve"),
        (("llama-3.1-8b", "--train", "--device-memory", "much"), "80GB"),
        (("llama-3.1-8b", "--train", "--device", "tpu"), "auto, cpu or cuda"),
        (("llama-3.1-8b", "--train", "--optimizer", "sgd", "--device-memory", "80GB"), "optimizer.name"),
        (("llama-3.1-8b", "--train", "--dp", "2", "--fsdp", "2", "--device-memory", "80GB"), "one or the other"),
        (("llama-3.1-8b", "--train", "--tp", "3", "--device-memory", "80GB"), "cannot be cut for 3 ranks"),
        (("llama-3.1-8b", "--train", "--zero", "1", "--device-memory", "80GB"), "parallel.data to 2"),
        (("llama-9b", "--train"), "llama-9b"),
        (("llama-3.1-8b", "--serve", "--device-memory", "80"), "--device-memory 80 is 80 bytes: give the unit too"),
        (("qwen3-30b-a3b", "--serve", "--tp", "2", "--dp", "2", "--ep", "2", "--device-memory", "80GB"), "give --ep 4"),
        (("llama-3.1-8b", "--task", "dpo"), 'set objective to "dpo", and task to what is trained'),
        (("llama-3.1-8b", "--task", "lora", "--context", "99"), "--context is for --serve, and this asks for --train"),
        (("llama-3.1-8b", "--serve", "--task", "lora"), "--task is for --train, and this asks for --serve"),
        (("llama-3.1-8b", "--offload", "--device-memory", "80GB"), 'set precision to "mixed"'),
        (("llama-3.1-8b", "--objective", "distill", "--device-memory", "80GB"), "distill.teacher"),
        (("smollm2-135m", "--task", "qlora", "--device-memory", "80GB"), "set lora.group to 32"),
        (("smollm2-135m", "--seq-len", "9000", "--micro-batch", "9000"), "data.seq_len to at most 8192"),
        (("runs/none.toml",), "cannot read runs/none.toml"),
        (("qwen3-0.6b", "--serve", "--context", "99999"), "--context is 99999, but the model knows 40960 positions"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, message):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err and len(err.splitlines()) == 1


def test_serving_on_several_devices(capsys):
    arguments = ("llama-3.1-8b", "--serve", "--device-memory", "12GB", "--context", "4096", "--max-num-seqs", "8")
    code, out, _ = run(capsys, *arguments)
    assert code == 1 and "does not fit" in out and "smallest layout that does: --tp 2 --pp 1 (2 devices)" in out
    code, out, _ = run(capsys, *arguments, "--tp", "2")
    assert code == 0 and "on each of 2 ranks" in out and "fits in" in out and "heads 0-15 of 32" in out
    few = ("qwen3-30b-a3b", "--serve", "--device-memory", "80GB", "--context", "4096")
    code, out, _ = run(capsys, *few, "--ep", "2")
    assert code == 0 and "experts 0-63 of 128" in out and "fits in" in out
    code, _, err = run(capsys, *few, "--tp", "2", "--ep", "3")
    assert code == 2 and "give --ep 4" in err
    found = json.loads(run(capsys, *arguments, "--tp", "2", "--pp", "2", "--json")[1])
    assert found["fits"] and len(found["ranks"]) == 2 and "layers 16-31 of 32, head" in found["ranks"][1]["share"]
    code, _, err = run(capsys, *arguments, "--tp", "3")
    assert code == 2 and "tensor_parallel_size can be 1, 2, 4, 8" in err
    _, out, _ = run(capsys, *arguments, "--tp", "2", "--dp", "2")
    assert "on each of 2 ranks" in out and "2 engines like this one need 4 devices" in out
    one, two = (json.loads(run(capsys, *few, "--ep", "2", "--json", *dp)[1]) for dp in ((), ("--dp", "2")))
    assert one == two and one["fits"]
    on_cpu = ("llama-3.1-8b", "--serve", "--device", "cpu", "--context", "2048", "--max-num-seqs", "8", "--tp", "2")
    _, out, _ = run(capsys, *on_cpu, "--device-memory", "20GB")
    assert "fits in 9.31 GiB, the share of one of 2 processes in 18.63 GiB" in out
    _, out, _ = run(capsys, *on_cpu, "--device-memory", "12GB")
    assert "does not fit in" in out and "layout that does" not in out


def test_layers_that_stream(capsys):
    serve = ("llama-3.1-8b", "--serve", "--device-memory", "12GB", "--context", "4096", "--max-num-seqs", "16")
    assert "--cpu-offload-gb" in run(capsys, *serve)[1]
    code, out, _ = run(capsys, *serve, "--cpu-offload-gb", "100", "--link", "50")
    assert code == 0 and "32 of 32 layers stream from host memory, 13.0 GiB a step: at least 0.28 s a step" in out
    assert "fits in" in out
    found = json.loads(run(capsys, *serve, "--cpu-offload-gb", "100", "--link", "50", "--tp", "2", "--json")[1])
    assert found["fits"] and found["stream"][0]["layers"] == 32
    assert found["stream"][0]["seconds"] == pytest.approx(13.96e9 / 2 / 50e9, rel=0.01)
    code, _, err = run(capsys, *serve, "--cpu-offload-gb", "1", "--link", "0")
    assert code and "--link must be above 0 GB/s" in err
