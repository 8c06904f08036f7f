"""Softmax attention on packed qkv or on q, k and v, read by stride, with and without a mask; within sequences of
several lengths; and with the norm and projections around it."""

from benchmarks.harness.measure import bench_op as bench_op  # what pytest runs with the workloads of OPS

OPS = ("attention", "attention_varlen", "layer_norm_attention")
