"""ViTs of other libraries, untouched (as `sdpa`, which is what they run) and with `fastvit.accelerate`."""

import pytest

from benchmarks.harness.measure import bench_op as bench_op  # what pytest runs with the workloads of OPS
from benchmarks.harness.workloads import INSTALLED

OPS = ("accelerate",)

if not INSTALLED:
    pytest.skip("none of timm, torchvision and transformers is installed", allow_module_level=True)
