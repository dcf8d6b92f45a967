"""The C++ kernels compiled for processors that this machine is not: the same outputs, run under an emulator.

Products are one chain of fused multiply-adds for each output, so they are equal to the bit on every instruction set
that has these. A whole layer also sums across lanes, in an order that depends on their number: float32 rounding apart.

Debian's packages ``g++-aarch64-linux-gnu`` and ``qemu-user`` bring what the tests of ARM need.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ops.cpu.test_kernels import _random_weight
from transect.ops.cpu import build
from transect.ops.cpu.library import KV_DTYPES, Kind, Library, PackedWeight, empty_cache, load
from transect.ops.cpu.stack import LayerStack, StackLayer
from transect.ops.registry import Unavailable

HERE = Path(__file__).parent
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
TOOLS = f"needs {COMPILER} and {EMULATOR}: apt-get install g++-aarch64-linux-gnu qemu-user"
SVE = "-march=armv8.2-a+sve -msve-vector-bits={bits}"
PROCESSORS = {
    "NEON": ("-march=armv8.2-a", "max,sve=off"),
    "SVE of 256 bits": (SVE.format(bits=256), "max,sve256=on,sve512=off,sve-default-vector-length=32"),
    "SVE of 512 bits": (SVE.format(bits=512), "max,sve512=on,sve-default-vector-length=64"),
}
FEW = (Kind.Q4_K, Kind.F32)
HEADS, KV_HEADS, HEAD, DIM, FFN, BLOCK = 4, 2, 32, 64, 96, 16


@pytest.fixture(scope="module")
def here() -> Library:
    try:
        return load(2)
    except Unavailable as reason:
        pytest.skip(str(reason))


def _compiled(folder: Path, name: str, kinds: Sequence[Kind], optimization: str) -> list[str]:
    """Build the program of ``other_processor.cpp``; return the command that runs it."""
    if not (shutil.which(COMPILER) and shutil.which(EMULATOR)):
        pytest.skip(TOOLS)
    flags, emulated = PROCESSORS[name]
    common = [COMPILER, optimization, *build.FLAGS[1:], *flags.split(), f"-I{build.SOURCES}"]
    sources = [str(HERE / "other_processor.cpp"), str(build.SOURCES / "linear.cpp")]
    listed = ", ".join(kind.name for kind in kinds)
    jobs = [[sources[0]], [sources[1], f"-DTRANSECT_KINDS={listed}"]]
    objects = [str(folder / f"{number}.o") for number in range(len(jobs))]
    running = [subprocess.Popen([*common, "-c", *job, "-o", made]) for job, made in zip(jobs, objects, strict=True)]
    assert [each.wait() for each in running] == [0] * len(jobs)
    program = folder / "program"
    # Products that are not compiled are not asked for.
    subprocess.run(
        [*common, "-static", "-Wl,--unresolved-symbols=ignore-all", *objects, "-o", str(program)], check=True
    )
    return [EMULATOR, "-cpu", emulated, str(program)]


def _bytes(*arrays: Tensor | Sequence[int]) -> bytes:
    tensors = [array if isinstance(array, Tensor) else torch.tensor(array, dtype=torch.int32) for array in arrays]
    return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)


class _Layer:
    """A decoder layer of float32 weights, five new tokens after 40 cached ones."""

    fresh, length = 5, 45

    def __init__(self, library: Library, kv: torch.dtype) -> None:
        torch.manual_seed(1)
        self.library, self.kv = library, kv
        shapes = {"q": (HEADS * HEAD, DIM), "k": (KV_HEADS * HEAD, DIM), "v": (KV_HEADS * HEAD, DIM)}
        shapes |= {"o": (DIM, HEADS * HEAD), "gate": (FFN, DIM), "up": (FFN, DIM), "down": (DIM, FFN)}
        self.weights = {}
        for name, (n, k) in shapes.items():
            kind, data = library.pack_dense(torch.randn(n, k) / math.sqrt(k))
            self.weights[name] = PackedWeight(kind, n, k, data)
        self.norms = 1 + torch.randn(2, DIM) / 8
        turns = torch.arange(self.length)[:, None] * 100.0 ** -(torch.arange(HEAD // 2) / HEAD)
        self.rotation = turns.cos(), turns.sin()
        self.x = torch.randn(self.fresh, DIM)
        blocks = -(-self.length // BLOCK)
        self.caches = empty_cache((1, blocks, KV_HEADS, BLOCK, HEAD), kv)
        for cache in self.caches:
            cache.copy_(torch.randn(cache.shape))

    def request(self) -> bytes:
        sizes = (DIM, HEADS, KV_HEADS, HEAD, FFN, KV_DTYPES[self.kv], self.fresh, self.length)
        k, v = self.caches
        weights = [weight.data for weight in self.weights.values()]
        return _bytes([2], sizes, *weights, self.norms, *self.rotation, self.x, k.transpose(-1, -2), v)

    def run(self) -> Tensor:
        absent = dict.fromkeys(("attention_norm_bias", "mlp_norm_bias", "q_norm", "k_norm"))
        norms = dict(zip(("attention_norm", "mlp_norm"), self.norms, strict=True))
        stack = LayerStack(
            self.library, [StackLayer(**norms, **absent, **self.weights, window=0)],
            dim=DIM, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD, ffn=FFN, block_size=BLOCK, layer_norm=0, gated=1,
            activation=0, rotary_half=HEAD // 2, kv=KV_DTYPES[self.kv], norm_eps=1e-5, scale=1 / math.sqrt(HEAD),
        )  # fmt: skip
        x, k, v = self.x.clone(), *(cache.clone(memory_format=torch.preserve_format) for cache in self.caches)
        table = torch.arange(k.shape[1], dtype=torch.int32)[None]
        starts, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([0, self.fresh], [self.length]))
        positions = torch.arange(self.length - self.fresh, self.length)
        stack.run(x, positions, k, v, table, starts, lengths, self.rotation)
        return x


def _same_outputs(here: Library, folder: Path, name: str, kinds: Sequence[Kind], optimization: str = "-O1") -> None:
    torch.manual_seed(0)
    command = _compiled(folder, name, kinds, optimization)
    requests, expected = [_bytes([0])], []
    for kind in kinds:
        for rows, n, k in ((1, 40, 256), (3, 16, 512), (37, 33, 256)):
            weight, _ = _random_weight(here, kind, n, k)
            x = torch.randn(rows, k)
            requests.append(_bytes([1, kind, n, k, rows], weight.data, x))
            expected.append(here.linear(x, weight))
    layers = [_Layer(here, kv) for kv in KV_DTYPES]
    requests += [layer.request() for layer in layers]
    done = subprocess.run(command, input=b"".join(requests), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-500:]
    answer = memoryview(done.stdout)

    def taken(size: int) -> bytes:
        nonlocal answer
        part, answer = bytes(answer[:size]), answer[size:]
        return part

    length = int.from_bytes(taken(4), "little")
    assert taken(length).decode() == name.split()[0]
    fused = here.isa != "plain"
    for wanted in expected:
        got = torch.frombuffer(bytearray(taken(4 * wanted.numel())), dtype=torch.float32).view_as(wanted)
        assert torch.equal(got, wanted) if fused else torch.allclose(got, wanted, rtol=1e-5, atol=1e-5)
    for layer in layers:
        got = torch.frombuffer(bytearray(taken(4 * layer.x.numel())), dtype=torch.float32).view_as(layer.x)
        taken(2 * layer.caches[0].numel() * layer.caches[0].element_size())
        torch.testing.assert_close(got, layer.run(), rtol=1e-5, atol=2e-5)
    assert not answer


def test_neon_under_an_emulator(here: Library, tmp_path: Path) -> None:
    _same_outputs(here, tmp_path, "NEON", FEW, "-O0")


@pytest.mark.prove
@pytest.mark.parametrize("name", PROCESSORS)
def test_all_kinds_on_arm(here: Library, tmp_path: Path, name: str) -> None:
    _same_outputs(here, tmp_path, name, tuple(Kind))


@pytest.mark.prove
@pytest.mark.parametrize("march", ["x86-64-v4", "sapphirerapids", "znver3"])
def test_compiles_for_processors_with_wider_instructions(tmp_path: Path, march: str) -> None:
    """Sapphire Rapids has AMX; the kernels compute in float32 and use its AVX-512."""
    compiler = next((path for name in build.COMPILERS if (path := shutil.which(name))), None)
    if compiler is None or "86" not in build.platform.machine():
        pytest.skip("needs a C++ compiler for x86-64")
    common = [compiler, "-O1", *build.FLAGS[1:], f"-march={march}", "-c", "-o", str(tmp_path / "out.o")]
    for job in (
        [str(build.SOURCES / "native.cpp")],
        [str(build.SOURCES / "linear.cpp"), "-DTRANSECT_KINDS=Q4_K, BF16"],
    ):
        subprocess.run([*common, *job], check=True)
