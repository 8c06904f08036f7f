"""Softmax attention on the packed output of the qkv projection, read by stride."""

from benchmarks.harness.measure import bench_op as bench_op  # what pytest runs with the workloads of OPS

OPS = ("attention",)
