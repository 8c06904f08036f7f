"""What every kernel costs on a GPU that is not at hand, from its disassembly: one table, and JSON.

    python -m benchmarks.codegen.report                                  # every kernel, sm_90, bf16
    python -m benchmarks.codegen.report --kernel attention --target sm_80 --target sm_90 --json report.json
    python -m benchmarks.codegen.report --target all --dtype all         # hundreds of kernels: tens of minutes

Columns: `regs` and `spill` (bytes) per thread; `smem` KB and `progs` resident programs per SM; then the issue slots of
the hot loop (of all of the kernel where it has none) by pipe; `per` = slots per score of attention, per element of
row kernels, per output of a GEMM (there the slots outside the loop: its epilogue); `bound` = the pipe that limits the
hot loop, and `tc%`, the most that tensor cores can then be busy. The exit status is 1 if a kernel has a problem.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.codegen.aot import TARGETS, Compiled
from benchmarks.codegen.launches import DTYPES, Launch, compile_all, record
from benchmarks.codegen.roofline import bound, elements
from benchmarks.harness.workloads import workloads


def facts(launch: Launch, compiled: Compiled | str) -> dict[str, Any]:
    """One row of the report."""
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
    loop, limit, unit = compiled.hot_loop, bound(compiled), elements(compiled, launch.constexprs)
    row |= {
        "registers": compiled.registers,
        "spill_bytes": compiled.spill_bytes,
        "shared": compiled.shared,
        "programs_per_sm": compiled.programs_per_sm,
        "slots": compiled.whole.slots,
        "hot_slots": loop.slots,
        "hot_loops": [region.slots for region in compiled.listing.hot_loops],
        "pipes": loop.pipes,
        "tensor_instructions": compiled.tensor_instructions,
        "tensor_dots": compiled.tensor_dots,
        "accesses": [str(access) for access in compiled.accesses],
        "narrow": [str(access) for access in compiled.narrow_accesses],
        "problems": compiled.problems + ["wgmma one by one"] * loop.one_by_one,
    }
    if unit is not None:
        count, what = unit
        slots = compiled.whole.slots - loop.slots if what == "output" and loop is not compiled.whole else loop.slots
        row |= {"slots_per": slots / count, "unit": what}
    if limit is not None:
        row |= {"cycles": limit.cycles, "bound": limit.pipe, "tensor_share": limit.share("tensor")}
    return row


def report(
    targets: list[str],
    dtypes: list[str],
    *,
    kernel: str = "",
    op: str | None = None,
    quick: bool = False,
    jobs: int = 0,
) -> list[dict[str, Any]]:
    """Rows of every kernel whose name contains `kernel`."""
    chosen = workloads(op, quick=quick)
    launches = [launch for target in targets for launch in record(chosen, target, dtypes) if kernel in launch.name]
    return [facts(*pair) for pair in compile_all(launches, jobs or None)]


_HEADER = (
    f"{'config':<58} {'warps':>5} {'regs':>4} {'spill':>5} {'smem':>5} {'progs':>5} {'slots':>5} "
    f"{'tensor':>6} {'sfu':>4} {'fma':>4} {'alu':>4} {'uni':>4} {'mem':>4} {'ctl':>4} "
    f"{'per':>13} {'bound':>7} {'tc%':>4}"
)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows grouped by kernel and target, then the list of problems."""
    lines: list[str] = []
    for group in dict.fromkeys((row["kernel"], row["target"]) for row in rows):
        lines += ["", "  ".join(group), _HEADER]
        lines += [_line(row) for row in rows if (row["kernel"], row["target"]) == group]
    broken = [row for row in rows if row["problems"]]
    lines += ["", f"{len(rows)} kernels, {len(broken)} with problems"]
    for row in broken:
        lines.append(f"  {row['kernel']} [{row['workload']}, {row['dtype']}, {row['target']}]")
        lines += [f"    {problem}" for problem in row["problems"]]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    blocks = "x".join(str(v) for k, v in row["config"].items() if k.startswith("BLOCK"))
    name = f"{row['workload']} {row['dtype']} {blocks}"
    if "slots" not in row:
        return f"{name:<58} does not compile"
    mix = " ".join(f"{n:>{6 if pipe == 'tensor' else 4}}" for pipe, n in row["pipes"].items())
    per = f"{row['slots_per']:.2f}/{row['unit']}" if "slots_per" in row else ""
    share = f"{100 * row['tensor_share']:.0f}" if row.get("tensor_share") else ""
    warps = f"{row['num_warps']}/{row['num_stages']}"
    return (
        f"{name:<58} {warps:>5} {row['registers']:>4} {row['spill_bytes']:>5} {row['shared'] / 1024:>5.0f} "
        f"{row['programs_per_sm']:>5} {row['hot_slots']:>5} {mix} {per:>13} {row.get('bound', ''):>7} {share:>4}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", action="append", choices=[*TARGETS, "all"], help="default: sm_90")
    parser.add_argument("--dtype", action="append", choices=[*DTYPES, "all"], help="default: bf16")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--op", help="only the workloads of this op")
    parser.add_argument("--quick", action="store_true", help="the few workloads that touch every kernel")
    parser.add_argument("--jobs", type=int, default=0, help="processes; default: one per core")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    chosen = parser.parse_args(arguments)
    targets = list(TARGETS) if "all" in (chosen.target or ()) else chosen.target or ["sm_90"]
    dtypes = list(DTYPES) if "all" in (chosen.dtype or ()) else chosen.dtype or ["bf16"]
    rows = report(targets, dtypes, kernel=chosen.kernel, op=chosen.op, quick=chosen.quick, jobs=chosen.jobs)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))
    return int(any(row["problems"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
