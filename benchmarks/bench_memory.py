"""How memory grows with tokens: a training step of attention and of a block, from N = 197 to 4097.

Eager keeps N x N probabilities for backward; fused keeps O(N). The exponents are fitted under the table. This is no
study of time. Agreement with float64 is checked at the same N, on one head.
"""

from benchmarks.harness.measure import bench_op as bench_op  # what pytest runs with the workloads of OPS

OPS = ("memory, attention", "memory, block")
MODES = ("training",)
