"""LayerNorm and RMSNorm, and LayerNorm of a residual sum with LayerScale. Neither has an SDPA variant."""

from benchmarks.harness.measure import bench_op as bench_op  # what pytest runs with the workloads of OPS

OPS = ("layer_norm", "add_layer_norm")
