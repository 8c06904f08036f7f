"""A torch that lacks private names which fastvit uses for speed still imports it and computes the same."""

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

NAME = "fastvit.ops.runtime.torch_private"
ROOT = Path(__file__).parents[2]


def results():
    """Run a model forward and backward, and single ops; return what they compute, and why forward-mode AD does not."""
    from fastvit import Block, ops

    torch.manual_seed(0)
    block = Block(32, 2, device="cpu").requires_grad_(True)
    x = torch.randn(2, 18, 32, requires_grad=True)
    y = ops.linear(block(x), torch.ones(8, 32), activation="gelu_tanh")
    y.square().sum().backward()
    with torch.no_grad():
        plain = ops.mlp(x, torch.ones(8, 32), None, torch.ones(32, 8), None, activation="gelu", residual=x)
        heads = ops.attention(*torch.randn(3, 2, 18, 2, 16))
    with torch.autocast("cpu", torch.bfloat16):
        cast = ops.linear(x, torch.ones(8, 32)).float()
    tensors = [y, x.grad, *(p.grad for p in block.parameters()), plain, heads, cast]
    forward_mode = pytest.raises(NotImplementedError, match="does not support forward-mode AD")
    with torch.autograd.forward_ad.dual_level(), forward_mode:
        ops.linear(torch.autograd.forward_ad.make_dual(x, x), torch.ones(8, 32))
    return [t.detach().numpy() for t in tensors]


def without(hidden):
    """Load torch_private.py before fastvit, as in a torch that lacks this name, or all of them for "all"."""
    spec = importlib.util.spec_from_file_location(NAME, ROOT / f"{NAME.replace('.', '/')}.py")
    module = importlib.util.module_from_spec(spec)
    module.getattr = lambda owner, name, default: (
        default if hidden in ("all", module.PATHS[-1]) else getattr(owner, name, default)
    )
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    assert [v for v in vars(module).values() if v is None or v is False]
    return results()


def in_a_process(hidden):
    code = f"import pickle, sys, test_private_names as t; sys.stdout.buffer.write(pickle.dumps(t.without({hidden!r})))"
    environment = {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "FASTVIT_BACKEND": "aten", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
    return pickle.loads(run.stdout)


def paths():
    """Return what is hidden, in turn. (A process that hides names imports this file before fastvit.)"""
    from fastvit.ops.runtime.torch_private import PATHS

    return ["all", *[pytest.param(path, marks=pytest.mark.nightly) for path in PATHS]]


@pytest.mark.parametrize("hidden", paths())
def test_without_private_names(hidden):
    for got, want in zip(in_a_process(hidden), results(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(abs(want).max()))
