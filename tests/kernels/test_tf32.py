"""float32 tensors under matmul precision "high", where tensor cores take TF32 operands: they cut off all but ten bits
of the mantissa. An operand becomes smaller by up to 2^-10 of itself, a product by up to 2^-9, so for a matmul

    |error| <= 2^-9 |a| |b|^T + error of float32 sums

The interpreter's `tl.dot` does the same (interpreter_shim.py); GPUs may round, which is better than the bound.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastvit import ops
from fastvit.reference.ops import attention as eager_attention

PRODUCT = 2.0**-9
SUM = 2.0**-19  # error of a hundred float32 additions in any order, in units of |a| |b|^T

pytestmark = pytest.mark.usefixtures("triton_backend")


def normal(*shape: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def excess(function: Callable[[], Tensor], exact: Tensor, scale: Tensor, precision: str) -> float:
    """Return the largest error in units of `scale`."""
    torch.set_float32_matmul_precision(precision)
    return float(((function().detach().double() - exact).abs() / scale).max())


def assert_bounds(function: Callable[[], Tensor], exact: Tensor, scale: Tensor, *, bound: float = PRODUCT) -> None:
    """Check that the error is that of TF32 with "high", and that of float32 with "highest". scale: |a| |b|^T."""
    assert 2.0**-15 < excess(function, exact, scale, "high") <= bound + SUM
    assert excess(function, exact, scale, "highest") <= SUM


# Functions of x (70, 100) and w (66, 100) that are x w^T. With relu and positive pre-activations the derivative is 1;
# with a gate of 1, h is the value and its gradient that of h.
OPS = torch.ops.fastvit
MATMULS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": ops.linear,
    "linear_dact": lambda x, w: OPS.linear_dact(x, w.T.contiguous(), x.new_ones(70, 66), "relu")[0],
    "gated": lambda x, w: OPS.linear_act_fwd(x, torch.zeros_like(w), x.new_ones(66), "relu", w)[0],
    "gated, pre": lambda x, w: OPS.linear_act_fwd(x, w, None, "relu", w)[1][:, :66],
    "gated_dact": lambda x, w: OPS.linear_dact(x, w.T.contiguous(), x.new_ones(70, 132), "relu")[0][:, 66:],
}


def test_linear(device: torch.device) -> None:
    x, w = normal(70, 100, seed=1, device=device), normal(66, 100, seed=2, device=device)
    exact, scale = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    for matmul in MATMULS.values():
        assert_bounds(lambda matmul=matmul: matmul(x, w), exact, scale)


def test_patch_embed(device: torch.device) -> None:
    image = normal(2, 3, 16, 16, seed=1, device=device).requires_grad_()
    w = normal(24, 3, 8, 8, seed=2, device=device).requires_grad_()
    dout = normal(2, 4, 24, seed=3, device=device)
    patches = torch.nn.functional.unfold(image.detach().double(), 8, stride=8).transpose(1, 2)  # [2, 4, K]
    rows, weight, grad = patches.reshape(8, -1), w.detach().double().flatten(1), dout.double().view(8, 24)

    def scattered(x: Tensor) -> Tensor:  # [8, K] -> an image
        return torch.nn.functional.fold(x.view(2, 4, -1).transpose(1, 2), 16, 8, stride=8)

    def gradient(i: int) -> Tensor:
        return torch.autograd.grad(ops.patch_embed(image, w, None), (image, w), dout)[i]

    exact, scale = rows @ weight.T, rows.abs() @ weight.abs().T
    assert_bounds(lambda: ops.patch_embed(image, w, None).view(8, 24), exact, scale)
    assert_bounds(lambda: gradient(0), scattered(grad @ weight), scattered(grad.abs() @ weight.abs()))
    assert_bounds(lambda: gradient(1).flatten(1), grad.T @ rows, grad.abs().T @ rows.abs())


def test_attention(device: torch.device) -> None:
    """Errors of e in the scores change a probability by a factor up to exp(2 e); its product with a value adds 2^-9."""
    q, k, v = (normal(1, 70, 1, 32, seed=i, device=device) for i in range(3))
    heads = [t.double().transpose(1, 2) for t in (q, k, v)]
    off = PRODUCT * 32**-0.5 * float((heads[0].abs() @ heads[1].abs().transpose(2, 3)).max())
    p = torch.softmax(heads[0] @ heads[1].transpose(2, 3) * 32**-0.5, -1)
    scale = (p @ heads[2].abs()).transpose(1, 2)
    exact = eager_attention(q.double(), k.double(), v.double())
    bound = float(torch.tensor(2 * off).exp()) * (1 + PRODUCT) - 1
    assert_bounds(lambda: ops.attention(q, k, v), exact, scale, bound=bound)
