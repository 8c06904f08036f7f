"""Two block ops whose calls are planned, and what tells a planned call from the first of its kind."""

import contextlib
import sys
from unittest import mock

import torch
from op_cases import ROWS

from fastvit import ops
from fastvit.ops.runtime import plans

B, N, D = 2, 16, 16  # a mask's rows are then read in place
NODES = [name for name in ROWS if name.startswith(("layer_norm_attention", "mlp", "layer_norm_mlp"))]
MODULES = [sys.modules[f"fastvit.ops.block.{name}"] for name in ("attention", "mlp", "gated_mlp")]  # not the ops


@contextlib.contextmanager
def uncached():
    """Recall nothing within the context."""
    with contextlib.ExitStack() as stack:
        for module in MODULES:
            stack.enter_context(mock.patch.object(module, "recall", return_value=plans.AFRESH))
        yield


@contextlib.contextmanager
def counted():
    """Yields the number of calls that took an earlier one's plans, when left."""
    count = []
    original = plans._Again.__init__

    def counting(self, found):
        count.append(1)
        original(self, found)

    with mock.patch.object(plans._Again, "__init__", counting):
        yield count


def call(x, weights, **options):
    return ops.layer_norm_mlp(x, *weights, **({"residual": x} | options))


def x_of(device, *shape, dtype=torch.float32):
    return torch.randn(*shape, device=device).to(dtype)


def attended(x, weights, heads, **options):
    return ops.layer_norm_attention(x, *weights[:2], *heads, 1, **options)
