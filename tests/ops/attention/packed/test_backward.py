"""Attention's gradient: its kernels as compiled, what of the Hopper path the interpreter can run, and on a GPU that it
is right, repeats, and can be captured into a CUDA graph."""

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from transect.ops.attention.packed import backward as backward
from transect.ops.attention.packed import backward_hopper as fused
from transect.ops.attention.packed import flash_attention as fa
from transect.ops.attention.packed import hopper as hopper
from transect.ops.lang.jit import runs_triton

ON_HOPPER = hopper.device_refusal() is None
NEEDS_HOPPER = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def packed(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


@pytest.mark.skipif(not runs_triton(torch.empty(0)), reason="needs the interpreter")
@pytest.mark.parametrize(("size", "columns"), [(64, 64), (96, 128)])
def test_dq_comes_back_from_the_order_of_threads(size: int, columns: int) -> None:
    cu, heads, rows = packed((70, 1, 64, 130)), 2, fused.BM
    exact = torch.randn(int(cu[-1]), heads, size)
    documents = len(cu) - 1
    blocks = len(exact) // rows + documents
    workspace = torch.zeros(heads, blocks, rows * columns)
    for document, (begin, end) in enumerate(pairwise(cu.tolist())):
        for tile in range(-(-(end - begin) // rows)):
            part = exact[begin + tile * rows : min(end, begin + (tile + 1) * rows)].transpose(0, 1)
            whole = torch.zeros(heads, rows, columns)
            whole[:, : part.shape[1], :size] = part
            threads = whole.reshape(heads, 4, 2, 8, 2, columns // 16, 4, 2).permute(0, 4, 1, 5, 3, 6, 2, 7)
            workspace[:, begin // rows + document + tile] = threads.reshape(heads, -1)
    found = torch.full_like(exact, torch.nan)
    fused.finish_kernel[(blocks, heads)](
        workspace, found, cu, documents, blocks, 0.5, H=heads, D=size, DP=columns, BM=rows
    )
    assert torch.equal(found, exact / 2)


@pytest.mark.skipif(ON_HOPPER, reason="this machine has a Hopper GPU")
def test_elsewhere_the_hopper_kernel_says_that_it_cannot_run() -> None:
    q, row = torch.randn(5, 2, 64, dtype=torch.bfloat16), torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"Hopper.*flash_attention_backward\.backward"):
        fused.backward(q, q, q, q, row, row, packed((5,)), 0.125)


COMPILE = """
import json
from dataclasses import replace
from transect.ops.attention.packed import backward
from transect.ops.tools.compile import compile_kernel
bulk = "tensordesc<bf16[64, 1, 128]>"
for kernel in backward.kernels():
    if "hopper" not in kernel.name:
        copied = "qkvg" if kernel.name == "backward_keys" else "kv"
        stages = backward.STAGES[kernel.name.removeprefix("backward_")]
        constants = {**kernel.constants, "BM": 64, "BN": 64, "BULK": True}
        arguments = {**kernel.arguments, **dict.fromkeys(copied, bulk)}
        kernel = replace(kernel, arguments=arguments, constants=constants, warps=4, stages=stages, targets=("sm_90",))
    made = compile_kernel(kernel, "sm_90")
    print(json.dumps([kernel.name, made.spilled_bytes, made.stages["ttgir"], made.stages.get("sass", "")]))
"""


@pytest.fixture(scope="module")
def compiled() -> dict[str, tuple[int | None, str, str]]:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: (spilled, ttgir, sass) for name, spilled, ttgir, sass in map(json.loads, done.stdout.splitlines())}


def test_no_copy_lands_on_a_tile_in_use(compiled: dict[str, tuple[int | None, str, str]]) -> None:
    """The two kernels, with the stages they run with: where a copy for the next step is under way beside a product,
    its tile is one of a ring of two at least."""

    def rings(ttgir: str) -> list[int]:
        lines = [line for line in ttgir.splitlines() if "ttg.local_alloc :" in line and "x64x1x128xbf16" in line]
        return [int(line.split("memdesc<")[1].split("x")[0]) for line in lines]

    assert rings(compiled["backward_keys"][1]) == []  # nothing is copied ahead
    slots = rings(compiled["backward_queries"][1])
    assert slots
    assert min(slots) >= 2


def test_products_of_the_hopper_kernel_do_not_wait_for_each_other(
    compiled: dict[str, tuple[int | None, str, str]],
) -> None:
    """Where the assembler sees an accumulator touched between asynchronous products it makes each of the 32 wait."""
    kernels = {name: made for name, made in compiled.items() if "hopper" in name}
    assert len(kernels) == 3
    for spilled, _, sass in kernels.values():
        assert not spilled
        if sass:
            assert 1 <= sass.count("WARPGROUP.DEPBAR") <= 6


def errors(found: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize(
    ("dtype", "size", "kv_heads", "lengths", "causal", "window"),
    [
        (torch.bfloat16, 128, 2, (300, 1, 699), True, None),
        (torch.bfloat16, 128, 8, (300, 1, 699), False, None),
        (torch.float16, 128, 2, (77, 1, 900, 128, 64), True, 100),
        (torch.bfloat16, 128, 2, (77, 1, 900, 128, 64), False, 37),
        (torch.bfloat16, 128, 1, (2048,), True, 2),
        (torch.bfloat16, 96, 2, (300, 1, 699), True, None),
        (torch.float16, 96, 8, (77, 1, 900, 128, 64), False, None),
        (torch.bfloat16, 64, 2, (300, 1, 699), True, None),
        (torch.bfloat16, 64, 8, (77, 1, 900, 128, 64), False, 100),
        (torch.bfloat16, 40, 4, (77, 1, 200), True, None),  # of a size that the Hopper kernel leaves to the others
    ],
    ids=str,
)
def test_gradients_are_right_and_repeat(
    dtype: torch.dtype, size: int, kv_heads: int, lengths: tuple[int, ...], causal: bool, window: int | None
) -> None:
    cu = packed(lengths).cuda()
    joined = torch.randn(sum(lengths), 8 + 2 * kv_heads, size, device="cuda").to(dtype)
    q, k, v = joined.split((8, kv_heads, kv_heads), dim=1)
    g = torch.randn(sum(lengths), 8, size, device="cuda").to(dtype)
    options = (cu, size**-0.5, causal, window)

    def peer(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        function = fa.reference if dtype == torch.float64 else fa.peers.torchs
        return torch.autograd.grad(function(*leaves, *options), leaves, g.to(dtype))

    exact, torchs = peer(torch.float64), errors(peer(dtype), peer(torch.float64))
    out, lse = fa.forward(q, k, v, *options)
    for deterministic in (True, False):
        runs = [backward.backward(g, q, k, v, out, lse, *options, deterministic=deterministic) for _ in range(8)]
        found = errors(runs[0], exact)
        assert all(mine <= 2 * theirs for mine, theirs in zip(found, torchs, strict=True)), (found, torchs)
        for which in range(0 if deterministic else 1, 3):  # dq's sum has no fixed order where it may not repeat
            assert all(torch.equal(run[which], runs[0][which]) for run in runs)


@pytest.mark.gpu
@NEEDS_HOPPER
def test_asked_for_determinism_dq_repeats_through_autograd() -> None:
    q, k, v, g = (torch.randn(2000, 4, 128, device="cuda").bfloat16().requires_grad_() for _ in range(4))
    cu = packed((2000,)).cuda()
    torch.use_deterministic_algorithms(True)
    try:
        out = fa.flash_attention_autograd(q, k, v, cu, 0.1, False)
        runs = [torch.autograd.grad(out, (q, k, v), g, retain_graph=True) for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


CAPTURE = """
import sys
import torch
from transect.ops.attention.packed import flash_attention as fa
cu = torch.tensor([0, 100, 256], dtype=torch.int32, device="cuda")
q, k, v, g = (torch.randn(256, 4, 64, device="cuda").bfloat16().requires_grad_() for _ in range(4))
def forward():
    return fa.flash_attention_autograd(q, k, v, cu, 0.125, True)
def backward(out):
    return torch.autograd.grad(out, (q, k, v), g, retain_graph=True)
stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
stream.wait_stream(torch.cuda.current_stream())
if sys.argv[1] == "both":
    with torch.cuda.graph(graph, stream=stream):
        made = backward(forward())
else:
    with torch.cuda.stream(stream):
        out = forward()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        made = backward(out)
with torch.no_grad():
    g.copy_(torch.randn_like(g))
graph.replay()
torch.cuda.synchronize()
for a, b in zip(made, backward(forward())):
    torch.testing.assert_close(a, b)
"""


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("what", ["both", "backward"])
def test_the_first_backward_of_a_process_can_be_captured(what: str) -> None:
    """With its forward, or alone where the forward ran on the capturing stream: autograd runs a backward on the stream
    of its forward, so that with a forward on the default stream CUDA ends the capture (StreamCaptureInvalidated)."""
    done = subprocess.run([sys.executable, "-c", CAPTURE, what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
