"""Compiles launches beforehand and then launches the same, to nothing: prints how many kernels were compiled, how many
were launched, and what the launches added to Triton's cache. For tests/test_gpu_first.py, in a process of its own."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.gpu import precompile
from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import workloads
from fastvit.ops import _library

CACHE = Path(os.environ["TRITON_CACHE_DIR"])
launched: set[str] = set()


class Launcher:
    def __init__(self, source: object, metadata: SimpleNamespace) -> None:
        self.hash = metadata.hash

    def __call__(self, *_: object) -> None:
        launched.add(self.hash)


def stub(capability: int) -> SimpleNamespace:
    """What stands for a GPU: kernels are compiled for it, loaded and launched by nothing."""
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448}, load_binary=lambda *_: (1, 1, 128, 0, 1024)
    )
    return SimpleNamespace(
        utils=utils,
        launcher_cls=Launcher,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )


def entries() -> set[str]:
    return {path.name for path in CACHE.iterdir()} if CACHE.exists() else set()


def main() -> None:
    some = [w for w in workloads("quick") if w.op in ("attention", "layer_norm", "mlp", "patch_embed")]
    items = [(w, "bf16") for w in some]
    launches = precompile.record(items, precompile.REHEARSED)
    assert not any(reason for _, reason in precompile.compile_all(launches, 2))
    before = entries()
    real = {"wants_triton": lambda x: True, "arch": lambda x: "sm_90", "multiprocessors": lambda index: 132}
    with mock.patch.multiple(_library, **real), mock.patch.object(triton.runtime.driver, "_active", stub(90)):
        for workload, _ in items:
            runner = workload.runner("fused", Draw(torch.bfloat16, "cpu"))
            runner.gradients(tuple(torch.empty_like(out) for out in runner.outputs()))
            runner.infer()
    print(len(launches), len(before), len(launched), len(entries() - before))


if __name__ == "__main__":
    main()
