"""Measure how long Triton compiles a model's kernels from an empty cache, one after the other, without a GPU.

    python -m benchmarks.codegen.compile_time                   # ViT-B/16, batch 32, bfloat16, on sm_90 and sm_80
    PYTHONPATH=FOLDER python -m benchmarks.codegen.compile_time # with the triton in FOLDER

The first call of a model takes this time on a machine with a GPU: a step launches kernels in this order, and each has
to be compiled before it is launched. `fastvit warmup` compiles the same kernels in several processes. If seconds and
seconds of a core differ, other processes kept the machine busy. Results replace those of the same version of triton in
the file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.provenance import ROOT, commit, now, write_json
from benchmarks.harness.record import environment

OUT = ROOT / "benchmarks" / "results" / "cpu" / "compile_time.json"
TARGETS, MODES = ("sm_90", "sm_80"), ("infer", "train")


def measure(model: str, batch: int, dtype: str, target: str, mode: str) -> dict[str, Any]:
    """Compile the kernels of one step into an empty cache. Returns the seconds of each kernel, in their order."""
    import triton

    from fastvit.study.sources.find import find
    from fastvit.warmup import Recorder, compiled, record_step

    subject = find(model)
    recorder = Recorder(target)
    record_step(recorder, subject, subject.image_size, batch, dtype, mode)
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        kernels, worked = [], _cpu_seconds()
        for launch in recorder.launches.values():
            start = time.perf_counter()
            compiled(launch)
            kernels.append({"kernel": launch.name, "seconds": time.perf_counter() - start})
    seconds = sum(kernel["seconds"] for kernel in kernels)
    return {
        "target": target, "mode": mode, "seconds": seconds, "cpu_seconds": _cpu_seconds() - worked, "kernels": kernels
    }  # fmt: skip


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it started, such as ptxas."""
    return sum(os.times()[:4])


def render(path: Path) -> list[str]:
    """Return the table of a result file."""
    data = json.loads(path.read_text())
    model, results = data["model"], data["results"]
    where = next(iter(results.values()))["environment"]
    lines = [
        f"{model['model']}, batch {model['batch']}, {model['dtype']}: Triton's kernels of a step, compiled one after",
        f"the other from an empty cache, without a GPU; {where['device']}, torch {where['torch']}",
        "",
        f"{'triton':8}{'target':8}{'step':7}{'kernels':>7}{'seconds':>9}{'of a core':>11}  slowest kernel",
    ]
    for version, found in results.items():
        for case in found["cases"]:
            slowest = max(case["kernels"], key=lambda kernel: kernel["seconds"])
            row = f"{version:8}{case['target']:8}{case['mode']:7}{len(case['kernels']):7}{case['seconds']:9.1f}"
            row += f"{case['cpu_seconds']:11.1f}  {slowest['kernel'].removesuffix('_kernel')} {slowest['seconds']:.1f}"
            lines.append(row)
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32", "amp"))
    parser.add_argument("--target", nargs="+", default=TARGETS, help=f"default: {' '.join(TARGETS)}")
    parser.add_argument("--mode", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--out", type=Path, default=OUT, help="the file that keeps the results")
    chosen = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("nothing is compiled with TRITON_INTERPRET=1")
    import triton

    model = {"model": chosen.model, "batch": chosen.batch, "dtype": chosen.dtype}
    where = environment(torch.device("cpu"), torch.bfloat16)
    where = {name: where[name] for name in ("device", "torch", "fastvit", "python")}
    where |= {"triton": triton.__version__, "commit": commit(), "when": now()}
    cases = []
    context = multiprocessing.get_context("spawn")  # like a program that has just started
    for target in chosen.target:
        for mode in chosen.mode:
            with context.Pool(1) as pool:
                case = pool.apply(measure, (*model.values(), target, mode))
            kernels = f"{len(case['kernels'])} kernels, {case['seconds']:.1f} s"
            print(f"triton {triton.__version__}, {target}, {mode}: {kernels}", flush=True)
            cases.append(case)
    before = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    results = before["results"] if before.get("model") == model else {}
    results[triton.__version__] = {"environment": where, "cases": cases}
    write_json(chosen.out, {"model": model, "results": dict(sorted(results.items()))})
    print("\n".join(["", *render(chosen.out)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
