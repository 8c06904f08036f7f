"""Strategies for `test_fuzz.py`: tensors of any dtype and layout, some left out, some without a gradient."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from oracle import compare, inputs
from torch import Tensor

pytest.importorskip("hypothesis")  # a machine with a GPU may lack it
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FASTVIT_FUZZ", "0"))
fuzz = settings(
    max_examples=EXAMPLES or 8,  # the interpreter is slow, and a GPU compiles for every case
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def _gaps(t: Tensor) -> Tensor:
    """Put NaN between the elements of the last dimension."""
    return torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0]


def _padded(t: Tensor, dim: int) -> Tensor:
    """Put NaN before and after, along dim."""
    return torch.cat([torch.full_like(t, torch.nan), t, torch.full_like(t, torch.nan)], dim).narrow(
        dim, t.shape[dim], t.shape[dim]
    )


def _swapped(t: Tensor, dim: int) -> Tensor:
    """Swap dim and the last dimension in memory."""
    return t.transpose(dim, -1).contiguous().transpose(dim, -1)


def _odd_ones(t: Tensor) -> Tensor:
    """Give dimensions of one element meaningless strides."""
    return t.as_strided(t.shape, [77777 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "gaps": _gaps,
    "last padded": lambda t: _padded(t, -1),
    "first padded": lambda t: _padded(t, 0),
    "second padded": lambda t: _padded(t, min(1, t.dim() - 1)),
    "first swapped": lambda t: _swapped(t, 0),
    "second swapped": lambda t: _swapped(t, min(1, t.dim() - 1)),
    "expanded": lambda t: t[:1].expand(t.shape),
    "odd ones": _odd_ones,
}
# applied to an op's output, so that the gradient arrives in another layout
RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda y: y,
    "transposed": lambda y: y.transpose(0, -1),
    "summed": lambda y: y.sum(0),  # a gradient of stride 0
    "halved": lambda y: y[..., y.shape[-1] // 2 :],
}


@dataclass(frozen=True)
class Input:
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    wanted: bool  # its gradient

    def make(self, name: str, seed: int, device: torch.device) -> Tensor:
        t = inputs("normal", *self.shape, dtype=torch.float64, device=device, seed=seed)
        if name.endswith("weight") and t.dim() > 1:
            t = t * math.prod(self.shape[1:]) ** -0.5
        return LAYOUTS[self.layout](t.to(self.dtype)).detach().requires_grad_(self.wanted)


@dataclass(frozen=True)
class Case:
    tensors: dict[str, Input | None]
    result: str
    options: dict[str, Any]

    def check(self, fused: Callable[..., Any], eager: Callable[..., Any], device: torch.device, **only: Any) -> None:
        def run(function: Callable[..., Any], more: dict[str, Any], **tensors: Any) -> Any:
            outputs = function(**tensors, **self.options, **more)
            result = RESULTS[self.result]
            return tuple(map(result, outputs)) if isinstance(outputs, tuple) else result(outputs)

        made = {n: t and t.make(n, seed, device) for seed, (n, t) in enumerate(self.tensors.items())}
        for compared in compare(partial(run, fused, only), partial(run, eager, {}), made):
            assert_right(*compared)


def assert_right(name: str, got: Tensor, same: Tensor, exact: Tensor) -> None:
    """|got - exact| <= 8 (|same - exact| + eps |exact|), each the largest of a tensor; same is eager's in got's dtype.
    Every one of the few roundings on the way is at most half an eps of what is rounded; where that is larger than the
    result, so is eager's error. An element from the wrong place is off by about |exact|: 16 times the bound in
    bfloat16, 128 times in float16."""
    assert (got.shape, got.dtype) == (exact.shape, same.dtype), name
    if got.numel():
        size, error, allowed = (t.detach().abs().max().item() for t in (exact, got - exact, same - exact))
        limit = 8 * (allowed + torch.finfo(got.dtype).eps * size)
        assert error <= limit, f"{name}: off by {error:.3g} of {size:.3g}, eager by {allowed:.3g}"


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
BATCH, TOKENS, WIDTH = st.integers(0, 4), st.integers(1, 40), st.integers(1, 80)
BATCHED = st.one_of(st.tuples(BATCH, TOKENS), st.tuples(BATCH), st.tuples(BATCH, st.integers(1, 6), st.integers(1, 6)))
LEADING = st.one_of(BATCHED, st.just(()))
# Before a LayerNorm neither rows of one element nor an expanded vector: a row of equal elements minus its mean is
# rounding alone.
NORMED, NORMED_WIDTH = BATCHED, st.integers(2, 80)


@st.composite
def case(
    draw: st.DrawFn,
    shapes: dict[str, tuple[int, ...]],
    optional: str = "",
    mixed: str = "residual row_scale",
    **options: st.SearchStrategy[Any],
) -> Case:
    """Draw tensors of these shapes in one dtype; those in `mixed` in any dtype. optional: names that may be left
    out."""
    dtype = draw(DTYPES)
    tensors: dict[str, Input | None] = {}
    for name, shape in shapes.items():
        if name in optional.split() and draw(st.booleans()):
            tensors[name] = None
        else:
            its_dtype = draw(DTYPES) if name in mixed.split() else dtype
            layout, wanted = draw(st.sampled_from(list(LAYOUTS))), draw(st.booleans())
            wanted = wanted and name != "row_scale"  # not differentiated
            tensors[name] = Input(shape, its_dtype, layout, wanted)
    return Case(tensors, draw(st.sampled_from(list(RESULTS))), {n: draw(option) for n, option in options.items()})


def fuzzed(
    cases: st.SearchStrategy[Case],
    fused: Callable[..., Any],
    eager: Callable[..., Any],
    **only: st.SearchStrategy[Any],
) -> Callable[..., None]:
    """Return the test of an op. only: options of fused that change no result."""

    @fuzz
    @given(cases, st.fixed_dictionaries(only))
    def test(backend: str, device: torch.device, case: Case, only: dict[str, Any]) -> None:
        case.check(fused, eager, device, **only)

    return test


def branch(leading: tuple[int, ...], out: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a branch's scales and its residual."""
    shapes = {"layer_scale": (out,), "residual": (*leading, out)}
    return shapes | ({"row_scale": leading[:1]} if leading else {})


def of_a_kind(draw: st.DrawFn, found: Case, bias: str = "norm_bias") -> Case:
    """Choose the kind of the norm, and whether a LayerNorm has its bias, which has that name."""
    norm = draw(st.sampled_from(["layer", "rms"]))
    without = {bias: None} if norm == "rms" or draw(st.booleans()) else {}
    return Case(found.tensors | without, found.result, found.options | {"norm": norm})


def without_equal_rows(found: Case, *names: str) -> Case:
    """Make those of the tensors contiguous that were expanded along the first dimension."""
    for name in names:
        t = found.tensors.get(name)
        if t is not None and t.layout == "expanded":
            found.tensors[name] = replace(t, layout="contiguous")
    return found
