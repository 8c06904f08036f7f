"""Plans a step at many image sizes, patch sizes and batches from one trace on fake tensors.

Every extent in a ViT is a constant times powers of the sizes that grow: batch, side of the patch grid, tokens, relative
positions, patch. The step is traced at sizes whose prime factors occur in no width of the model; factorising the bytes
of an allocation then shows how it scales. At another size every allocation is evaluated, and the peak searched again.
Fused ops run again on tensors of the other size, because the number of their partial sums depends on it. The result is
exact if the step runs the same functions at both sizes. A batch of one needs its own trace: a sum over one image is a
view.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from fastvit.ops.runtime import registry
from fastvit.ops.runtime.backend import Path
from fastvit.ops.runtime.call import UNKEPT
from fastvit.study.memory.allocations import Allocations, OpTrace, TensorLayout, as_on
from fastvit.study.memory.plan import Parts, trace_step
from fastvit.study.memory.step import Setting
from fastvit.study.sources.model_source import ModelSource

_PRIMES = (17, 19, 23, 29, 31, 37, 41, 43, 47)


class StepSizes(NamedTuple):
    """Sizes of a step. All images and patches are square. A trace of one image scales to one image only.

    Attributes:
        batch: images.
        side: patches down and across.
        prefix: tokens before the patches.
        patch: pixels of a patch down and across.
    """

    batch: int
    side: int
    prefix: int
    patch: int

    def grow(self) -> tuple[int, ...]:
        """Return the numbers that extents grow with: batch, side, patches + 1 (positions of CLS and patches where
        registers have none), all tokens, relative positions (BEiT's and timm's table), and, last because it may share
        primes with the others, the patch."""
        patches = self.side**2
        relative = (2 * self.side - 1) ** 2 + 3 * self.prefix
        return self.batch, self.side, patches + 1, patches + self.prefix, relative, self.patch


def sizes_to_trace(model: nn.Module, prefix: int, patch: int | None = None) -> StepSizes:
    """Return sizes of which each has a prime factor that divides no extent of a parameter and none of the others.

    Args:
        prefix: tokens before the patches.
        patch: the only patch size to plan for; None for any.

    Raises:
        ValueError: the model's widths have too many primes.
    """
    extents = {extent for p in model.parameters() for extent in p.shape if extent}

    def free(prime: int) -> bool:
        return prime >= _PRIMES[0] and not any(extent % prime == 0 for extent in extents)

    for side, batch, pixels in itertools.product(reversed(_PRIMES), _PRIMES, _PRIMES if patch is None else (patch,)):
        at = StepSizes(batch, side, prefix, pixels)
        grow = set(at.grow()[:-1] if patch else at.grow())
        if prefix == 0:
            grow.discard(side * side)  # all its primes are the side's
        if len({side, batch, pixels}) == 3 and all(
            any(free(prime) for prime in _primes(n) if not any(m % prime == 0 for m in grow - {n})) for n in grow
        ):
            return at
    raise ValueError(f"no sizes to trace {type(model).__name__} at: its widths have all primes of {_PRIMES}")


class TracedStep:
    """Plan one provider's step for any batch and any square image and patch, from one trace.

    Args:
        at: the sizes of the trace.
        gpu: plan for a GPU.
        runs: `self.runs` of another TracedStep, to share its runs of fused ops: training and inference run most of
            them on the same arguments.
    """

    def __init__(
        self, source: ModelSource, provider: str, setting: Setting, at: StepSizes, *, gpu: bool,
        runs: dict[Any, _OpRun] | None = None,
    ) -> None:  # fmt: skip
        self.at, size = at, at.side * at.patch
        self.seen, self.begin, _, groups = trace_step(
            source, provider, (size, size), at.batch, setting, gpu=gpu, patch_size=(at.patch, at.patch)
        )
        self.powers = np.array([_powers(b.asked, at.grow()) for b in self.seen.storages]).T
        self.part = np.full(len(self.seen.storages), len(groups))  # temporaries, which have no group
        for i, group in reversed(list(enumerate(groups.values()))):
            self.part[list(group)] = i
        self.number = np.array([number for number, _ in self.seen.events])
        self.sign = np.array([1 if came else -1 for _, came in self.seen.events])
        # every fused op, its number in `distinct`, and the events while it ran that released older storages
        self.ops: list[tuple[OpTrace, int, np.ndarray]] = []
        self.distinct: dict[tuple[Any, ...], int] = {}  # ops with different arguments; the model's blocks share them
        for op in self.seen.ops if gpu else ():
            key = op.op, op.leaves, op.nested
            within = np.arange(*op.events)
            older = within[self.number[within] < op.storages[0]]
            self.ops.append((op, self.distinct.setdefault(key, len(self.distinct)), older))
        self.runs = {} if runs is None else runs  # several image and patch sizes have the same number of tokens

    def parts(self, image_size: int, patch: int, batch: int) -> Parts:
        """Return what `plan` would. image_size and patch are pixels, image_size a multiple of patch."""
        grown = StepSizes(batch, image_size // patch, self.at.prefix, patch).grow()
        constant, *powers = self.powers
        asked = constant * np.prod([n**power for n, power in zip(grown, powers, strict=True)], 0)
        number, sign, asked = self._with_fused_ops(asked, grown)
        nbytes = self.seen.rounded(asked)
        held = np.cumsum(nbytes[number] * sign)
        until = self.begin + int(held[self.begin :].argmax()) + 1
        alive = np.bincount(number[:until], sign[:until], len(nbytes)) > 0
        part = np.pad(self.part, (0, len(nbytes) - len(self.part)), constant_values=len(fields(Parts)) - 1)
        return Parts(*(int(nbytes[alive & (part == p)].sum()) for p in range(len(fields(Parts)))))

    def _with_fused_ops(self, asked: np.ndarray, grown: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Put the events of the fused ops' runs at these sizes in place of the traced ones. Return storage and sign of
        all events, and the bytes of all storages. On a CPU there is nothing to replace: fused ops allocate like
        PyTorch's functions, and scale like them."""
        numbers, signs, nbytes, storages, done = [], [], [asked], len(asked), 0
        with as_on(self.seen.gpu):
            runs = [self._run_at(grown, *op) for op in self.distinct]
        for op, which, older in self.ops:
            found, (begin, end) = runs[which], op.events
            own = np.arange(storages, storages + len(found.asked))
            for new, traced in zip(found.outputs, op.outputs, strict=True):
                own[new], asked[traced] = traced, found.asked[new]
            numbers += [self.number[done:begin], own[found.number], self.number[older]]
            signs += [self.sign[done:begin], found.sign, self.sign[older]]
            nbytes.append(found.asked)
            storages, done = storages + len(found.asked), end
        numbers.append(self.number[done:])
        signs.append(self.sign[done:])
        return np.concatenate(numbers), np.concatenate(signs), np.concatenate(nbytes)

    def _run_at(self, grown: tuple[int, ...], op: Any, leaves: tuple[Any, ...], nested: TreeSpec) -> _OpRun:
        """Return the run of a fused op on its arguments at other sizes, from `self.runs` if it has one."""
        traced = self.at.grow()
        arguments = op, tuple(_scaled(x, traced, grown) for x in leaves), nested
        if arguments not in self.runs:
            self.runs[arguments] = _run_again(*arguments)
        return self.runs[arguments]


class _OpRun(NamedTuple):
    """The allocations of one fused op.

    Attributes:
        number, sign: storage of each event, and 1 or -1 for allocated or released.
        asked: bytes of each storage.
        outputs: the storages of its outputs.
    """

    number: np.ndarray
    sign: np.ndarray
    asked: np.ndarray
    outputs: list[int]


def _scaled(x: Any, traced: tuple[int, ...], grown: tuple[int, ...]) -> Any:
    """Return an argument of an op at other sizes. traced, grown: `StepSizes.grow` of the trace and of those."""
    if isinstance(x, TensorLayout):
        shape, stride = (tuple(_scaled(n, traced, grown) for n in extents) for extents in (x.shape, x.stride))
        return TensorLayout(shape, stride, x.dtype)
    if type(x) is not int:
        return x
    constant, *powers = _powers(x, traced)
    return constant * math.prod(map(pow, grown, powers))


def _run_again(op: Any, leaves: tuple[Any, ...], nested: TreeSpec) -> _OpRun:
    """Run a fused op again, within `as_on`, on meta tensors, which are faster to make than fake ones."""

    def leaf(x: Any) -> Any:
        return (
            torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta") if isinstance(x, TensorLayout) else x
        )

    seen = Allocations(gpu=True)
    arguments, keywords = tree_unflatten([leaf(x) for x in leaves], nested)
    first = max(seen.see((arguments, keywords))) + 1
    with seen:
        result = registry.IMPLEMENTATIONS[op](*arguments, call=UNKEPT[Path.TRITON], **keywords)
    outputs = [number - first for number in seen.see(result) if number >= first]
    events = [(number - first, 1 if came else -1) for number, came in seen.events if number >= first]
    number, sign = np.array(events, int).reshape(-1, 2).T
    return _OpRun(number, sign, np.array([storage.asked for storage in seen.storages[first:]], int), outputs)


@functools.cache
def _powers(n: int, grown: tuple[int, ...]) -> tuple[int, ...]:
    """Return (c, *powers) with n = c * product of grown[i] ** powers[i]."""
    found = []
    for value in grown:
        power = 0
        while value > 1 and n and n % value == 0:
            n //= value
            power += 1
        found.append(power)
    return n, *found


def _primes(n: int) -> set[int]:
    """Return the prime factors of n."""
    found, divisor = set(), 2
    while n > 1:
        while n % divisor == 0:
            found.add(divisor)
            n //= divisor
        divisor += 1
    return found
