"""Presets: cards as sold, one file each; each says where its figures are from, and floors follow from them."""

import json
from pathlib import Path

import pytest
from changed_package import ChangedPackages

from transect.cli import main
from transect.costs import presets
from transect.costs.floors import Rates
from transect.costs.presets import PRESETS, detected, preset
from transect.costs.units import GIB
from transect.costs.work import Cost

SOLD = {  # GiB, as the driver lists them
    "t4": 15.0, "l4": 22.5, "rtx-3090": 24.0, "rtx-4090": 24.0, "rtx-5090": 31.8, "a100-40gb": 40.0, "l40s": 45.0,
    "h100-80gb": 79.6, "a100-80gb": 80.0, "h200": 140.4, "b200": 179.1, "mi300x": 192.0,
}  # fmt: skip


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


@pytest.mark.parametrize(("name", "gib"), SOLD.items())
def test_cards_have_the_memory_that_their_driver_lists(name: str, gib: float) -> None:
    assert preset(name).memory_bytes / GIB == pytest.approx(gib, abs=0.05)


def test_no_name_means_two_devices() -> None:
    names = [name for made in PRESETS.values() for name in (made.name, *made.also)]
    assert len(names) == len(set(names))
    drivers = [name for made in PRESETS.values() for name in made.detected]
    assert len(drivers) == len(set(drivers))


def test_the_beginning_of_a_name_is_enough_if_one_begins_so() -> None:
    assert preset("h100") is preset("h100-sxm") is preset("H100 80GB") is PRESETS["h100-80gb"]
    assert preset("h200") is PRESETS["h200"] and preset("mi300x") is PRESETS["mi300x"]
    with pytest.raises(ValueError, match="'a100' is the beginning of a100-40gb, a100-80gb; there are: a10, a100-40gb"):
        preset("a100")


def test_another_device_is_not_taken_for_one_with_a_longer_name() -> None:
    with pytest.raises(ValueError, match=r"no preset 'h20'; there are: a10, a100-40gb"):
        preset("h20")


def test_devices_are_known_by_the_whole_name_of_their_driver() -> None:
    assert detected("NVIDIA L40S") is PRESETS["l40s"] and detected("NVIDIA L4") is PRESETS["l4"]
    assert detected("NVIDIA H100 80GB HBM3") is PRESETS["h100-80gb"] and detected("NVIDIA H100 PCIe") is None


def test_a_file_is_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "h300.toml"
    text = (presets.FOLDER / "h200.toml").read_text()
    file.write_text(text.replace('memory = "143771MiB"', 'memory = "200GiB"'))
    made = preset(str(file))
    assert made.name == "h300" and made.memory_bytes == 200 * GIB
    assert made.flops_per_second == PRESETS["h200"].flops_per_second


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("units = 132", "units = 0", r"units"),
        ("units = 132", "cores = 132", "unknown cores"),
        ("units = 132", "", "units"),
        ('memory = "143771MiB"', "", "not a size of memory"),
        ("bytes_per_second = 4800e9", 'bytes_per_second = "fast"', "bytes_per_second"),
        ("bfloat16 = 989.4e12", "bfloat16 = -1.0", "flops_per_second"),
        ("units = 132", "units =", "Invalid value"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (presets.FOLDER / "h200.toml").read_text()
    assert old in text
    (tmp_path / "mine.toml").write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=rf"cannot read the preset .*mine.toml: .*{message}"):
        preset(str(tmp_path / "mine.toml"))
    with pytest.raises(ValueError, match="cannot read the preset"):
        preset(str(tmp_path / "none.toml"))


def test_floor_of_a_preset() -> None:
    limits = preset("h200").ceilings(bandwidth_share=0.5)
    rates = Rates.of(limits, "bfloat16")
    assert rates.floor(Cost(0, 2.4e12, 0)).seconds == pytest.approx(1.0)
    assert rates.floor(Cost(989.4e12, 0, 0)).seconds == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"no rate is known for int8 .* known are: float32"):
        Rates.of(limits, "int8")


def test_what_a_user_can_get_wrong() -> None:
    with pytest.raises(ValueError, match="no preset 'b300'; there are: a10, a100-40gb"):
        preset("b300")
    with pytest.raises(ValueError, match="no preset ''; there are: a10, a100-40gb"):
        preset("")
    with pytest.raises(ValueError, match="shares must be above 0 and at most 1"):
        preset("l4").ceilings(matmul_share=1.5)


def test_the_guide_adds_one_in_one_file(changed_packages: ChangedPackages) -> None:
    """Apply what the guide shows to a copy of the package, and plan with the new device there."""
    package = changed_packages("docs/extend/gpu-preset.md")
    asked = ["memory", "qwen3-8b", "--serve", "--context", "8192", "--quantization", "int4", "--gpu", "a30", "--json"]
    done = package.transect(*asked)
    assert json.loads(done.stdout)["budget"] == 24576 * 2**20 and json.loads(done.stdout)["fits"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    said = capsys.readouterr()
    return int(stopped.value.code or 0), said.out, said.err


def test_a_70b_fits_on_two_cards_as_sold(capsys: pytest.CaptureFixture[str]) -> None:
    """It did not when "80 GB" was read as 80e9 bytes; over the model's whole context it does not on real cards."""
    asked = ("memory", "llama-3.3-70b", "--serve", "--tp", "2")
    code, out, _ = run(capsys, *asked, "--gpu", "h100-80gb", "--context", "16384")
    assert code == 0 and "fits in 79.65 GiB" in out
    assert "h100-80gb: NVIDIA H100 SXM5 80GB, 79.65 GiB (data sheet figures, not measured)" in out
    assert run(capsys, *asked, "--device-memory", "80GB", "--context", "16384")[0] == 1
    code, out, _ = run(capsys, *asked, "--gpu", "h100-80gb", "--json")
    found = json.loads(out)
    assert code == 1 and not found["fits"] and 20_000 < found["cache_tokens"] < 131072
    assert found["change"] == f"lower the context to {found['cache_tokens']} tokens"
    assert run(capsys, *asked, "--gpu", "h100-80gb", "--context", str(found["cache_tokens"]))[0] == 0
    assert run(capsys, *asked, "--gpu", "a100-40gb", "--context", "1024")[0] == 1
    assert run(capsys, "memory", "llama-3.3-70b", "--serve", "--gpu", "h200", "--context", "8192")[0] == 1


def test_decode_steps_are_predicted_on_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    """One H200 decodes an 8B in 3.7 ms a token (recorded); more sequences share the weights."""
    asked = ("memory", "llama-3.1-8b", "--serve", "--context", "2048", "--gpu", "h200")
    found = json.loads(run(capsys, *asked, "--json")[1])["predicted_decode_s"]
    assert list(found) == ["1", "256"] and found["1"] == pytest.approx(3.75e-3, rel=0.1)
    assert 2 * found["1"] < found["256"] < 10 * found["1"]
    code, out, _ = run(capsys, *asked)
    assert code == 0 and "predicted, not measured: 1 sequence with 1024 tokens: 3." in out
    two = json.loads(run(capsys, *asked, "--json", "--tp", "2")[1])["predicted_decode_s"]
    assert 0.5 * found["256"] < two["256"] < 0.8 * found["256"]
    packed = json.loads(run(capsys, *asked, "--json", "--quantization", "int4")[1])["predicted_decode_s"]
    assert packed["1"] < 0.6 * found["1"]
    for other in (("--gpu", "t4", "--context", "512", "--quantization", "int4"), ("--gpu", "epyc-9654")):
        assert json.loads(run(capsys, *asked[:3], *other, "--json")[1])["predicted_decode_s"] == {}, other


def test_memory_of_a_run_on_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("memory", "llama-3.1-8b", "--gpu", "rtx-4090")
    code, out, _ = run(capsys, *asked, "--task", "finetune")
    assert code == 1 and "does not fit" in out
    code, out, _ = run(capsys, *asked, "--task", "qlora")
    assert code == 0 and "of 23.99 GiB" in out


def test_a_card_says_where_the_memory_is(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("memory", "qwen3-0.6b", "--serve", "--context", "1024", "--json")
    assert json.loads(run(capsys, *asked, "--gpu", "epyc-9654")[1])["budget"] == 384 * 10**9
    assert json.loads(run(capsys, *asked, "--gpu", "h200", "--device-memory", "10GiB")[1])["budget"] == 10 * GIB
    code, _, err = run(capsys, *asked, "--gpu", "h200", "--device", "cpu")
    assert code == 2 and "--gpu h200 is of --device cuda, not cpu" in err
    code, _, err = run(capsys, *asked, "--gpu", "h20")
    assert code == 2 and "no preset 'h20'" in err
    code, out, _ = run(capsys, *asked[:-1], "--gpu", "l40s", "--cpu-offload-gb", "0.4")
    assert code == 0 and "over a link of 32 GB/s, by the data sheet" in out
