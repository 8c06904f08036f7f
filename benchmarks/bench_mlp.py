"""The MLP and its parts: fc1 + GELU, both layers, and both with the LayerNorm before and the residual after them."""

from benchmarks.harness.measure import bench_op as bench_op  # what pytest runs with the workloads of OPS

OPS = ("linear", "mlp", "layer_norm_mlp")
