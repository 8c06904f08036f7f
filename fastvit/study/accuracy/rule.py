"""The rule that every fused op is held to, against float64 and against eager PyTorch in the same dtype.

    err(fused) <= factor * err(eager) + ulp        on the maximum and on the RMS; factor 2, or 3 for gradients

`ulp` is the spacing of the output's dtype at the exact result, so that a case that eager happens to get exactly right
does not fail on a rounding. A NaN or Inf where the exact result is finite breaks the rule, and so does the reverse. As
one number the rule is `Error.ratio(factor) <= factor`. Tests, benchmarks and `verify` take it from here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

OUTPUT, GRADIENT = 2.0, 3.0  # the factors
DRAWS = 4


class Error(NamedTuple):
    """A tensor's error in one norm ("max" or "rms"): the measured one, eager's, and an ulp."""

    norm: str
    measured: float
    eager: float
    ulp: float

    @classmethod
    def pooled(cls, several: Sequence[Error]) -> Error:
        """Join the errors of tensors of one size and norm, as if they were one tensor."""
        columns = zip(*(error[1:] for error in several), strict=True)
        if several[0].norm == "max":
            return cls("max", *map(max, columns))
        return cls("rms", *(math.sqrt(sum(x * x for x in column) / len(several)) for column in columns))

    def limit(self, factor: float) -> float:
        return factor * self.eager + self.ulp

    def ratio(self, factor: float) -> float:
        """Return measured / (eager + ulp / factor): 1.0 is as accurate as eager, `factor` is the limit."""
        scale = self.eager + self.ulp / factor
        return self.measured / scale if scale else 0.0 if self.measured == 0 else float("inf")


_NORMS: dict[str, Callable[[Tensor], float]] = {
    "max": lambda t: float(t.abs().max()),
    "rms": lambda t: float(t.square().mean().sqrt()),
}


def errors(got: Tensor, eager: Tensor, exact: Tensor) -> tuple[Error, ...]:
    """Return the errors in both norms, over the elements that are finite in the exact result and in eager's: where
    eager overflows, its error measures nothing. Return () if there is no such element.

    got, eager: one dtype; exact: float64, of got's shape.

    Raises:
        ValueError: another shape or dtype.
    """
    if got.shape != exact.shape or got.dtype != eager.dtype:
        raise ValueError(f"got {tuple(got.shape)} {got.dtype}, exact {tuple(exact.shape)}, eager {eager.dtype}")
    finite = exact.isfinite() & eager.isfinite()
    got, eager, exact = got.detach()[finite], eager.detach()[finite], exact.detach()[finite]
    if exact.numel() == 0:
        return ()
    of_got, of_eager, spacing = got.double() - exact, eager.double() - exact, ulp(exact, got.dtype)
    return tuple(Error(name, norm(of_got), norm(of_eager), norm(spacing)) for name, norm in _NORMS.items())


def misplaced(got: Tensor, exact: Tensor) -> int:
    """Count the elements that are finite on one side only."""
    return int((got.isfinite() != exact.isfinite()).sum())


def ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the spacing of the dtype at these values. torch.nextafter knows no float16 on a GPU."""
    limits = torch.finfo(dtype)
    _, exponent = torch.frexp(exact.to(dtype).double().abs().clamp(limits.tiny, limits.max))
    return limits.eps * torch.exp2(exponent.double() - 1)


class Compared(NamedTuple):
    """One result ("output 0") or gradient ("dx"): fastvit's, eager's in the same dtypes, and eager's in float64."""

    name: str
    got: Tensor
    eager: Tensor
    exact: Tensor

    @property
    def factor(self) -> float:
        return GRADIENT if self.name.startswith("d") else OUTPUT


def compared(kind: str, *runs: Sequence[Tensor]) -> Iterator[Compared]:
    """Pair the tensors of three runs, fused, eager and exact. kind: "output " or "d"; a number follows."""
    for i, triple in enumerate(zip(*runs, strict=True)):
        yield Compared(f"{kind}{i}", *triple)


def pooled_ratios(compared: Callable[[int], Iterable[Compared]], draws: int = DRAWS) -> dict[str, float]:
    """Return the error ratios by name, of the first draw, or of all draws together where the first one misses the rule.
    Errors have long tails: one element of a hundred thousand may be unlucky, in fused and in eager.

    compared: a function of the draw's number, from 0, that yields what is compared.
    """
    found: dict[str, list[tuple[Error, ...]]] = {}
    for draw in range(draws):
        ratios, holds = {}, True
        for one in compared(draw):
            found.setdefault(one.name, []).append(errors(one.got, one.eager, one.exact))
            pooled = map(Error.pooled, zip(*found[one.name], strict=True))
            ratio = max((error.ratio(one.factor) for error in pooled), default=0.0)
            ratios[one.name] = math.inf if misplaced(one.got, one.exact) else ratio
            holds &= ratios[one.name] <= one.factor
        if (draw == 0 and holds) or math.inf in ratios.values():
            break
    return ratios


def compare(
    fused: Callable[..., Any],
    eager: Callable[..., Any],
    tensors: Mapping[str, Tensor | None],
    within: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[Compared]:
    """Yield every output of function(**tensors), and the gradient of every tensor that requires one. Tensors keep their
    layouts. within: the context of fused, forward and backward."""
    runs: list[tuple[tuple[Tensor, ...], dict[str, Tensor], list[Tensor]]] = []
    for function, dtype in ((fused, None), (eager, None), (eager, torch.float64)):
        arguments = {
            name: None if t is None else t.detach().to(_computed(t, dtype)).requires_grad_(t.requires_grad)
            for name, t in tensors.items()
        }
        with contextlib.nullcontext() if runs else within():
            # the first run draws the outputs' gradients; the others take the same numbers
            runs.append(_run(function, arguments, runs[0][2] if runs else None))
    outputs, gradients, _ = zip(*runs, strict=True)
    yield from compared("output ", *outputs)
    for name in gradients[0]:
        yield Compared(f"d{name}", *(found[name] for found in gradients))


def _run(
    function: Callable[..., Any], arguments: Mapping[str, Tensor | None], dout: Sequence[Tensor] | None
) -> tuple[tuple[Tensor, ...], dict[str, Tensor], list[Tensor]]:
    """Return outputs, gradients by name, and the gradients of the outputs."""
    wanted = {name: t for name, t in arguments.items() if t is not None and t.requires_grad}
    outputs = function(**arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    drawn = dout or [gradient(o, seed=90 + i) for i, o in enumerate(outputs)]
    drawn = [g.to(o.dtype) for g, o in zip(drawn, outputs, strict=True)]
    if not wanted:
        return outputs, {}, drawn
    through = [(o, g) for o, g in zip(outputs, drawn, strict=True) if o.requires_grad]
    found = torch.autograd.grad([o for o, _ in through], list(wanted.values()), [g for _, g in through])
    return outputs, dict(zip(wanted, found, strict=True)), drawn


def _computed(t: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and t.is_floating_point() else t.dtype


def gradient(out: Tensor, seed: int) -> Tensor:
    """Draw random normal numbers on the CPU, the same for every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype).to(out.device)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill all fresh memory with NaN, so that an element that was never written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
