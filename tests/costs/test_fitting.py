"""A fitted model of step times: one step in plain Python, many as one product of matrices, and the fit between them."""

import numpy as np
import pytest

from transect.costs.fitting import FittedSteps, _features
from transect.costs.steps import StepLoad


def some_loads(count: int, seed: int) -> list[StepLoad]:
    chance, found = np.random.default_rng(seed), []
    for _ in range(count):
        decodes = [(int(chance.integers(10, 4000)), 1) for _ in range(chance.integers(1, 64))]
        prompts = [(int(chance.integers(0, 100)), int(chance.integers(2, 900))) for _ in range(chance.integers(0, 3))]
        load = StepLoad.of([*decodes, *prompts])
        found.append(load._replace(padded=-(-load.tokens // 8) * 8, floor=1e-3 + 1e-6 * load.tokens))
    return found


def seconds_of(load: StepLoad) -> float:
    return 2e-4 + 1.2 * load.floor + 2e-9 * load.keys + 1e-9 * load.pairs + 1e-5 * load.rows + 4e-5 * load.chunks


def test_a_fit_predicts_steps_that_it_never_saw() -> None:
    loads, others = some_loads(300, 0), some_loads(100, 1)
    model = FittedSteps.fit(loads, [seconds_of(load) for load in loads])
    assert model.errors(others, [seconds_of(load) for load in others]).p99 < 0.02
    with pytest.raises(ValueError, match="at least 20 steps, not 5"):
        FittedSteps.fit(loads[:5], [1.0] * 5)


@pytest.mark.parametrize("most", [60, 3000])
def test_one_step_is_predicted_as_many_are_fitted(most: int) -> None:
    """Below, between and beyond the knots, for decodes and for steps with chunks."""
    loads = [load for load in some_loads(200, 2) if load.tokens <= most or load.tokens > 3000]
    knots = (8.0, 16.0, 40.0, 56.0), (64.0, 600.0)
    model = FittedSteps(*knots, tuple(np.random.default_rng(3).uniform(0, 3, 7 + 3 + 1)), 0.0)
    wanted = _features(loads, *knots) @ np.array(model.coefficients)
    assert model.predict(loads) == pytest.approx(wanted, rel=1e-12)
    assert FittedSteps((8.0,), (), model.coefficients[:7], 0.0).seconds(loads[0]) < model.seconds(loads[0])
