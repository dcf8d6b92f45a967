"""Joules from a power source that a test makes up."""

import time

import pytest

from transect.bench import energy
from transect.bench.energy import Energy, EnergyMeter, Nvml


class Counter:
    """Each reading is 5 J above the one before."""

    def __init__(self):
        self.readings = 0

    def energy_joules(self, device):
        self.readings += 1
        return 100.0 * device + 5.0 * self.readings

    def watts(self, device):
        raise AssertionError("the counter is there")


class Power:
    """No counter; so many watts."""

    def energy_joules(self, device):
        return None

    def watts(self, device):
        return 40.0 + 10.0 * device


def test_the_counter_of_the_device():
    meter = EnergyMeter(Counter())
    for _ in range(2):  # a meter serves again
        with meter:
            pass
        assert meter.result.joules == pytest.approx(5.0) and meter.result.method == "counter"


def test_sampled_power_of_two_devices():
    with EnergyMeter(Power(), [0, 1], sample_s=0.005) as meter:
        time.sleep(0.05)
    assert meter.result.method == "sampled power"
    assert meter.result.joules == pytest.approx(90.0 * meter.result.seconds)


def test_samples_that_come_late_cover_the_whole_time():
    """Neither the beginning is lost where the thread starts late, nor what follows the end added."""

    class Slow(Power):
        def watts(self, device):
            time.sleep(0.02)
            return super().watts(device)

    with EnergyMeter(Slow(), sample_s=0.001) as meter:
        pass
    assert meter.result.joules == pytest.approx(40.0 * meter.result.seconds)


def test_per_token():
    figures = Energy(joules=60.0, seconds=3.0, method="counter").per_token(40, 20)
    assert figures["joules_per_output_token"] == 3.0 and figures["joules_per_token"] == 1.0 and figures["watts"] == 20.0


def test_without_nvml_it_says_so():
    try:
        Nvml()
    except ValueError as error:
        assert str(error) == energy.NO_LIBRARY
    else:
        pytest.skip("this machine has NVML")
