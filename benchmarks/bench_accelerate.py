"""ViTs of other libraries, untouched (as `sdpa`, which is what they run) and with `fastvit.accelerate`."""

from benchmarks.harness.measure import Measure
from benchmarks.harness.workloads import Workload

OPS = ("accelerate",)


def bench_accelerate(measure: Measure, workload: Workload, mode: str) -> None:
    measure(workload, mode)
