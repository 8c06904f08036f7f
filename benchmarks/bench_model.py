"""Whole models from the zoo on photographs, and at CIFAR's size on the same, scaled down."""

from benchmarks.harness.measure import Measure
from benchmarks.harness.workloads import Workload

OPS = ("model",)


def bench_model(measure: Measure, workload: Workload, mode: str) -> None:
    measure(workload, mode)
