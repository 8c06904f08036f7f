"""Linear layers and the MLP: fc1 + GELU, LayerNorm + qkv, fc1 to fc2, and that with its norm and residual."""

from benchmarks.harness.measure import bench_op as bench_op  # what pytest runs with the workloads of OPS

OPS = ("linear", "layer_norm_linear", "mlp", "layer_norm_mlp")
