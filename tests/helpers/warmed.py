"""Compile kernels beforehand, and launch the same with a stub GPU: `fastvit warmup` and a step for some models, and
benchmarks. Prints for each how many kernels were launched, and how many files that added to Triton's cache. For
tests/package/test_warmup.py, in a process of its own."""

import os
from pathlib import Path

import torch
from study_models import known

from benchmarks.codegen.stub_driver import stub_gpu
from benchmarks.gpu import precompile
from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload, workloads
from fastvit.cli import main as fastvit
from fastvit.study.memory.step import DTYPES, Setting, Step
from fastvit.study.sources.find import find
from fastvit.study.sources.model_source import images_for
from fastvit.warmup import compile_all

CACHE = Path(os.environ["TRITON_CACHE_DIR"])
BATCH = 3
MODELS = [
    ("vit_of_two_blocks", "bf16"),
    ("study_models:timm_vit", "amp"),
    ("study_models:learnt_bias", "bf16"),
    ("eva02_tiny_patch14_224", "bf16"),
]


def entries() -> set[str]:
    return {path.name for path in CACHE.iterdir()} if CACHE.exists() else set()


def warm_up(name: str, dtype: str) -> None:
    size = ["--image-size", "56"] if name.startswith("eva") else []
    wanted = ["warmup", name, "--target", "sm_90", "--batch", str(BATCH), "--dtype", dtype, *size]
    assert fastvit(wanted) == 0
    before = entries()
    source = find(name)
    side = (56, 56) if size else source.image_size
    model = source.build("fastvit", side).to(DTYPES[dtype])
    pixels = images_for(model, BATCH, side, DTYPES[dtype])
    with stub_gpu(compiles=True) as gpu:
        for mode in ("infer", "train"):
            Step(model, pixels, Setting(mode, dtype, "none"), gpu=True).passes()
    print("launched", name, len(gpu.binaries), len(entries() - before))
    assert fastvit(wanted) == 0


def benchmark() -> None:
    rows = [w for w in workloads("quick") if w.op in ("attention", "layer_norm", "mlp", "patch_embed")]
    rows.append(Workload("linear", {"B": 1, "N": 4096, "D": 64, "out": 4224, "activation": "gelu"}))  # TMA
    launches = precompile.record_rows(rows, precompile.REHEARSED)
    assert not [reason for _, reason in compile_all(launches, 2) if isinstance(reason, str)]
    before = entries()
    with stub_gpu(compiles=True) as gpu:
        for workload in rows:
            runner = workload.runner("fastvit", Draw(torch.bfloat16, "cpu"))
            runner.gradients()
            runner.infer()
    assert len(launches) == len(gpu.binaries)
    assert any(launch.constexprs.get("TMA") for launch in launches)
    print("launched", "benchmarks", len(gpu.binaries), len(entries() - before))


if __name__ == "__main__":
    with known():
        for model in MODELS:
            warm_up(*model)
    benchmark()
