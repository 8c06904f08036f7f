"""Run every kernel once, at small awkward shapes, under compute-sanitizer.

    python -m benchmarks.gpu.sanitize --tool memcheck            # or racecheck, initcheck, synccheck
    python -m benchmarks.gpu.sanitize --tool racecheck --op attention

Exit status: the tool's, 86 with findings; 77 where the machine has no compute-sanitizer. Without `--tool` the cases run
on the GPU alone. On a machine without one `--rehearse` runs them in the interpreter, where
benchmarks/codegen/traffic_counter.py finds accesses outside the arguments and elements that two programs store.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys

if "--rehearse" in sys.argv and __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

import fastvit
from benchmarks.gpu.runner import SKIPPED
from benchmarks.harness.draw import Draw
from benchmarks.harness.program import parser
from benchmarks.harness.provenance import ROOT
from benchmarks.harness.workloads import workloads
from fastvit.cli.terminal import guarded
from fastvit.ops.runtime import backend as backends

GRAPHS = "graphs"  # models after `fastvit.graphs`
FINDINGS = 86  # exit status by which the tool says so
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")


def ops() -> list[str]:
    """Return the ops that have workloads for the sanitizer."""
    return list(dict.fromkeys(workload.op for workload in workloads("sanitize")))


def kernels() -> list[str]:
    """Return the names of all kernels."""
    sources = [path.read_text() for path in (ROOT / "kernels").glob("*.py")]
    return [name for source in sources for name in re.findall(r"\ndef (\w+_kernel)\(", source)]


def run(op: str, device: torch.device, *dtypes: torch.dtype) -> None:
    """Run the op's workloads, forward and backward."""
    for workload, dtype in itertools.product(workloads("sanitize", ops=(op,)), dtypes):
        runner = workload.runner("fastvit", Draw(dtype, device))
        with backends.use_backend("triton", strict=True):
            runner.gradients()
    if device.type == "cuda":
        torch.cuda.synchronize()


def run_graphs(device: torch.device) -> None:
    """Capture and replay a model in training and in inference, with calls of two kinds in turn."""
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}
    model = fastvit.VisionTransformer(**options, drop_path_rate=0.5, device=device)  # type: ignore[arg-type]
    report = fastvit.graphs(model)
    for step in range(10):
        image = torch.randn(1 + step % 2, 3, 32, 32, device=device)
        model(image).square().sum().backward()
        with torch.no_grad():
            model(image)
    torch.cuda.synchronize()
    assert len(report.graphs) == 4, str(report)


def rehearse(op: str) -> list[str]:
    """Run the op in the interpreter, without matmuls. Returns the kernels that ran. Raises for an access out of bounds
    and for a race."""
    from benchmarks.codegen.traffic_counter import count

    with count(compute=False) as traffic:
        run(op, torch.device("cpu"), torch.bfloat16)
    return [launch.kernel for launch in traffic.launches]


def main(arguments: list[str] | None = None) -> int:
    options = parser("benchmarks.gpu.sanitize", __doc__)
    options.add_argument("--tool", choices=("memcheck", "racecheck", "initcheck", "synccheck"))
    options.add_argument("--op", action="append", choices=(*ops(), GRAPHS), help="default: all ops")
    options.add_argument("--rehearse", action="store_true", help="in the interpreter, without the tool")
    chosen = options.parse_args(arguments)
    if not chosen.rehearse and not torch.cuda.is_available():
        options.error("no GPU; --rehearse runs the steps without one")
    names = chosen.op or ops()
    torch.manual_seed(0)
    if chosen.tool is None:
        for op in names:
            if chosen.rehearse:
                ran = rehearse(op)
                print(f"{op}: {len(ran)} launches of {len(set(ran))} kernels, in bounds and without races")
            elif op == GRAPHS:
                run_graphs(torch.device("cuda"))
            else:
                run(op, torch.device("cuda"), torch.bfloat16, torch.float32)
        return 0
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(_PLACES))
    if tool is None:
        print(f"SKIPPED: no compute-sanitizer on this machine (PATH, {', '.join(_PLACES)})")
        return SKIPPED
    ours = "kns=(" + "|".join(kernels()) + ")"
    command = [
        tool, "--tool", chosen.tool, "--error-exitcode", str(FINDINGS), "--kernel-regex", ours,
        sys.executable, "-m", "benchmarks.gpu.sanitize", *(f"--op={op}" for op in names),
    ]  # fmt: skip
    # every tensor gets an allocation of its own, so that memcheck sees its end; graphs need the allocator's pools
    environment = {**os.environ, **({} if GRAPHS in names else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})}
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    print(f"{chosen.tool}, {', '.join(names)}: {'FINDINGS' if status == FINDINGS else f'exit status {status}'}")
    return status


if __name__ == "__main__":
    sys.exit(guarded(main, name="benchmarks.gpu.sanitize"))
