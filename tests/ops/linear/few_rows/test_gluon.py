"""Products whose weights are asked for before their input is there: what they refuse, their code, their numbers."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cuda_kernels import check_chain

from transect.ops.linear import gate_up
from transect.ops.linear.few_rows import small_matmul
from transect.ops.linear.few_rows.choices import FOLDER, read_choice
from transect.ops.linear.few_rows.cuda import Beside
from transect.ops.linear.few_rows.gluon import GluonRows, GluonTiling, device_refusal, gluon, refusal
from transect.ops.linear.few_rows.triton import TritonTiling
from transect.ops.linear.stream_products import StreamProducts

CHOSEN = {
    size: read_choice(entry).tiling
    for size, entry in json.loads((FOLDER / "nvidia_h200.json").read_text())["choices"].items()
    if entry["by"] == "gluon"
}
TILING = GluonTiling(bm=64, bn=32, bk=128, split=1, stages=4)
EPS = 1e-5


def test_what_it_does_not_take_is_said() -> None:
    x, weight, bias = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((64, 1024), (96, 1024), 96))

    def reason(tiling: GluonTiling = TILING, norm: Beside | None = None, **other: torch.Tensor) -> str | None:
        given = {"x": x, "weight": weight, "bias": bias} | other
        return refusal(given["x"], given["weight"], given["bias"], norm or Beside(), tiling)

    assert "bfloat16" in reason(x=x.float())
    assert "[M, K]" in reason(x=x[:, :512])
    assert "16 bytes" in reason(x=x[:, 4:516], weight=weight[:, :512])
    assert "[96]" in reason(bias=bias[:64])
    assert "whole tiles" in reason(replace(TILING, bn=64))
    assert "whole copies" in reason(replace(TILING, split=3))
    assert "2 stages" in reason(replace(TILING, stages=1)) and "4 or 8 warps" in reason(replace(TILING, warps=8))
    assert "shared memory" in reason(replace(TILING, bm=128, warps=8, stages=8))
    assert "bias and residual" in reason(replace(TILING, gated=True, bn=16))
    stream = torch.zeros(64, 96, dtype=torch.bfloat16)
    assert "next norm's weight" in reason(norm=Beside(residual=stream))
    if reason():
        with pytest.raises(ValueError, match="small_matmul_gluon: it "):
            GluonRows()(x, weight, bias, tiling=TILING)


def test_a_gate_takes_no_parts() -> None:
    assert "whole sums" in replace(TILING, gated=True, split=2).refusal(96, 1024)
    assert replace(TILING, gated=True).shared_bytes(1024) == TILING.shared_bytes(1024) + 2 * 32 * 1024


@pytest.mark.parametrize("size", CHOSEN)
def test_every_shipped_cut_fits_its_size(size: str) -> None:
    tiling = CHOSEN[size]
    m, n, k = (int(part) for part in size.split()[0].split("x"))
    assert tiling is not None and tiling.gated == ("gated" in size) and "stream" in size and tiling.bm < 2 * m
    assert not tiling.refusal(n // 2 if tiling.gated else n, k)


def test_where_it_cannot_run_norms_are_kernels_of_their_own() -> None:
    x = torch.zeros(64, 1024, dtype=torch.bfloat16)
    products = StreamProducts(
        torch.device("cpu"), lambda m, n, k, gated: TILING if n == 96 else TritonTiling(64, 64, 64, 1)
    )
    assert device_refusal(x.device)
    assert products.takes(x, [(64, 1024, False)])
    assert not products.takes(x, [(64, 1024, False), (96, 1024, False)])


COMPILE = """
import json
from transect.ops.linear.few_rows.gluon import kernels
from transect.ops.tools.compile import compile_kernel
for kernel in kernels():
    print(json.dumps(compile_kernel(kernel, "sm_90", sass=False).assembly))
"""


@pytest.mark.skipif(gluon is None, reason="needs Gluon's compiler")
def test_weights_are_asked_for_before_the_wait_and_waited_for_after_it() -> None:
    compiler = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=compiler)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(compiled) == 2
    for assembly in compiled:
        before, after = assembly.split("griddepcontrol.wait")
        assert "cp.async.bulk.tensor" in before and "cp.async.bulk.tensor" in after
        assert "mbarrier.try_wait" not in before and "mbarrier.try_wait" in after
        assert before.index("griddepcontrol.launch_dependents") < before.index("cp.async.bulk.tensor")
        # The descriptor that is fetched ahead is the kernel's first argument.
        assert "early_weights_param_0[128]" in before and "prefetch.tensormap" in before


def on_hopper() -> torch.device:
    device = torch.device("cuda", 0)
    if not torch.cuda.is_available() or device_refusal(device):
        pytest.skip("needs a Hopper GPU and Gluon")
    return device


@pytest.mark.gpu
@pytest.mark.parametrize("size", CHOSEN)
def test_every_shipped_cut(size: str) -> None:
    """It is as exact as torch, for any number of rows of its bucket, alone and with norms; the same bits every time."""
    device = on_hopper()
    m, n, k = (int(part) for part in size.split()[0].split("x"))
    tiling, call = CHOSEN[size], GluonRows()
    assert tiling is not None
    generator = torch.Generator(device).manual_seed(m + n)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    weight, bias, scale = normal(n, k) * k**-0.5, normal(n), 1 + normal(n) / 8
    for rows in (m, m - 7):
        x, residual = normal(rows, k), normal(rows, n)
        exact = (gate_up if tiling.gated else small_matmul).reference(x.double(), weight.double())
        torchs = gate_up.by_linear(x, weight) if tiling.gated else F.linear(x, weight)
        limit = 1.2 * (torchs.double() - exact).norm()
        y = call(x, weight, tiling=tiling)
        assert (y.double() - exact).norm() <= limit
        assert torch.equal(call(x, weight, tiling=tiling), y)
        # Squares of X, in pieces: what is left of it is X over its root mean square.
        squares = x.float().square().view(rows, 16, -1).sum(-1)
        normed = call.beside(x, weight, None, Beside(squares=squares, eps=EPS), tiling=tiling)[0]
        root = (squares.sum(-1, keepdim=True).double() / k + EPS).rsqrt()
        exact_normed = (gate_up if tiling.gated else small_matmul).reference(x.double() * root, weight.double())
        assert (normed.double() - exact_normed).norm() <= 2 * limit
        if tiling.gated:
            continue
        assert (call(x, weight, bias, tiling=tiling).double() - exact - bias.double()).norm() <= 2 * limit
        total, scaled, left = call.beside(x, weight, None, Beside(residual=residual, scale=scale), tiling=tiling)
        want = exact + residual.double()
        assert (total.double() - want).norm() <= 1.2 * (want.bfloat16().double() - want).norm()
        torch.testing.assert_close(scaled, total * scale)
        torch.testing.assert_close(left, total.float().square().view(rows, n // tiling.bn, tiling.bn).sum(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [0x7FFF, -1, 0x7F81, -64], ids=lambda bits: f"{bits & 0xFFFF:x}")
def test_no_number_is_taken_for_nothing(bits: int) -> None:
    """Whatever NaN X has, that of the sum is not the pattern that says that nothing is there yet."""
    device = on_hopper()
    x = torch.randn(64, 1024, device=device).bfloat16()
    x[3, 5], x[7, 900] = (torch.tensor(bits, dtype=torch.int16, device=device).view(torch.bfloat16) for _ in range(2))
    weight = torch.randn(64, 1024, device=device).bfloat16()
    y = GluonRows()(x, weight, tiling=replace(TILING, split=2))
    missing = y.isnan().all(1).nonzero()[:, 0].tolist()
    assert missing == [3, 7] and not y.isnan().any(1)[[0, 1, 2, 8, 63]].any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 40])
def test_a_chain_of_launches_reads_what_the_one_before_wrote(rows: int) -> None:
    on_hopper()
    kernel = GluonRows()

    def call(
        x: torch.Tensor, weight: torch.Tensor, *, dependent_launch: bool = True, tiling: GluonTiling = TILING
    ) -> torch.Tensor:
        return kernel(x, weight, tiling=tiling)

    x = torch.zeros(rows, 1024, device="cuda", dtype=torch.bfloat16)
    call(x, x[:16].repeat(64, 1), tiling=replace(TILING, split=4))  # makes the room for parts, which a capture cannot
    tilings = [
        TILING,
        replace(TILING, bn=16, split=2, stages=8),
        replace(TILING, split=4, stages=2),
        replace(TILING, stages=2),
    ]
    check_chain(call, rows, [{"tiling": tiling} for tiling in tilings], 0.05)
