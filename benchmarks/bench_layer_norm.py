"""LayerNorm, and LayerNorm of a residual sum with LayerScale. Neither has an SDPA variant."""

from benchmarks.harness.measure import Measure
from benchmarks.harness.workloads import Workload

OPS = ("layer_norm", "add_layer_norm")


def bench_layer_norm(measure: Measure, workload: Workload, mode: str) -> None:
    measure(workload, mode)
