"""FLOPs of training, against the rule of thumb that they must come near."""

import pytest

from transect.costs.training import TrainingFlops, flops_per_token
from transect.spec.shapes import PRESETS
from transect.spec.weights import parameter_count


def test_six_flops_a_parameter_and_token_where_attention_is_small() -> None:
    config = PRESETS["llama-3.1-8b"]
    used = parameter_count(config) - config.vocab_size * config.dim  # the embedding is looked up, not multiplied
    assert flops_per_token(config, 128, frozen=False) == pytest.approx(6 * used, rel=0.01)
    assert flops_per_token(config, 128, frozen=True) == pytest.approx(4 * used, rel=0.01)


def test_attention_grows_with_the_document() -> None:
    config = PRESETS["llama-3.1-8b"]
    more = flops_per_token(config, 8192, frozen=True) - flops_per_token(config, 4096, frozen=True)
    assert more == pytest.approx(3.5 * 4 * 2048 * config.q_dim * config.n_layers, rel=0.01)


def test_a_step_counts_its_own_documents_and_labels() -> None:
    config = PRESETS["qwen3-0.6b"]
    count = TrainingFlops(config, frozen=False)
    whole = count([1024], 1024)
    assert whole == pytest.approx(1024 * flops_per_token(config, 1024, frozen=False))
    head = 3 * 2 * config.vocab_size * config.dim
    assert whole - count([1024], 24) == pytest.approx(1000 * head)
    pair = 3.5 * 4 * config.q_dim * config.n_layers
    assert whole - count([512, 512], 1024) == pytest.approx(512 * 512 * pair)
