"""Report what every kernel costs on a GPU, from its disassembly and without a GPU: a table, and JSON.

    python -m benchmarks.codegen.report                                  # every kernel, sm_90, bf16
    python -m benchmarks.codegen.report --kernel attention --target sm_80 --target sm_90 --json report.json
    python -m benchmarks.codegen.report --use second --dtype all --target all
    python -m benchmarks.codegen.report --use kernels --few              # one or two launches of each kernel

The exit status is 1 if a kernel has a problem. The JSON also has the instructions of the hot loop and tensor-core
instructions.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.codegen.aot import TARGETS, Compiled
from benchmarks.codegen.launches import DTYPES, Launch, record, representatives
from benchmarks.harness.columns import WIDTH, make, terminal_width, wrapped
from benchmarks.harness.program import parser
from benchmarks.harness.workloads import workloads
from fastvit._base.output import not_writable
from fastvit.cli import terminal
from fastvit.ops.runtime import backend
from fastvit.warmup import in_processes

# Tensor-core multiply-adds per score in units of the (padded) head dimension, by kernel
_MATMULS = {
    "attention_fwd_kernel": 2,
    "attention_bwd_dq_kernel": 3,
    "attention_bwd_dkdv_kernel": 4,
    "attention_bwd_short_kernel": 5,
    "attention_bwd_mask_kernel": 2,
    "attention_relative_fwd_kernel": 2,
    "attention_relative_bwd_dq_kernel": 3,
    "attention_relative_bwd_dkdv_kernel": 5,
}
_PER_LANE = {"dropout_kernel": 4}  # elements per index of the tile


def elements(compiled: Compiled, constexprs: dict[str, Any]) -> tuple[float, str] | None:
    """Return how many units of work a thread does in one pass of the hot loop, and the unit: "score", "output" of a
    GEMM tile or "element" of a row; None if the kernel has no such unit."""
    threads = compiled.num_warps * TARGETS[compiled.target].gpu.warp_size
    if compiled.name in _MATMULS:
        depth = _MATMULS[compiled.name] * (constexprs["D0"] + constexprs["D1"])
        if macs := compiled.listing.hot_loop.macs_per_thread:
            return macs / depth, "score"
        keys = (
            constexprs["GRID_ROWS"] * constexprs["GRID_COLUMNS"] if "GRID_ROWS" in constexprs else constexprs["BLOCK_N"]
        )
        return constexprs["BLOCK_M"] * keys / threads, "score"
    blocks = [value for name, value in constexprs.items() if name.startswith("BLOCK") and name != "BLOCK_K"]
    if not blocks:
        return None
    unrolled = 1 if compiled.listing.loops else constexprs.get("STEPS", 1)
    per_lane = _PER_LANE.get(compiled.name, 1) * constexprs.get("HEAD_DIM", 1)
    count = math.prod(blocks) * unrolled * per_lane / threads
    return count, "output" if "BLOCK_K" in constexprs else "element"


def facts(launch: Launch, compiled: Compiled | str) -> dict[str, Any]:
    """Return one row of the report."""
    row: dict[str, Any] = {
        "kernel": launch.name,
        "workload": launch.workload,
        "dtype": launch.dtype,
        "target": launch.target,
        "config": {k: v for k, v in launch.constexprs.items() if isinstance(v, int | str) and k.isupper()},
        "num_warps": launch.options["num_warps"],
        "num_stages": launch.options["num_stages"],
    }
    if isinstance(compiled, str):
        return row | {"problems": [f"does not compile: {' '.join(compiled.split())[:500]}"]}
    loop, whole, unit = compiled.listing.hot_loop, compiled.listing.whole, elements(compiled, launch.constexprs)
    row |= {
        "first_tier": compiled.first_tier,
        "registers": compiled.registers,
        "spill_bytes": compiled.spill_bytes,
        "shared": compiled.shared,
        "programs_per_sm": compiled.programs_per_sm,
        "slots": whole.slots,
        "hot_slots": loop.slots,
        "loads_in_flight": loop.loads_in_flight,
        "products_in_flight": loop.products_in_flight,
        "mix": loop.mix,
        "tensor_instructions": dict(whole.tensor),
        "tensor_dots": compiled.tensor_dots,
        "problems": compiled.problems,
    }
    if unit is not None:
        count, what = unit
        slots = whole.slots - loop.slots if what == "output" and loop is not whole else loop.slots
        row |= {"slots_per": slots / count, "unit": what}
    return row


LEGEND = """\
warps/stages; registers and spilled bytes a thread; KB of shared memory, and programs that fit an SM; issue slots of the
hot loop (of the whole kernel where it has none); groups of loads in flight while its matmuls run, or TMA, whose copies
are not counted; slots per score of attention, element of a row, or output of a GEMM (there the slots outside the loop:
its epilogue)"""
_COLUMNS = ("workload", "dtype", "tile", "w/s", "regs", "spill", "KB", "progs", "slots", "loads", "per", "unit")


def table(rows: list[dict[str, Any]], width: int = WIDTH) -> str:
    """Format the rows by kernel and target, then the list of problems."""
    lines = wrapped([" ".join(LEGEND.split())], width)
    for kernel, target in dict.fromkeys((row["kernel"], row["target"]) for row in rows):
        mine = [row for row in rows if (row["kernel"], row["target"]) == (kernel, target)]
        lines += ["", f"{kernel}  {target}", *make(_COLUMNS, map(_cells, mine), left=3, width=width)]
    broken = [row for row in rows if row["problems"]]
    lines += ["", f"{len(rows)} kernels, {len(broken)} with problems"]
    for row in broken:
        lines.append(f"  {row['kernel']} [{row['workload']}, {row['dtype']}, {row['target']}]")
        lines += [f"    {problem}" for problem in row["problems"]]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    tile = "x".join(str(v) for k, v in row["config"].items() if k.startswith("BLOCK"))
    cells = [row["workload"], row["dtype"], tile, f"{row['num_warps']}/{row['num_stages']}"]
    if "slots" not in row:
        return cells
    per = [f"{row['slots_per']:.2f}", row["unit"]] if "slots_per" in row else ["", ""]
    numbers = (row[k] for k in ("registers", "spill_bytes", "shared", "programs_per_sm", "hot_slots"))
    loads = "TMA" if "UTMALDG" in row["mix"] else "" if row["loads_in_flight"] is None else str(row["loads_in_flight"])
    return [*cells, *(str(n // 1024 if i == 2 else n) for i, n in enumerate(numbers)), loads, *per]


def main(arguments: list[str] | None = None) -> int:
    options = parser("benchmarks.codegen.report", __doc__)
    options.add_argument("--target", action="append", choices=[*TARGETS, "all"], help="default: sm_90")
    options.add_argument("--dtype", action="append", choices=[*DTYPES, "all"], help="default: bf16")
    options.add_argument("--kernel", default="", help="only kernels whose name contains this (default: all)")
    options.add_argument("--op", action="append", default=[], help="only the workloads of this op (default: all)")
    options.add_argument("--use", choices=("compile", "second", "kernels"), default="compile", help="which workloads")
    options.add_argument("--few", action="store_true", help="of each kernel only the launch with most options in use")
    options.add_argument("--json", type=Path, help="also write the rows to this file")
    chosen = options.parse_args(arguments)
    if chosen.json and (reason := not_writable(chosen.json.parent)):
        options.error(f"--json: {reason}")
    targets = list(TARGETS) if "all" in (chosen.target or ()) else chosen.target or ["sm_90"]
    dtypes = list(DTYPES) if "all" in (chosen.dtype or ()) else chosen.dtype or ["bf16"]
    selected = workloads(chosen.use, ops=tuple(chosen.op))
    with terminal.progress(None, "finding kernels"):
        with mock.patch.object(backend, "GLUON", False):
            launches = [launch for target in targets for launch in record(selected, target, dtypes)]
        if "sm_90" in targets:  # and kernels in Gluon, which run instead of some
            with mock.patch.object(backend, "GLUON", True):
                launches += [launch for launch in record(selected, "sm_90", dtypes) if launch.kernel.is_gluon()]
    if not (launches := [launch for launch in launches if chosen.kernel in launch.name]):
        raise ValueError(f"no kernel of these workloads has {chosen.kernel!r} in its name; --use kernels has all")
    if chosen.few:
        launches = representatives(launches)
    rows = []
    with terminal.progress(len(launches), "compiled") as step:
        for launch, compiled in in_processes(Launch.compile, launches):
            step(f"{launch.name}, {launch.workload}, {launch.target}")
            rows.append(facts(launch, compiled))
    if chosen.json:
        terminal.write(chosen.json, json.dumps(rows, indent=1))
    print(table(rows, terminal_width()))
    return int(any(row["problems"] for row in rows))


if __name__ == "__main__":
    sys.exit(terminal.guarded(main, name="benchmarks.codegen.report"))
