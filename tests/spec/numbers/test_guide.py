"""The guide's format, added in one file to a copy of the package: rounded, written, loaded, served, accounted for."""

import json
import subprocess
import sys

import httpx
import pytest
from safetensors import safe_open
from tiny_llm import save_tiny_llm

BITS = 4 + 16 / 32
"""Bits of a number in the guide's format."""
LOGITS = """
import torch
from transect.checkpoints.load import load_model
from transect.checkpoints.resolve import resolve
from transect.models.context import VarlenContext

found = []
for model, quantization in (("plain", None), ("plain", "e2m1"), ("few", None)):
    made = load_model(resolve(model), native=False, dtype="bfloat16", quantization=quantization)
    context = VarlenContext(torch.tensor([0, 6], dtype=torch.int32), made.ops)
    with torch.no_grad():
        logits = made.logits(made(torch.tensor([5, 6, 7, 9, 11, 13]), context.positions(), context)).float()
    bits = {w.format.bits for name, w in made.weights() if name != "head"}
    found.append((logits, bits, made.layers[0].mlp.down.dense().float()))
torch.save(found, "found.pt")
"""


@pytest.fixture(scope="module")
def package(changed_packages):
    """A copy of the package with the change that the guide shows."""
    made = changed_packages("docs/extend/number-format.md")
    save_tiny_llm(made / "plain", hidden_size=128, intermediate_size=192)
    return made


@pytest.fixture(scope="module")
def written(package):
    package.transect("quantize", "plain", "-o", "few", "--format", "e2m1")
    return package / "few"


def test_a_model_is_rounded_and_loaded_in_its_bits(package, written):
    """Rounded when it is loaded, and read from its checkpoint: the same codes, so the same logits to the bit."""
    import torch

    package.python(LOGITS)
    found = torch.load(package / "found.pt", weights_only=False)
    (exact, _, dense), (rounded, bits, values), (stored, same_bits, _) = found
    assert bits == same_bits == {BITS}
    assert (rounded == stored).all() and not (rounded == exact).all()
    assert (values - dense).norm() < 0.11 * dense.norm()


def test_files_hold_what_the_record_says(package, written):
    with safe_open(written / "model.safetensors", "pt") as file:
        prefix = "model.layers.0.mlp.down_proj"
        shapes = {name: file.get_slice(f"{prefix}.{name}").get_shape() for name in ("weight_codes", "weight_scale")}
    assert shapes == {"weight_codes": [128, 192 // 2], "weight_scale": [128, 192 // 32]}
    settings = json.loads((written / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "codebook" and settings["format"] == "e2m1" and len(settings["values"]) == 15


def test_memory_is_accounted(package):
    asked = ("memory", "qwen3-8b", "--serve", "--context", "4096", "--gpu", "h200", "--json")
    weights = []
    for more in ((), ("--quantization", "e2m1"), ("--quantization", "int4")):
        terms = json.loads(package.transect(*asked, *more).stdout)["terms"]
        weights.append(next(term["bytes"] for term in terms if term["name"] == "weights"))
    plain, few, int4 = weights
    assert (plain - few) / (plain - int4) == pytest.approx((16 - BITS) / (16 - 4.25), rel=1e-6)


def test_options_and_errors_name_it(package):
    assert "--quantization int4|e2m1|fp8|int8" in package.transect("generate", "--help").stdout
    assert "e2m1" in package.transect("quantize", "--help").stdout
    check = "from transect.spec.numbers.page import page; print(page())"
    assert "| `e2m1` | 4-bit float (e2m1), a scale for each 32 numbers of a row | 4.5 |" in package.python(check).stdout


def test_it_is_served(package, written):
    command = ["-m", "transect", "serve", "few", "--port", "0", "--served-model-name", "m", "--no-native"]
    process = subprocess.Popen(
        [sys.executable, *command], env=package.environment, cwd=package.folder,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        ready = process.stdout.readline()
        assert " ready on " in ready, process.stderr.read()
        body = {"model": "m", "prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{ready.split(' ready on ')[1].split()[0]}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 5
    finally:
        process.kill()
        process.wait()
