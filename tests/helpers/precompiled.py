"""Compile launches, launch the same with a stub driver, and print how many kernels were compiled, how many were
launched, and how many entries the launches added to Triton's cache. For test_gpu_first.py, in a process of its own."""

import os
from pathlib import Path

import torch

from benchmarks.codegen.stub_driver import stub_gpu
from benchmarks.gpu import precompile
from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import workloads
from fastvit.tuning.launches import compile_all

CACHE = Path(os.environ["TRITON_CACHE_DIR"])


def entries() -> set[str]:
    return {path.name for path in CACHE.iterdir()} if CACHE.exists() else set()


def main() -> None:
    some = [w for w in workloads("quick") if w.op in ("attention", "layer_norm", "mlp", "patch_embed")]
    items = [(w, "bf16") for w in some]
    with precompile._recording(precompile.REHEARSED) as recorder:
        precompile._run(recorder, items)
    launches = [*recorder.launches.values()]
    assert all(compiled is True for _, compiled in compile_all(launches, 2))
    before = entries()
    with stub_gpu(compiles=True) as gpu:
        for workload, _ in items:
            runner = workload.runner("fused", Draw(torch.bfloat16, "cpu"))
            runner.gradients()
            runner.infer()
    print(len(launches), len(before), len(gpu.binaries), len(entries() - before))


if __name__ == "__main__":
    main()
