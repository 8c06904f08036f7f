"""Warms up models and then runs a step of each, to nothing: prints a line a model, how many kernels its step launched
and what that added to Triton's cache. For tests/test_tuning.py, in a process of its own."""

import os
from pathlib import Path

from study_models import known

from benchmarks.codegen.stub_driver import stub_gpu
from fastvit.cli import main as fastvit
from fastvit.study._plan import DTYPES, Setting, Step
from fastvit.study._sources import find
from fastvit.study._subject import channels, images

CACHE = Path(os.environ["TRITON_CACHE_DIR"])
BATCH = 3
MODELS = [
    ("vit_of_two_blocks", "bf16"), ("study_models:of_timm", "amp"), ("study_models:of_a_bias", "bf16"),
    ("eva02_tiny_patch14_224", "bf16"),
]  # fmt: skip


def entries() -> set[str]:
    return {path.name for path in CACHE.iterdir()} if CACHE.exists() else set()


def main() -> None:
    for name, dtype in MODELS:
        size = ["--image-size", "56"] if name.startswith("eva") else []
        wanted = [name, "--target", "sm_90", "--batch", str(BATCH), "--dtype", dtype, *size]
        assert fastvit(["warmup", *wanted]) == 0
        before = entries()
        subject = find(name)
        side = (56, 56) if size else subject.image_size
        model = subject.build("fused", side).to(DTYPES[dtype])
        pixels = images(BATCH, side, DTYPES[dtype], channels(model))
        with stub_gpu(compiles=True) as gpu:
            for mode in ("infer", "train"):
                Step(model, pixels, Setting(mode, dtype, "none"), gpu=True).passes()
        print("launched", name, len(gpu.binaries), len(entries() - before))
        assert fastvit(["warmup", *wanted]) == 0


if __name__ == "__main__":
    with known():
        main()
