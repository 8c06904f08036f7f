"""Patch embedding: images to tokens, with positions and the CLS token in place."""

from benchmarks.harness.measure import Measure
from benchmarks.harness.workloads import Workload

OPS = ("patch_embed",)


def bench_patch_embed(measure: Measure, workload: Workload, mode: str) -> None:
    measure(workload, mode)
