"""Whole models: of the zoo, on photographs, at CIFAR's size too; and of other libraries, untouched (as `sdpa`, which is
what they run) and with `fastvit.accelerate`."""

from benchmarks.harness.measure import bench_op as bench_op  # what pytest runs with the workloads of OPS

OPS = ("model", "accelerate")
