"""Rotary positions of one tensor's heads, in both spellings. It has no SDPA variant."""

from benchmarks.harness.measure import bench_op as bench_op  # what pytest runs with the workloads of OPS

OPS = ("rotary",)
