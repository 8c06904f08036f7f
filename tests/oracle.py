"""The rule that every fused op is held to, against float64 and against eager PyTorch in the same dtype.

    err(fused) <= factor * err(eager) + floor        on the maximum and on the RMS; factor 2, or 3 for gradients

`floor` is one ulp of the output dtype, measured on the exact result, so that a case that eager happens to get exactly
right does not fail on a rounding. A NaN or Inf where the exact result is finite fails, and so does the reverse.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

GRADIENT = 3.0


def assert_as_accurate(got: Tensor, eager: Tensor, exact: Tensor, *, factor: float = 2.0, what: str = "") -> None:
    """got, eager: same shape and dtype; exact: float64, same shape."""
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    assert got.dtype == eager.dtype, f"{what}: dtype {got.dtype}, eager has {eager.dtype}"
    got, eager, exact = got.detach().cpu(), eager.detach().cpu(), exact.detach().cpu()
    if exact.numel() == 0:
        return
    finite = exact.isfinite()
    wrong = got.isfinite() != finite
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are finite on one side only"
    if not finite.any():
        return
    target = exact[finite].to(got.dtype)
    ulp = (torch.nextafter(target, torch.full_like(target, torch.inf)) - target).double()
    ulp = torch.where(ulp.isfinite(), ulp, ulp.new_zeros(()))
    error = (got[finite].double() - exact[finite]).abs()
    allowed = (eager[finite].double() - exact[finite]).abs()
    for norm, bound in ((_max, _max(allowed)), (_rms, _rms(allowed))):
        limit = factor * bound + norm(ulp)
        measured = norm(error)
        assert measured <= limit, (
            f"{what}: {norm.__name__[1:]} error {measured:.3g} > {limit:.3g} "
            f"(eager {bound:.3g}, ulp {norm(ulp):.3g}, factor {factor}); "
            f"worst at flat index {int(error.argmax())} of {tuple(got.shape)}"
        )


def _max(t: Tensor) -> float:
    return float(t.max())


def _rms(t: Tensor) -> float:
    return float(t.square().mean().sqrt())


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


def compare(
    fused: Callable[..., Any], eager: Callable[..., Any], tensors: dict[str, Tensor | None]
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Name, fused's, eager's in the same dtypes and eager's in float64: of every output ("output 0", ...) of
    function(**tensors), and of the gradient ("dx", ...) of every tensor that requires one, as their layouts are."""
    runs: list[tuple[tuple[Tensor, ...], dict[str, Tensor], list[Tensor]]] = []
    for function, dtype in ((fused, None), (eager, None), (eager, torch.float64)):
        arguments = {
            name: None if t is None else t.detach().to(dtype or t.dtype).requires_grad_(t.requires_grad)
            for name, t in tensors.items()
        }
        outputs = function(**arguments)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = {name: t for name, t in arguments.items() if t is not None and t.requires_grad}
        dout = [inputs("normal", *o.shape, dtype=o.dtype, device=o.device, seed=90 + i) for i, o in enumerate(outputs)]
        if runs:  # the rounded gradients of the first run, exactly
            dout = [g.to(o.dtype) for g, o in zip(runs[0][2], outputs, strict=True)]
        through = [(o, g) for o, g in zip(outputs, dout, strict=True) if o.requires_grad]
        gradients: tuple[Tensor, ...] = ()
        if wanted:
            gradients = torch.autograd.grad([o for o, _ in through], list(wanted.values()), [g for _, g in through])
        runs.append((outputs, dict(zip(wanted, gradients, strict=True)), dout))
    (got, got_gradients, _), (same, same_gradients, _), (exact, exact_gradients, _) = runs
    for i, triple in enumerate(zip(got, same, exact, strict=True)):
        yield f"output {i}", *triple
    for name in exact_gradients:
        yield f"d{name}", got_gradients[name], same_gradients[name], exact_gradients[name]


def assert_op_as_accurate(
    fused: Callable[..., Any], eager: Callable[..., Any], tensors: dict[str, Tensor | None], *, what: str = ""
) -> None:
    """Outputs and gradients of fused(**tensors) against eager in the same dtypes and in float64."""
    for name, *triple in compare(fused, eager, tensors):
        assert_as_accurate(*triple, factor=GRADIENT if name.startswith("d") else 2.0, what=f"{what} {name}")


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
