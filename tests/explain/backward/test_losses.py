"""Losses of files and of models can be explained, and what cannot be is refused with a reason."""

import json
import sys
from pathlib import Path

import pytest
from training_runs import tiny_run
from typer.testing import CliRunner

from transect.cli.explain import application
from transect.explain.backward.losses import explain_model, explain_script
from transect.explain.backward.text import lines

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def test_a_file_that_leaves_a_loss(tmp_path: Path) -> None:
    found = explain_script(
        script(tmp_path, "import torch\nw = torch.ones(3, requires_grad=True)\nloss = w.exp().sum()\n")
    )
    assert [node.name for node in found.nodes] == ["SumBackward0", "ExpBackward0", "AccumulateGrad"]
    assert [node.weight for node in found.nodes] == ["", "", "leaf 3"]


def test_a_function_is_called_twice_and_the_second_time_measured(tmp_path: Path) -> None:
    text = """
        import sys, torch
        from torch import nn
        model = nn.Linear(3, 1)
        calls = []
        def loss():
            assert model.weight.grad is None, "gradients of the first call are left"
            calls.append(1)
            assert sys.argv == [__file__], sys.argv
            return model(torch.ones(2, 3) * len(calls)).sum()
        if __name__ == "__main__":
            raise SystemExit("must not run")
    """
    arguments, path = list(sys.argv), list(sys.path)
    found = explain_script(script(tmp_path, "\n".join(line[8:] for line in text.splitlines())))
    assert "weight" in [node.weight for node in found.nodes]
    assert (sys.argv, sys.path) == (arguments, path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "defines no loss"),
        ("import torch\nloss = torch.ones(2, requires_grad=True) * 2\n", "single number"),
        ("def loss():\n    return 3\n", "must be a tensor, not int"),
        ("x = 1\nraise RuntimeError('no luck')\n", "script.py, line 2 failed with RuntimeError: no luck"),
        ("def loss():\n    return missing\n", "line 2 failed with NameError"),
        ("raise SystemExit(3)\n", "failed with SystemExit"),
        ("loss = (\n", "failed with SyntaxError"),
    ],
)
def test_a_file_without_a_loss_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain_script(script(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*nothing\.py"):
        explain_script(tmp_path / "nothing.py")


@pytest.mark.parametrize("name", ["line", "xor", "digits", "characters"])
def test_examples_can_be_explained(name: str) -> None:
    found = explain_script(EXAMPLES / f"{name}.py")
    assert found.nodes[-1].name == "AccumulateGrad"
    assert found.activation_bytes > 0


def test_xor_goes_through_our_operators_in_the_order_of_its_docstring() -> None:
    names = [node.name for node in explain_script(EXAMPLES / "xor.py").nodes]
    ours = [name.removeprefix("transect_") for name in names if name.startswith("transect_")]
    assert ours == ["dot", "vector_add", "softmax", "matmul", "gelu", "matmul"]


def test_a_model_runs_its_packed_batch(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, precision="float32")
    found = explain_model(config, tokens=10)
    assert found.nodes[0].name == "_FusedBackward"
    leaves = {node.weight for node in found.nodes if node.weight}
    assert {"embed.weight", "layers.0.attention.q.weight", "layers.1.mlp.down.weight", "norm.weight"} <= leaves
    modules = [node.module for node in found.nodes]
    assert (
        modules.index("layers.1.mlp.down") < modules.index("layers.1.attention.q") < modules.index("layers.0.mlp.down")
    )
    down = [saved for node in found.nodes if node.module == "layers.0.mlp.down" for saved in node.saved]
    assert ((10, 96), "activation") in [(saved.shape, saved.kind) for saved in down]
    assert [saved.weight for saved in down if saved.kind == "weight"] == ["layers.0.mlp.down.weight"]
    assert any("nodes as in layers.1" in line for line in lines(found))


def test_with_adapters_frozen_weights_have_no_leaf_and_the_loss_saves_less(tmp_path: Path) -> None:
    full = explain_model(tiny_run(tmp_path), tokens=16)
    adapted = explain_model(tiny_run(tmp_path, task="lora"), tokens=16)
    leaves = [node.weight for node in adapted.nodes if node.weight]
    assert leaves and all(name.endswith((".a", ".b")) for name in leaves)
    # The fused loss makes no gradient of the output matrix.
    assert adapted.nodes[0].bytes("activation") < full.nodes[0].bytes("activation")


def test_too_few_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--tokens"):
        explain_model(tiny_run(tmp_path), tokens=3)


def test_the_command_prints_text_and_json() -> None:
    path = str(EXAMPLES / "line.py")
    shown = CliRunner().invoke(application, ["backward", path])
    assert shown.exit_code == 0, shown.output
    assert "AccumulateGrad" in shown.output and "by kind" in shown.output
    printed = json.loads(CliRunner().invoke(application, ["backward", path, "--json"]).output)
    assert printed["activation_bytes"] == sum(
        saved["bytes"] for node in printed["nodes"] for saved in node["saved"] if saved["counted"]
    )
    assert all(node["seconds"] > 0 for node in printed["nodes"])
