"""Whole models from the zoo on photographs, and at CIFAR's size on the same, scaled down."""

from benchmarks.harness.measure import bench_op as bench_op  # what pytest runs with the workloads of OPS

OPS = ("model",)
