"""``transect inspect``: what is read off assembly, and the table for real kernels (compiled in a process of its own,
because the tests' interpreter replaces the compiler)."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from effort import proving

from transect.cli import main
from transect.hardware import targets
from transect.ops.tools.machine_code import access_bytes, matrix_instructions, occupancy

PTX = """
  @%p1 ld.global.L1::evict_first.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
  ld.global.nc.v2.f32 {%f1, %f2}, [%rd2];
  ld.global.b16 { %rs1 }, [ %rd3 ];
  st.global.v4.f32 [%rd4], {%f3, %f4, %f5, %f6};
  cp.async.cg.shared.global [ %r5 + 0 ], [ %rd5 + 0 ], 0x10, %r6;
  cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%rd6, {%r8, %r9}], [%r10];
  cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd7, {%r8, %r9}], [%r11];
  ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r12];
  wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%f1}, %rd8, %rd9, %p2, 1, 1, 0, 1;
  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
"""
AMD = """
  buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen
  global_load_ushort v5, v[6:7], off
  global_store_dwordx2 v[8:9], v[10:11], off
  v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
"""


def test_accesses_and_matrix_instructions() -> None:
    assert access_bytes(PTX) == {"load": {16: 2, 8: 1, 2: 1, 0: 1}, "store": {16: 1, 0: 1}}
    assert matrix_instructions(PTX) == {"wgmma": 1, "mma": 1}
    assert access_bytes(AMD) == {"load": {16: 1, 2: 1}, "store": {8: 1}}
    assert matrix_instructions(AMD) == {"mfma": 1}


@pytest.mark.parametrize(
    ("target", "warps", "registers", "shared", "share"),
    [
        ("sm_90", 4, 32, 0, 1.0),  # 16 programs of 4 warps
        ("sm_90", 8, 168, 0, 8 / 64),  # 168 x 32 = 5376 registers a warp: one program of 8
        ("sm_80", 4, 32, 82 * 1024, 4 / 64),  # 83 KiB of 164
        ("sm_90", 4, 255, 0, 8 / 64),  # 8192 a warp, 8 warps
        ("gfx942", 4, 128, 0, 16 / 32),  # 4 waves on each of 4 units
        ("gfx942", 4, 32, 32 * 1024, 8 / 32),
    ],
)
def test_occupancy(target: str, warps: int, registers: int, shared: int, share: float) -> None:
    assert occupancy(target, warps, registers, shared) == share


def test_unknown_target_has_no_occupancy() -> None:
    assert occupancy("sm_50", 4, 32, 0) is None


SEVERAL = """
import json, sys
from transect.cli import main
from transect.hardware import targets
for arguments in json.loads(sys.argv[1]):
    try:
        main(["inspect", *arguments])
    except SystemExit as stop:
        assert not stop.code
    print("=====")
"""
SM_90 = ("--target", "sm_90")
TARGETS = set(targets.TARGETS) if proving() else {"gfx942", "sm_120"}
STAGES = {"ttgir": ("vector_add", "tt.load"), "ptx": ("vector_add", ".target sm_90a"), "sass": ("dot", "LDG.E.128")}


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """The table of targets, then stages; all targets with ``--prove``: ``nvcc`` needs seconds for each of NVIDIA's."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"COLUMNS": "160"}
    runs = [("vector_add", *(() if proving() else ("--target", "gfx942", "--target", "sm_121")))]
    runs += [(op, "--stage", stage, *SM_90) for stage, (op, _) in STAGES.items()]
    command = [sys.executable, "-c", SEVERAL, json.dumps(runs)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("=====")


def test_table(printed: list[str]) -> None:
    lines = printed[0].splitlines()
    rows = [line.split() for line in lines if line.split()[:1] in (["triton"], ["cuda"])]
    assert {row[2] for row in rows if row[0] == "triton"} == TARGETS
    accesses = [line for line in lines if line.startswith("    loads")]
    assert len(accesses) == len(rows) and all("16 B" in line for line in accesses)
    if shutil.which("nvcc"):
        compiled = [["vector_add_kernel", target] for target in targets.NVIDIA_TARGETS if target in TARGETS]
        assert [row[1:3] for row in rows if row[0] == "cuda"] == compiled


def test_stages(printed: list[str]) -> None:
    for part, (_, token) in zip(printed[1:], STAGES.values(), strict=False):
        assert token in part
    assert "vector_add_kernel" not in printed[1] and (shutil.which("nvcc") is None or "vector_add_kernel" in printed[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "no operator 'nothing'"),
        (("vector_add", "--target", "sm_20"), "no target 'sm_20'"),
        (("linear", "--target", "sm_90"), "declares no kernel"),
        (("sum", "--stage", "bytecode", "--kernel", "combine"), "no stage 'bytecode'"),
        (("sum", "--kernel", "nothing", "--target", "gfx942"), "declares no kernel called 'nothing'"),
    ],
    ids=["operator", "target", "no kernel", "stage", "kernel"],
)
def test_what_a_user_can_get_wrong(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["inspect", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
