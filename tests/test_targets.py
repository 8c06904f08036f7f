"""Every kernel, as the ops launch it, compiled for real GPUs on a machine that needs none.

By default the workloads that touch each kernel once; FASTVIT_TARGETS=all (`make targets`) takes every width, head
dimension, length, dtype and option. Compilation runs in subprocesses, because this one may be Triton's interpreter.
"""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.codegen import accesses, sass

ROOT = Path(__file__).parent.parent
FULL = os.environ.get("FASTVIT_TARGETS", "quick") == "all"
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
SHARED_LIMIT = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}  # KB a program
KERNELS = {
    name
    for path in sorted((ROOT / "kernels").glob("*.py"))
    for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
}

Row = dict[str, Any]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
every_target = pytest.mark.parametrize("target", TARGETS)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process that compiles: not the interpreter, and no kernel from an earlier run's cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )


@functools.cache
def report(target: str) -> list[Row]:
    """Rows of benchmarks.codegen.report, computed once a session."""
    dtypes = ["all"] if FULL else ["bf16"]
    options = [f"--dtype={dtype}" for dtype in dtypes] + ([] if FULL else ["--quick"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        done = python("-m", "benchmarks.codegen.report", f"--target={target}", f"--json={path}", *options)
        assert path.exists(), done.stderr[-3000:]
        rows: list[Row] = json.loads(path.read_text())
    return rows


def compiled(target: str) -> list[Row]:
    rows = [row for row in report(target) if "registers" in row]
    assert rows
    return rows


def label(row: Row) -> str:
    return f"{row['kernel']} [{row['workload']}, {row['dtype']}] {row['config']}"


def none_of(rows: list[Row], what: str) -> None:
    assert not rows, f"{what}:\n" + "\n".join(f"{label(row)}: {row['problems']}" for row in rows)


@needs_triton
@every_target
def test_every_kernel_compiles(target: str) -> None:
    none_of([row for row in report(target) if "registers" not in row], "does not compile")


@needs_triton
def test_every_kernel_is_launched() -> None:
    """On the main target; others may choose between two kernels differently."""
    assert {row["kernel"] for row in report("sm_90")} >= KERNELS


@needs_triton
@every_target
def test_nothing_spills(target: str) -> None:
    none_of([row for row in compiled(target) if row["spill_bytes"]], "spills registers to local memory")


@needs_triton
@every_target
def test_shared_memory_fits(target: str) -> None:
    limit = SHARED_LIMIT[target] * 1024
    none_of([row for row in compiled(target) if row["shared"] > limit], f"more than {limit} bytes of shared memory")


@needs_triton
@every_target
def test_matmuls_use_tensor_cores(target: str) -> None:
    matmuls = [row for row in compiled(target) if row["tensor_dots"]]
    assert {row["kernel"] for row in matmuls} >= {"attention_fwd_kernel", "linear_fwd_kernel"}
    none_of([row for row in matmuls if not row["tensor_instructions"]], "no tensor-core instruction")


@needs_triton
def test_matmuls_are_wgmma_on_hopper() -> None:
    def other(row: Row) -> bool:
        return any(not name.startswith("HGMMA") for name in row["tensor_instructions"])

    rows = [row for row in compiled("sm_90") if row["dtype"] in ("bf16", "fp16")]
    none_of([row for row in rows if other(row)], "tensor-core instructions other than wgmma")


@needs_triton
def test_wgmma_are_not_run_one_by_one() -> None:
    rows = [row for row in compiled("sm_90") if "wgmma one by one" in row["problems"]]
    none_of(rows, "ptxas serialises the matmul's instructions (C7515)")


@needs_triton
@every_target
def test_float32_is_multiplied_as_asked(target: str) -> None:
    rows = [row for row in compiled(target) if any("unasked" in problem for problem in row["problems"])]
    none_of(rows, "TF32 where float32 is asked for")


@needs_triton
@every_target
def test_tiles_move_16_bytes_at_once(target: str) -> None:
    rows = [row for row in compiled(target) if row["narrow"]]
    none_of(rows, "a tile read or written in pieces of less than 16 bytes")


@needs_triton
def test_attention_forward_issue_slots() -> None:
    rows = [
        row
        for row in compiled("sm_90")
        if row["kernel"] == "attention_fwd_kernel"
        and row["dtype"] == "bf16"
        and "d=64" in row["workload"]
        and "dropout" not in row["workload"]
    ]
    assert rows
    slow = {label(row): round(row["slots_per"], 2) for row in rows if row["slots_per"] > 7.5}
    assert not slow, f"more than 7.5 issue slots a score: {slow}"


BAD_KERNELS = """
import dataclasses
import json
import triton
import triton.language as tl
from benchmarks.codegen.aot import compile_kernel

@triton.jit
def copy_kernel(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * stride + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + at, tl.load(x_ptr + at))

@triton.jit
def square_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.dot(x, x, input_precision=PRECISION))

pointers = {"x_ptr": "*bf16", "out_ptr": "*bf16"}
wide = compile_kernel(copy_kernel, pointers | {"stride": "i32"}, {"BLOCK": 64})
ragged = compile_kernel(copy_kernel, pointers | {"stride": "i32"}, {"BLOCK": 64}, aligned=["x_ptr", "out_ptr"])
spilling = compile_kernel(square_kernel, pointers, {"BLOCK": 64, "PRECISION": "ieee"}, target="sm_80", maxnreg=40)
floats = {"x_ptr": "*fp32", "out_ptr": "*fp32"}
large = compile_kernel(square_kernel, floats, {"BLOCK": 128, "PRECISION": "tf32"}, target="sm_120", num_warps=8)
unasked = dataclasses.replace(large, tensor_dots=0)  # as if the source had not asked for tf32
print(json.dumps([c.problems for c in (wide, ragged, spilling, large, unasked)]))
"""


@needs_triton
def test_bad_kernels_are_seen(tmp_path: Path) -> None:
    script = tmp_path / "bad_kernels.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + BAD_KERNELS)
    done = python(str(script))
    assert done.returncode == 0, done.stderr[-3000:]
    wide, ragged, spilling, large, unasked = json.loads(done.stdout)
    assert wide == []
    assert {problem.split(" at ")[0] for problem in ragged} == {"32 loads of 2 bytes", "32 stores of 2 bytes"}
    assert any("spills" in problem for problem in spilling)
    assert any("shared memory" in problem for problem in large)
    assert not any("unasked" in problem for problem in large)
    assert any("unasked" in problem for problem in unasked)


LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R21], desc[UR20][R10.64], P1 ;
.L_x_1:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0030*/              @!P0 BRA `(.L_x_1) ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0050*/               @P2 BRA `(.L_x_3) ;
.L_x_2:
        /*0060*/                   FFMA R3, R4, R5, R6 ;
        /*0070*/                   MUFU.EX2 R3, R3 ;
        /*0080*/              @!P1 BRA `(.L_x_0) ;
        /*0090*/                   STG.E.128 desc[UR20][R2.64], R4 ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   IMAD.MOV.U32 R3, RZ, RZ, R4 ;
        /*00c0*/                   BRA `(.L_x_2) ;
"""


def test_loops_are_found_with_what_lies_out_of_line() -> None:
    listing = sass.parse(LISTING)
    assert [loop.slots for loop in listing.loops] == [10, 2]
    assert [loop.slots for loop in listing.innermost] == [2]
    hot = listing.hot_loop
    assert hot.slots == 10
    assert hot.pipes == {"tensor": 1, "sfu": 1, "fma": 2, "alu": 0, "uniform": 0, "memory": 2, "control": 4}
    assert hot.macs_per_thread == 64 * 64 * 16 / 128
    assert hot.slots_per(2) == 5
    assert not hot.one_by_one
    assert listing.whole.slots == 13


@pytest.mark.parametrize(("left", "expected"), [("0x0", True), ("0x1", False)])
def test_serialised_wgmma_are_told_from_pipelined_ones(left: str, expected: bool) -> None:
    step = """
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, LEFT ;
""".replace("LEFT", left)
    loop = f".L_x_0:{step * 4}        /*0030*/              @!P0 BRA `(.L_x_0) ;\n        /*0040*/      EXIT ;\n"
    assert sass.parse(loop).hot_loop.one_by_one is expected


PTX = """
$L__BB0_0:
	.loc	1 4 19                          // norm.py:4:19 @[ norm.py:11:52 ]
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd4 + 0 ];
	cp.async.cg.shared.global [ %r31 + 0 ], [ %rd4 + 0 ], 0x10, %r32;
$L__BB0_1:
	cp.async.cg.shared.global [ %r31 + 0 ], [ %rd4 + 0 ], 0x10, %r32;
	.loc	1 7 3                           // norm.py:7:3
	// begin inline asm
	.loc	1 8 3                           // norm.py:8:3
	@%p1 st.global.L1::evict_last.b16 [ %rd4 + 0 ], { %rs1 };
	// end inline asm
"""

TTIR = """
#loc = loc("/somewhere/norm.py":4:19)
    %x = tt.load %at, %mask, %zero : tensor<64x64x!tt.ptr<bf16>> loc(#loc8)
    tt.store %at, %y, %mask : tensor<64x!tt.ptr<bf16>> loc(#loc3)
    %seed = tt.load %seed_ptr : !tt.ptr<i64> loc(#loc1)
#loc1 = loc("/somewhere/norm.py":11:52)
#loc3 = loc("/somewhere/norm.py":7:3)
#loc8 = loc(callsite(#loc9 at #loc1))
#loc9 = loc("x"(#loc))
"""


def test_accesses_have_width_and_place() -> None:
    found = accesses.global_accesses(PTX)
    assert [str(access) for access in found] == [
        "2 loads of 16 bytes at norm.py:4:19 < norm.py:11:52",
        "1 store of 2 bytes at norm.py:7:3",
    ]
    tiles = accesses.tile_bytes(TTIR)
    assert tiles == {"norm.py:4:19 < norm.py:11:52": 64 * 64 * 2, "norm.py:7:3": 64 * 2, "norm.py:11:52": 8}
    assert accesses.narrow(found, tiles, threads=128) == []
    assert accesses.narrow(found, tiles, threads=8) == [found[1]]
