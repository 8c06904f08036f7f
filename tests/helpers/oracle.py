"""The rule of `fastvit.study.accuracy.rule` as assertions, and the data that tests hold ops against it with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastvit.study.accuracy.rule import GRADIENT, OUTPUT, compare, errors, misplaced

__all__ = [
    "GRADIENT",
    "assert_as_accurate",
    "assert_op_as_accurate",
    "assert_op_is_exact",
    "compare",
    "inputs",
]


def assert_as_accurate(got: Tensor, eager: Tensor, exact: Tensor, *, factor: float = OUTPUT, what: str = "") -> None:
    """got, eager: same shape and dtype; exact: float64, same shape."""
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    assert got.dtype == eager.dtype, f"{what}: dtype {got.dtype}, eager has {eager.dtype}"
    got, eager, exact = got.detach().cpu(), eager.detach().cpu(), exact.detach().cpu()
    wrong = misplaced(got, exact)
    assert not wrong, f"{what}: {wrong} of {got.numel()} elements are finite on one side only"
    for error in errors(got, eager, exact):
        limit = error.limit(factor)
        assert error.measured <= limit, (
            f"{what}: {error.norm} error {error.measured:.3g} > {limit:.3g} "
            f"(eager {error.eager:.3g}, ulp {error.ulp:.3g}, factor {factor}); "
            f"worst at flat index {int((got.double() - exact).nan_to_num().abs().argmax())} of {tuple(got.shape)}"
        )


def inputs(kind: str, *shape: int, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Tensor:
    """Random test data: "normal"; "integer" (sparse small integers, exact in every dtype); "large" (normal, times 8);
    "offset" (mean 1000, spread 1)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "integer":
        x = (x * 1.2).trunc().clamp(-2, 2)
    elif kind == "large":
        x = x * 8
    elif kind == "offset":
        x = x + 1000
    elif kind != "normal":
        raise ValueError(f"unknown kind of input {kind!r}")
    return x.to(dtype).to(device)


def assert_op_as_accurate(
    fused: Callable[..., Any], eager: Callable[..., Any], tensors: dict[str, Tensor | None], *, what: str = ""
) -> None:
    """Outputs and gradients of fused(**tensors) against eager in the same dtypes and in float64."""
    for one in compare(fused, eager, tensors):
        assert_as_accurate(one.got, one.eager, one.exact, factor=one.factor, what=f"{what} {one.name}")


def assert_op_is_exact(
    fused: Callable[..., Any], eager: Callable[..., Any], tensors: dict[str, Tensor | None], dout: Tensor | None = None
) -> None:
    """Output and gradients of small integers, whose sums no order of summation rounds. dout: in a layout of its own."""
    got, want = fused(**tensors), eager(**tensors)
    assert torch.equal(got, want)
    assert got.is_contiguous()
    wanted = [t for t in tensors.values() if t is not None]
    dout = inputs("integer", *got.shape, dtype=got.dtype, device=got.device, seed=9) if dout is None else dout
    gradients = torch.autograd.grad(got, wanted, dout), torch.autograd.grad(want, wanted, dout.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
