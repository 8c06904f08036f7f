"""Patch embedding: images to tokens, with positions and the CLS token in place."""

from benchmarks.harness.measure import bench_op as bench_op  # what pytest runs with the workloads of OPS

OPS = ("patch_embed",)
