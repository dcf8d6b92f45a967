"""RAPL counters, as Linux shows them."""

import pytest

from transect.bench.energy import EnergyMeter
from transect.bench.rapl import Rapl, footprint


def package(root, name, joules):
    folder = root / name
    folder.mkdir(exist_ok=True)
    (folder / "energy_uj").write_text(f"{int(joules * 1e6)}\n")
    (folder / "max_energy_range_uj").write_text("100000000\n")


def test_packages_are_added_and_turn_over(tmp_path):
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        package(tmp_path, name, 99.0)
    source = Rapl(tmp_path)
    assert list(source.devices) == [0, 1]
    with EnergyMeter(source, tuple(source.devices)) as meter:
        package(tmp_path, "intel-rapl:0", 4.0)  # 100 J is where it begins again
        package(tmp_path, "intel-rapl:1", 99.5)
    assert meter.result.joules == pytest.approx(5.0 + 0.5) and meter.result.method == "counter"


def test_without_counters_it_says_so(tmp_path):
    with pytest.raises(ValueError, match="no RAPL counter"):
        Rapl(tmp_path)


def test_a_kilowatt_hour_has_the_footprint_of_its_grid():
    assert footprint(3.6e6, 380.0) == {"kwh": 1.0, "grams_co2e": 380.0}
    with pytest.raises(ValueError, match="at least 0"):
        footprint(1.0, -1.0)
