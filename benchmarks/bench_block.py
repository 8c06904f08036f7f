"""A transformer block: LayerNorm, attention, LayerNorm, MLP, with both residuals. head_dim 64, or 80 for ViT-H."""

from benchmarks.harness.measure import bench_op as bench_op  # what pytest runs with the workloads of OPS

OPS = ("block",)
