"""Every op, and a transformer block: attention with and without a mask, within sequences of several lengths, and with
the norm and the projections around it; norms, with a residual sum, of q and k, rotary positions; linear layers and the
MLP; patch embedding."""

from benchmarks.harness.measure import bench_op as bench_op  # what pytest runs with the workloads of OPS
from benchmarks.harness.providers import OPS as ALL

OPS = tuple(op for op in ALL if op not in ("model", "accelerate") and not op.startswith("memory"))
