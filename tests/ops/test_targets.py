"""Which kernels each kind of GPU gets: Hopper's own on Hopper alone, the portable ones elsewhere, torch's nowhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from transect.engine.executors.gpu import setup
from transect.hardware.targets import NVIDIA_TARGETS, SETTING, TARGETS, KernelTarget
from transect.models.weights.scaled8 import Products8
from transect.ops import opset
from transect.ops.attention.packed import backward, flash_attention
from transect.ops.attention.packed import hopper as packed_hopper
from transect.ops.linear.few_rows import choices, small_matmul
from transect.ops.linear.few_rows import cuda as few_cuda
from transect.ops.linear.few_rows import triton as few_triton
from transect.ops.linear.many_rows import tiling
from transect.ops.linear.packed.eight_bit import scaled8_chain, scaled8_hopper, scaled8_rows, scaled8_tiles
from transect.ops.linear.packed.gguf import gguf_chain, gguf_matmul, gguf_row, gguf_rows, gguf_tiles
from transect.ops.linear.packed.int4 import int4_hopper, int4_matmul, int4_portable, int4_rows, int4_tiles
from transect.ops.opset import OPERATORS
from transect.ops.registry import get

GPU = torch.device("cuda", 0)
SIZES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (1536, 1024)]


@pytest.fixture(params=NVIDIA_TARGETS)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelTarget]:
    """The process is on such a GPU, as far as kernels are chosen; every CUDA C++ kernel can be built."""
    monkeypatch.setenv(SETTING, request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    for module in (choices, tiling):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 128)
    for module in (few_triton, flash_attention, backward, tiling, scaled8_tiles):
        monkeypatch.setattr(module, "INTERPRETED", False)
    caches = (choices.choices, choices.chosen, packed_hopper.device_refusal)
    for cached in caches:
        cached.cache_clear()
    yield TARGETS[request.param]
    for cached in caches:
        cached.cache_clear()


def test_no_operator_falls_back_to_torch(target: KernelTarget) -> None:
    name = opset._target(GPU)
    assert name == target.name
    for operator in OPERATORS:
        fitting = [label for label, made in get(operator).implementations.items()
                   if made.backend == "triton" and opset._unfit(made, name, False) is None]  # fmt: skip
        assert fitting, operator
        if operator == "paged_attention":
            assert fitting[0] == ("hopper" if target.hopper else "triton")


def test_products_of_bfloat16(target: KernelTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels by number of rows; the tilings fit a block."""
    monkeypatch.setattr(small_matmul, "CudaRows", lambda: lambda *_, **__: "cuda")
    monkeypatch.setattr(small_matmul, "TritonRows", lambda: lambda *_, **__: "triton")
    monkeypatch.setattr(small_matmul.small_matmul_hopper, "HopperRows", lambda _: lambda *_, **__: "hopper")
    monkeypatch.setattr(small_matmul, "cuda_refusal", lambda *_: None)
    monkeypatch.setattr(small_matmul.small_matmul_hopper, "refusal", lambda *_: None)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: "cublas")
    call = small_matmul.best_launcher()

    class Matrix:
        device, dtype = GPU, torch.bfloat16

        def __init__(self, *shape: int) -> None:
            self.shape = shape

    ran = {m: call(Matrix(m, 4096), Matrix(28672, 4096), dependent_launch=True) for m in (1, 16, 64)}
    assert (ran[1], ran[16]) == ("cuda", "cuda" if target.large_blocks else "triton")
    assert ran[64] in (("hopper", "cublas") if target.hopper else ("triton",))
    for n, k in SIZES:
        for m in (1, 8, 16):
            made = few_cuda.choose_tiling(m, n, 128, target.block_bytes)
            assert few_cuda.shared_bytes(made, m) <= target.block_bytes
        for m in (1, 16, 32, 64, 128, 256):
            cut = few_triton.choose_tiling(m, n, k, GPU)
            assert (cut.dependent_launch, cut.bulk) <= (target.dependent_launch, target.bulk_copies)
            ring = (cut.stages - 1) * (cut.bm + cut.bn) * cut.bk * 2
            assert ring <= target.block_bytes, (m, n, k, cut)
        for m in (64, 512, 4096):
            for gated in (False, True):
                cut = tiling.tiling_of(tiling._rule((m, n, k), gated))
                assert cut.persistent == target.bulk_copies
                assert cut.persistent or not cut.halves
                columns = cut.bn * (2 if gated else 1)
                held = cut.stages - (0 if cut.persistent else 1)
                assert held * (cut.bm + columns) * cut.bk * 2 <= target.block_bytes, cut


class _Wide:
    """As much of a tensor as ``cublas_is_quicker`` looks at."""

    device = GPU

    def __len__(self) -> int:
        return 512

    def element_size(self) -> int:
        return 2

    def stride(self, dim: int) -> int:
        return 4096 if dim == 0 else 1


def test_the_library_multiplies_many_rows_on_hopper_alone(target: KernelTarget) -> None:
    assert tiling.cublas_is_quicker(_Wide(), _Wide()) == target.hopper  # type: ignore[arg-type]


def test_products_of_packed_weights(target: KernelTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Int4, 8 bits and blocks of GGUF files: Hopper's kernels, or those that run since Ampere."""
    made: list[str] = []

    def kind(module: object, name: str) -> None:
        monkeypatch.setattr(module, name, lambda *_, **__: made.append(name) or name)

    for module, name in (
        (int4_rows, "CudaCodes"), (int4_hopper, "HopperCodes"), (int4_tiles, "Int4Tiles"),
        (int4_portable, "PortableCodes"), (scaled8_rows, "CudaRows8"), (scaled8_hopper, "HopperRows8"),
        (scaled8_chain, "CudaChain"), (gguf_rows, "GGUFRows"), (gguf_tiles, "GGUFTiles"), (gguf_chain, "GGUFChain"),
        (gguf_row, "GGUFRow"),
    ):  # fmt: skip
        kind(module, name)
    monkeypatch.setattr(gguf_matmul, "runs_triton", lambda *_: True)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    names = set(int4_matmul._cuda_kernels(GPU))
    assert names == ({"rows", "hopper", "tiles"} if target.hopper else {"portable"})
    assert not target.hopper or "PortableCodes" not in made
    fp8, whole = (Products8.on(GPU, dependent=True, fp8=fp8) for fp8 in (True, False))
    assert fp8.few == whole.few == "CudaRows8"
    assert (fp8.many is not None) == target.fp8_products
    assert whole.many is not None
    assert ("HopperRows8" in made) == target.hopper and fp8.chain == whole.chain == "CudaChain"
    assert (Products8.on(GPU).chain is None) == target.hopper  # Hopper's launches are then ordinary
    blocks = gguf_matmul.Products(GPU, dependent=True, chained=True)
    assert blocks._rows == "GGUFRows"
    assert (blocks._tiles is not None, blocks.chain is not None) == (target.hopper, target.hopper)


def test_tilings_of_packed_weights_fit_a_block(target: KernelTarget) -> None:
    room = target.block_bytes
    for n, k in SIZES:
        for m in (1, 3, 8, 16):
            rows8 = scaled8_rows.choose_tiling(m, n, k, 128, shared=room)
            assert scaled8_rows.shared_bytes(rows8, m) <= room and (rows8.ranks == 1 or target.hopper or room > 2e5)
            for group in (32, 64, 128):
                cut = int4_portable.choose_tiling(m, n, k, group, 128, room)
                assert int4_portable.shared_bytes(cut, m, group) <= room and cut.per * 128 >= n // 16
        for m in (17, 64, 256, 4096):
            tile = scaled8_tiles.choose_portable(m, n, k, False)
            assert (tile.stages - 1) * (tile.bm + tile.bn) * tile.bk <= room


def test_dependent_launch_where_there_is_one(target: KernelTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "resolve_ops", lambda *_, **__: "ops")
    monkeypatch.setattr(setup, "replace", lambda ops, **fields: (ops, *fields))
    monkeypatch.setattr(setup, "with_dependent_launch", lambda ops, on: (ops, on))
    assert setup.gpu_ops(GPU)[1] == target.dependent_launch


def test_attention_of_documents(target: KernelTarget) -> None:
    q = torch.empty(4096, 32, 128, dtype=torch.bfloat16)
    refusal = packed_hopper.device_refusal()
    assert target.hopper or (refusal is not None and "sm_90" in refusal)
    q_there = type("Queries", (), {"device": GPU, "element_size": lambda self: 2, "shape": q.shape})()
    assert flash_attention.choose(q_there).bulk == target.bulk_copies
    assert backward.choose(backward.KEYS, q_there).bulk == target.bulk_copies
