"""Training on two GPUs: every layout takes the steps of one GPU, within bfloat16's rounding."""

import pytest
import torch
from tiny_checkpoints import make_model
from tiny_llm import VOCAB, save_tiny_llm, save_tiny_llm_text
from training_runs import tiny_run

from transect.train.loop.follow import JOB, RunArguments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LEARNING_RATE = 2e-4
"""So small that the rounding of one step changes little of the next (a first step of Adam is the sign of a gradient),
so large that weights in bfloat16 change."""
LAYOUTS = {
    "copies": {"data": 2, "reduce": "bfloat16"},
    "nccl": {"data": 2, "sums": "nccl"},
    "zero 2": {"data": 2, "zero": 2},
    "zero 3": {"data": 2, "zero": 3},
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
    "tiles": {"data": 2, "zero": 3, "tiles": 4},
}


def steps(tmp_path, gpus=None, merged=True, **parallel):
    """Loss and gradient norm of each step."""
    config = tiny_run(
        tmp_path, run_dir=str(tmp_path / "-".join(map(str, [*parallel.values(), merged]))), device="cuda",
        precision="mixed", accumulate=4, steps=5, log_to=[], merged=merged, parallel=parallel,
        data={"seq_len": 512, "micro_batch": 1024}, optimizer={"learning_rate": LEARNING_RATE},
    )  # fmt: skip
    run, found = RunArguments(config.to_dict()), []
    if gpus is not None:
        gpus.call(JOB, run)

    class Listener:
        def step(self, record):
            found.append((record.loss, record.gradient_norm))

    run.trainer(None if gpus is None else gpus.world).run([Listener()])
    return torch.tensor(found)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    (folder / "model").mkdir()
    save_tiny_llm(
        folder / "model", hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=4, max_position_embeddings=1024,
    )  # fmt: skip
    return folder, steps(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_those_of_one_gpu(gpus, alone, layout):
    folder, expected = alone
    found = steps(folder, gpus, **LAYOUTS[layout])
    agree(found, expected)


@pytest.mark.parametrize("layout", ["zero 3", "sequence", "context"])
def test_layers_that_ranks_share_are_the_same_merged_or_not(gpus, alone, layout):
    folder, _ = alone
    agree(*(steps(folder, gpus, merged=merged, **LAYOUTS[layout]) for merged in (False, True)))


@pytest.mark.parametrize("zero", [0, 2])
def test_a_table_that_the_head_shares_travels_in_two_parts(gpus, tmp_path, zero):
    (tmp_path / "model").mkdir()
    save_tiny_llm(
        tmp_path / "model", hidden_size=256, intermediate_size=512, max_position_embeddings=1024,
        tie_word_embeddings=True,
    )  # fmt: skip
    agree(steps(tmp_path, gpus, data=2, zero=zero, sums="fused"), steps(tmp_path), falls=False)


@pytest.mark.parametrize("way", ["gather", "all_to_all"])
def test_experts_that_ranks_share(gpus, tmp_path, way):
    """With memory between steps that holds no numbers, where the kernels must write before they read."""
    make_model(
        "qwen3_moe", vocab_size=VOCAB, hidden_size=256, num_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=128, max_position_embeddings=1024,
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    save_tiny_llm_text(tmp_path / "model")
    whole = steps(tmp_path)
    free = [torch.full((2**26,), float("nan"), device="cuda") for _ in range(4)]
    del free
    found = steps(tmp_path, gpus, data=2, expert=2, expert_way=way)
    agree(found[:1], whole[:1], falls=False)
    torch.testing.assert_close(found, whole, atol=0.1, rtol=0.2)  # rounding sends some tokens to other experts


def agree(found, expected, falls=True):
    """Losses fall from 10.7 by more than 0.3; norms are about 11."""
    assert not falls or expected[0, 0] - expected[-1, 0] > 0.3
    torch.testing.assert_close(found[:, 0], expected[:, 0], atol=3e-2, rtol=0)
    torch.testing.assert_close(found[:, 1], expected[:, 1], atol=0, rtol=5e-2)
