"""NF4 against bitsandbytes: the same codes, the same values, and a run over such a base."""

import base64
import json

import numpy as np
import pytest
import torch
from nf4_fixture import FILE, SHAPE, digest, matrix
from tiny_llm import save_tiny_llm
from training_runs import tiny_run

from transect.models.weights.dense import Dense
from transect.models.weights.nf4 import NF4, NF4State, dequantize, dynamic_map, quantize
from transect.ops.opset import resolve_ops
from transect.spec.numbers.nf4 import BITS, CODES
from transect.train.loop import checkpoint
from transect.train.loop.trainer import Trainer


def kept():
    values = json.loads(FILE.read_text())

    def tensor(name, dtype):
        return torch.from_numpy(np.frombuffer(base64.b64decode(values[name]), dtype).copy())

    packed = tensor("codes", np.uint8), tensor("scales", np.uint8)
    state = NF4State(*packed, tensor("nested", np.float32), tensor("offset", np.float32)[0])
    return values, state, tensor("map", np.float32)


def test_values_are_those_of_bitsandbytes_to_the_bit() -> None:
    values, state, scales = kept()
    assert np.array_equal(scales.numpy(), dynamic_map())
    assert digest(dequantize(state, SHAPE)) == values["dense"]


def test_codes_are_those_of_bitsandbytes() -> None:
    values, state, _ = kept()
    for own, theirs in zip(quantize(matrix()), state, strict=True):
        assert torch.equal(own, theirs)
    half = NF4.of(Dense.over(matrix().bfloat16(), None, resolve_ops()))
    assert digest(half.dense()) == values["dense_bfloat16"]


def test_codes_are_the_nearest_and_blocks_may_be_short() -> None:
    weight = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    state = quantize(weight)
    found = dequantize(state, (6, 50)).view(-1)
    scale = torch.stack([block.abs().max() for block in weight.view(-1).split(64)]).repeat_interleave(64)[:300]
    distance = (weight.view(-1, 1) / scale[:, None] - torch.tensor(CODES)).abs().amin(1)
    assert bool(((found - weight.view(-1)).abs() <= (distance + 0.01) * scale).all())
    with pytest.raises(ValueError, match="no whole bytes"):
        quantize(torch.randn(3, 3))


def test_it_says_what_it_takes() -> None:
    made = NF4.of(Dense.over(matrix(), None, resolve_ops()))
    assert made.format.bits == BITS
    assert made.nbytes == pytest.approx(made.format.bytes(*SHAPE), rel=2e-3)
    x = torch.randn(5, SHAPE[1], requires_grad=True)
    upstream = torch.randn(5, SHAPE[0])
    (found,) = torch.autograd.grad(made(x), x, upstream)
    torch.testing.assert_close(made(x), x @ made.dense().T)
    torch.testing.assert_close(found, upstream @ made.dense())


def test_a_run_over_it_learns_and_resumes(tmp_path) -> None:
    torch.set_num_threads(1)
    (tmp_path / "model").mkdir()
    save_tiny_llm(tmp_path / "model")
    lora = {"rank": 4, "base_format": "nf4", "targets": ["q_proj", "down_proj"]}
    config = tiny_run(tmp_path, task="qlora", steps=8, lora=lora, optimizer={"learning_rate": 1e-2})
    trainer = Trainer(config)
    bases = [weight for name, weight in trainer.model.weights() if name != "head"]
    assert all(isinstance(getattr(weight, "base", weight), NF4) for weight in bases)
    losses = [trainer.step().loss for _ in range(4)]
    with checkpoint.Writer(config.run_dir, keep=1) as writer:
        writer.save(trainer.snapshot())
    rest = [trainer.step().loss for _ in range(4)]
    assert rest[-1] < losses[0]
    resumed = Trainer(config, checkpoint.newest(config.run_dir))
    assert [resumed.step().loss for _ in range(4)] == rest


@pytest.mark.prove
@pytest.mark.parametrize("shape", [(32, 128), (256, 576), (1000, 768)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_matrices_agree_with_bitsandbytes(shape, dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = (torch.randn(*shape) * (0.05 + torch.rand(shape[0], 1))).to(dtype)
    codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    own = quantize(weight)
    assert torch.equal(own.codes, codes.view(-1))
    # Its CPU rounds scales that are within 1e-5 of the middle between two codes to either.
    assert (own.scales != state.absmax.view(-1)).float().mean() < 5e-3
    theirs = NF4State(codes.view(-1), state.absmax.view(-1), state.state2.absmax, state.offset)
    assert torch.equal(dequantize(theirs, shape).to(dtype), functional.dequantize_4bit(codes, state))
