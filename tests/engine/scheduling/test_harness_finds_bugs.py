"""A harness that finds nothing proves nothing: classic bugs are planted, and each must be found."""

import warnings

import pytest
from killing_workloads import FILE, recorded, search, violation
from planted_bugs import MUTANTS, name_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=name_of)
def test_planted_bug_shows_in_its_workload(mutant: dict[str, type]) -> None:
    """The recorded workload breaks a promise with the bug and none without it."""
    workload = recorded().get(name_of(mutant))
    if workload is None or violation(workload, **mutant) is None:
        warnings.warn(f"{FILE.name} is out of date: run tests/helpers/killing_workloads.py", stacklevel=1)
        workload = search(mutant)
        assert violation(workload, **mutant) is not None
    assert violation(workload) is None


@pytest.mark.prove
@pytest.mark.parametrize("mutant", MUTANTS, ids=name_of)
def test_planted_bug_is_found(mutant: dict[str, type]) -> None:
    """Random workloads find it."""
    assert violation(search(mutant), **mutant) is not None
