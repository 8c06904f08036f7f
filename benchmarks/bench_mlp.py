"""The MLP and its parts: fc1 + GELU, both layers, and both with the LayerNorm before and the residual after them."""

from benchmarks.harness.measure import Measure
from benchmarks.harness.workloads import Workload

OPS = ("linear", "mlp", "layer_norm_mlp")


def bench_mlp(measure: Measure, workload: Workload, mode: str) -> None:
    measure(workload, mode)
