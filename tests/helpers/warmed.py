"""Compile kernels beforehand, and launch the same with a stub GPU: `fastvit warmup` and a step for some models, the
candidates of some launch tables, and benchmarks. Prints for each how many kernels were launched, and how many files
that added to Triton's cache. For tests/tuning/test_cli_tune.py, in a process of its own."""

import os
import tempfile
from pathlib import Path

import torch
from study_models import known

from benchmarks.codegen.stub_driver import MULTIPROCESSORS, stub_gpu
from benchmarks.gpu import precompile
from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload, workloads
from fastvit.cli import main as fastvit
from fastvit.study.memory.step import DTYPES, Setting, Step
from fastvit.study.sources.find import find
from fastvit.study.sources.model_source import images_for
from fastvit.tuning.calls import MODES, calls_of
from fastvit.tuning.launches import compile_all
from fastvit.tuning.model import Machine, ModelTuning, compile_calls, compile_candidates
from fastvit.tuning.tuner import Tuner

CACHE = Path(os.environ["TRITON_CACHE_DIR"])
BATCH = 3
TABLES = ("use_triton_gemm", "column_sum", "attention_bwd_short")
MODELS = [
    ("vit_of_two_blocks", "bf16"),
    ("study_models:of_timm", "amp"),
    ("study_models:of_a_bias", "bf16"),
    ("eva02_tiny_patch14_224", "bf16"),
]


def entries() -> set[str]:
    return {path.name for path in CACHE.iterdir()} if CACHE.exists() else set()


def warm_up() -> None:
    for name, dtype in MODELS:
        size = ["--image-size", "56"] if name.startswith("eva") else []
        wanted = [name, "--target", "sm_90", "--batch", str(BATCH), "--dtype", dtype, *size]
        assert fastvit(["warmup", *wanted]) == 0
        before = entries()
        source = find(name)
        side = (56, 56) if size else source.image_size
        model = source.build("fastvit", side).to(DTYPES[dtype])
        pixels = images_for(model, BATCH, side, DTYPES[dtype])
        with stub_gpu(compiles=True) as gpu:
            for mode in ("infer", "train"):
                Step(model, pixels, Setting(mode, dtype, "none"), gpu=True).passes()
        print("launched", name, len(gpu.binaries), len(entries() - before))
        assert fastvit(["warmup", *wanted]) == 0


def tune() -> None:
    source, machine = find("vit_of_two_blocks"), Machine("a GPU", "sm_90", MULTIPROCESSORS, torch.device("cpu"))
    prepare = compile_candidates(machine)
    with stub_gpu(compiles=True) as gpu, tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.json")
        tuner = Tuner(machine.device, lambda run: 1.0, path, machine.gpu, lambda: {"sources": ""}, rounds=(1, 3))
        tuning = ModelTuning(calls_of(source, source.image_size, BATCH, "bf16", MODES), tuner, MULTIPROCESSORS)
        compile_calls(tuning.calls, machine, {})
        tuning.time_calls()
        works = [work for work in tuning.works() if work.table in TABLES]
        for work in works:
            prepare(work, {})
        before, gpu.binaries = entries(), set()
        results = list(tuning.tune(works))
    assert len(results) == len(works) >= 5, results
    print("launched", "candidates", len(gpu.binaries), len(entries() - before))


def benchmark() -> None:
    items = [(w, "bf16") for w in workloads("quick") if w.op in ("attention", "layer_norm", "mlp", "patch_embed")]
    items.append((Workload("linear", {"B": 1, "N": 4096, "D": 64, "out": 4224, "activation": "gelu"}), "bf16"))  # TMA
    launches = precompile.record(items, precompile.REHEARSED)
    assert not [reason for _, reason in compile_all(launches, 2) if isinstance(reason, str)]
    before = entries()
    with stub_gpu(compiles=True) as gpu:
        for workload, _ in items:
            runner = workload.runner("fastvit", Draw(torch.bfloat16, "cpu"))
            runner.gradients()
            runner.infer()
    assert len(launches) == len(gpu.binaries)
    assert any(launch.constexprs.get("TMA") for launch in launches)
    print("launched", "benchmarks", len(gpu.binaries), len(entries() - before))


if __name__ == "__main__":
    with known():
        warm_up()
        tune()
    benchmark()
