"""Softmax attention on the packed output of the qkv projection, read by stride."""

from benchmarks.harness.measure import Measure
from benchmarks.harness.workloads import Workload

OPS = ("attention",)


def bench_attention(measure: Measure, workload: Workload, mode: str) -> None:
    measure(workload, mode)
