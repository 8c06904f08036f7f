"""Every workload of harness/workloads.txt: ops, a transformer block, whole models of the zoo and of other libraries,
and how memory grows with tokens, from N = 197 to 4097.

Models run on photographs. Those of other libraries run untouched, as `sdpa`, which is what they call, and with
`fastvit.accelerate`. The memory study is of training steps only and no study of time: eager keeps N x N probabilities
for backward, fastvit O(N), and the exponents are fitted under the table.
"""

from benchmarks.harness.measure import Measure
from benchmarks.harness.workloads import Workload


def bench_workload(measure: Measure, workload: Workload, mode: str) -> None:
    measure(workload, mode)
