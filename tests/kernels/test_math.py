"""kernels/_math.py against float64: activations and their derivatives, in the form of 16 bits and of float32."""

import importlib.util
import math

import pytest
import torch
from oracle import assert_as_accurate

from fastvit.ops.runtime.activations import ACTIVATIONS

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton
import triton.language as tl

from fastvit.kernels._math import activate, activate_with_grad
from fastvit.reference import ops as formulas

# from numpy, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")


@triton.jit
def activation_kernel(x_ptr, value_ptr, again_ptr, grad_ptr, NAME: tl.constexpr, EXACT: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i).to(tl.float32)
    value, grad = activate_with_grad(x, NAME, EXACT)
    tl.store(value_ptr + i, activate(x, NAME, EXACT))
    tl.store(again_ptr + i, value)
    tl.store(grad_ptr + i, grad)


def run(name, x, exact):
    """Return act(x) alone, act(x) with its derivative, and the derivative: float32, not rounded to x's dtype."""
    padded = torch.zeros(1 << (x.numel() - 1).bit_length(), dtype=x.dtype, device=x.device)
    padded[: x.numel()] = x
    outputs = [torch.empty_like(padded, dtype=torch.float32) for _ in range(3)]
    activation_kernel[(1,)](padded, *outputs, NAME=name, EXACT=exact, N=padded.numel())
    return [o[: x.numel()] for o in outputs]


def reference(name, x):
    """Return the activation in float64, without cancellation in its tail, and its derivative."""
    x = x.double().requires_grad_()
    value = {
        "gelu": lambda: 0.5 * x * torch.special.erfc(-x * math.sqrt(0.5)),
        "gelu_tanh": lambda: x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
        "quick_gelu": lambda: x * torch.sigmoid(1.702 * x),
        "relu": lambda: x.relu(),
        "silu": lambda: x * x.sigmoid(),
    }[name]()
    (derivative,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), derivative


def bfloat16_grid(limit):
    """Return every bfloat16 number in [-limit, limit]."""
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return numbers[numbers.abs() <= limit]


def bfloat16_ulps(got, exact):
    """Return the error in units of the last place of a bfloat16 at the exact value. Denormal results may be flushed to
    zero, as on GPUs."""
    smallest = torch.finfo(torch.float32).smallest_normal
    exponent = torch.floor(torch.log2(exact.abs().clamp_min(smallest)))
    error = (got.double() - exact).abs()
    return torch.where(exact.abs() < smallest, (error - smallest).clamp_min(0), error) / torch.exp2(exponent - 7)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_sixteen_bit_form_is_within_an_eighth_of_an_ulp(name, device):
    x = bfloat16_grid(40.0).to(device)
    assert x.numel() > 33_000
    value, again, grad = run(name, x, exact=False)
    exact, exact_grad = reference(name, x)
    # sigmoid(z) is 0 for z < -88, and with its derivative GELU's tail is not scaled; GELU alone is exact everywhere
    kept = exact.abs() > 1e-36
    everywhere = torch.ones_like(kept) if name in ("gelu", "relu") else kept
    for what, got, want in (
        ("value", value[everywhere], exact[everywhere]),
        ("value with its derivative", again[kept], exact[kept]),
        ("derivative", grad[kept], exact_grad[kept]),
    ):
        worst = bfloat16_ulps(got, want).max()
        assert worst < 0.125, f"{name} {what}: {worst:.3f} ulp"
    for got in (value, again, grad):
        assert not got[~kept & (x < -1)].abs().gt(1e-34).any()


def test_float32_form_is_as_accurate_as_eager(device):
    x = torch.linspace(-12, 12, 4096, device=device)
    for name, activation in formulas.ACTIVATIONS.items():
        exact, exact_grad = reference(name, x)
        leaf = x.clone().requires_grad_()
        eager = activation(leaf)
        (eager_grad,) = torch.autograd.grad(eager.sum(), leaf)
        value, again, grad = run(name, x, exact=True)
        assert_as_accurate(value, eager, exact, what=name)
        assert_as_accurate(again, eager, exact, what=name)
        assert_as_accurate(grad, eager_grad, exact_grad, what=f"{name}'s derivative")


@pytest.mark.parametrize("exact", [False, True], ids=["16bit", "float32"])
def test_special_values(exact, device):
    x = torch.tensor([torch.nan, torch.inf, 0.0, 1e30, -1e30], device=device)
    for name in ACTIVATIONS:
        value, again, grad = run(name, x, exact)
        for got in (value, again):
            assert got[0].isnan(), name
            assert torch.equal(got[1:], x[1:].clamp_min(0)), name
        assert abs(float(grad[2]) - (0.0 if name == "relu" else 0.5)) < (1e-6 if exact else 2e-4)
