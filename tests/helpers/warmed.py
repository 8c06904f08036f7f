"""Run `fastvit warmup` for some models, and a step of each with a stub GPU. Prints how many kernels were launched, and
how many files that added to the cache of Triton. For tests/package/test_warmup.py, in a process of its own."""

import os
from pathlib import Path

from study_models import known

from benchmarks.codegen.stub_driver import stub_gpu
from fastvit.cli import main as fastvit
from fastvit.study.memory.step import DTYPES, Setting, Step
from fastvit.study.sources.find import find
from fastvit.study.sources.model_source import images_for

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


if __name__ == "__main__":
    with known():
        for model in MODELS:
            warm_up(*model)
