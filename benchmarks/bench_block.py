"""A transformer block: LayerNorm, attention, LayerNorm, MLP, with both residuals. head_dim 64, or 80 for ViT-H."""

from benchmarks.harness.measure import Measure
from benchmarks.harness.workloads import Workload

OPS = ("block",)


def bench_block(measure: Measure, workload: Workload, mode: str) -> None:
    measure(workload, mode)
