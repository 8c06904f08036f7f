"""Norms of q and of k, of both kinds, with and without rotary positions. It has no SDPA variant."""

from benchmarks.harness.measure import bench_op as bench_op  # what pytest runs with the workloads of OPS

OPS = ("qk_norm",)
