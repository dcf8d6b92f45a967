"""Presets: each says where its figures are from, and floors follow from them."""

import pytest

from transect.hardware import presets
from transect.hardware.presets import PRESETS, preset


@pytest.mark.parametrize("name", PRESETS)
def test_figures_make_sense(name: str) -> None:
    made = PRESETS[name]
    assert made.name == name and made.source
    assert 1e10 < made.bytes_per_second < 1e13
    rates = made.flops_per_second
    assert rates["float32"] > 0
    if "bfloat16" in rates:
        assert rates["float32"] <= rates["tf32"] <= rates["bfloat16"] == rates["float16"]
        assert rates.get("float8_e4m3fn", rates["bfloat16"]) >= rates["bfloat16"]


def test_the_beginning_of_a_name_is_enough_where_one_begins_so() -> None:
    assert preset("h100") is preset("h100-sxm") is preset("H100")
    assert preset("h200") is PRESETS["h200"]


def test_another_device_is_not_taken_for_one_whose_name_goes_on() -> None:
    with pytest.raises(ValueError, match=r"no preset 'h20'; there are: a100-80gb"):
        preset("h20")


def test_the_beginning_of_several_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "PRESETS", {**PRESETS, "h100-pcie": PRESETS["l4"]})
    with pytest.raises(ValueError, match=r"'h100' is the beginning of h100-sxm, h100-pcie; there are: a100-80gb"):
        preset("h100")


def test_floor_of_a_preset() -> None:
    limits = preset("h200").ceilings(bandwidth_share=0.5)
    assert limits.floor(0, 2.4e12, "bfloat16") == pytest.approx(1.0)
    assert limits.floor(989.4e12, 0, "bfloat16") == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"no rate is known for int8 .* known are: float32"):
        limits.floor(1, 1, "int8")


def test_what_a_user_can_get_wrong() -> None:
    with pytest.raises(ValueError, match="no preset 'b300'; there are: a100-80gb"):
        preset("b300")
    with pytest.raises(ValueError, match="no preset ''; there are: a100-80gb"):
        preset("")
    with pytest.raises(ValueError, match="shares must be above 0 and at most 1"):
        preset("l4").ceilings(matmul_share=1.5)
