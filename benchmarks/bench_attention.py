"""Softmax attention on packed qkv or on q, k and v, read by stride; and with the norm and projections around it."""

from benchmarks.harness.measure import bench_op as bench_op  # what pytest runs with the workloads of OPS

OPS = ("attention", "layer_norm_attention")
