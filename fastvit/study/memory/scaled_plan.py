"""Plans of a step at many image sizes, patch sizes and batches from one run on fake tensors.

Every extent of a ViT is a constant times powers of what grows: the batch, the side of the patch grid, its tokens, its
relative positions, the patch. One step is traced where each of these has a prime that the model's own widths do not
have, so that dividing the bytes of an allocation by them tells its powers. At another size each is evaluated, and the
peak found again. Fused ops, whose kernels write partial sums of as many programs as they have, are run again on tensors
of the other size. All of it is exact where the step runs the same functions at both sizes. One image, a sum over which
is a view, wants a trace of its own."""

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
from fastvit.study.memory.allocations import Allocations, Call, Laid, as_on
from fastvit.study.memory.plan import Parts, Setting, run
from fastvit.study.sources.model_source import Subject

_PRIMES = (17, 19, 23, 29, 31, 37, 41, 43, 47)


class Sizes(NamedTuple):
    """Images, patches down and across, tokens before the patches, and pixels of a patch down and across, of a trace or
    of what it is scaled to. A trace of one image is scaled to one image only."""

    batch: int
    side: int
    prefix: int
    patch: int

    def grow(self) -> tuple[int, ...]:
        """What extents grow with: images, side, CLS and patches (positions, where registers have none), all tokens,
        relative positions (BEiT's and timm's table), and the patch, which comes last, as it may be no prime."""
        patches = self.side**2
        relative = (2 * self.side - 1) ** 2 + 3 * self.prefix
        return self.batch, self.side, patches + 1, patches + self.prefix, relative, self.patch


def traced_at(model: nn.Module, prefix: int, patch: int | None = None) -> Sizes:
    """Sizes of which each has a prime that divides no extent of a parameter and none of the others. patch: for plans at
    this one only; None for any."""
    extents = {extent for p in model.parameters() for extent in p.shape if extent}

    def free(prime: int) -> bool:
        return prime >= _PRIMES[0] and not any(extent % prime == 0 for extent in extents)

    for side, batch, pixels in itertools.product(reversed(_PRIMES), _PRIMES, _PRIMES if patch is None else (patch,)):
        at = Sizes(batch, side, prefix, pixels)
        grow = set(at.grow()[:-1] if patch else at.grow()) - (
            {side * side} if prefix == 0 else set()
        )  # which side tells
        if len({side, batch, pixels}) == 3 and all(
            any(free(prime) for prime in _primes(n) if not any(m % prime == 0 for m in grow - {n})) for n in grow
        ):
            return at
    raise ValueError(f"no sizes to trace {type(model).__name__} at: its widths have all primes of {_PRIMES}")


class ScaledPlan:
    """The plan of one provider's step, for square images and patches and batches of any number.

    Args:
        at: where it is traced.
        gpu: plan as on a GPU.
        runs: the fused ops that have been run, as `self.runs` of another plan has them. Training and inference run
            most ops on the same arguments.
    """

    def __init__(
        self, subject: Subject, provider: str, setting: Setting, at: Sizes, *, gpu: bool,
        runs: dict[Any, _Run] | None = None,
    ) -> None:  # fmt: skip
        self.at, size = at, at.side * at.patch
        self.seen, self.begin, _, groups = run(
            subject, provider, (size, size), at.batch, setting, gpu=gpu, patch_size=(at.patch, at.patch)
        )
        self.powers = np.array([_powers(b.asked, at.grow()) for b in self.seen.blocks]).T
        self.part = np.full(len(self.seen.blocks), len(groups))  # temporaries, which have no group
        for i, group in reversed(list(enumerate(groups.values()))):
            self.part[list(group)] = i
        self.number = np.array([number for number, _ in self.seen.events])
        self.sign = np.array([1 if came else -1 for _, came in self.seen.events])
        self.calls: list[tuple[Call, int, np.ndarray]] = []  # with its number in `distinct`, events of others within
        self.distinct: dict[tuple[Any, ...], int] = {}  # calls with other arguments; the blocks of a stack share them
        for call in self.seen.calls if gpu else ():
            key = call.op, call.leaves, call.nested
            within = np.arange(*call.events)
            of_others = within[self.number[within] < call.blocks[0]]  # blocks that went meanwhile
            self.calls.append((call, self.distinct.setdefault(key, len(self.distinct)), of_others))
        self.runs = {} if runs is None else runs  # at several image and patch sizes the tokens are the same

    def parts(self, image_size: int, patch: int, batch: int) -> Parts:
        """As `plan` has them. image_size, patch: pixels, one a multiple of the other."""
        grown = Sizes(batch, image_size // patch, self.at.prefix, patch).grow()
        constant, *powers = self.powers
        asked = constant * np.prod([n**power for n, power in zip(grown, powers, strict=True)], 0)
        number, sign, asked = self._with_calls(asked, grown)
        nbytes = self.seen.rounded(asked)
        held = np.cumsum(nbytes[number] * sign)
        until = self.begin + int(held[self.begin :].argmax()) + 1
        there = np.bincount(number[:until], sign[:until], len(nbytes)) > 0
        part = np.pad(self.part, (0, len(nbytes) - len(self.part)), constant_values=len(fields(Parts)) - 1)
        return Parts(*(int(nbytes[there & (part == p)].sum()) for p in range(len(fields(Parts)))))

    def _with_calls(self, asked: np.ndarray, grown: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Blocks and signs of all events, and the bytes of all blocks, with those of the fused ops' at these sizes.
        On a CPU they allocate as PyTorch's functions do, whose powers tell all."""
        numbers, signs, nbytes, blocks, done = [], [], [asked], len(asked), 0
        with as_on(self.seen.gpu):
            runs = [self._run_at(grown, *call) for call in self.distinct]
        for call, which, of_others in self.calls:
            found, (begin, end) = runs[which], call.events
            own = np.arange(blocks, blocks + len(found.asked))
            for mine, theirs in zip(found.outputs, call.outputs, strict=True):
                own[mine], asked[theirs] = theirs, found.asked[mine]
            numbers += [self.number[done:begin], own[found.number], self.number[of_others]]
            signs += [self.sign[done:begin], found.sign, self.sign[of_others]]
            nbytes.append(found.asked)
            blocks, done = blocks + len(found.asked), end
        numbers.append(self.number[done:])
        signs.append(self.sign[done:])
        return np.concatenate(numbers), np.concatenate(signs), np.concatenate(nbytes)

    def _run_at(self, grown: tuple[int, ...], op: Any, leaves: tuple[Any, ...], nested: TreeSpec) -> _Run:
        """Return the run of a fused op on its arguments at other sizes, from `self.runs` if it is there."""
        traced = self.at.grow()
        call = op, tuple(_scaled(x, traced, grown) for x in leaves), nested
        if call not in self.runs:
            self.runs[call] = _run_again(*call)
        return self.runs[call]


class _Run(NamedTuple):
    """A fused op's events by block, the bytes of its blocks, and which its outputs are."""

    number: np.ndarray
    sign: np.ndarray
    asked: np.ndarray
    outputs: list[int]


def _scaled(x: Any, traced: tuple[int, ...], grown: tuple[int, ...]) -> Any:
    """Return an argument of an op at other sizes. traced, grown: what extents grow with, where it was and there."""
    if isinstance(x, Laid):
        shape, stride = (tuple(_scaled(n, traced, grown) for n in extents) for extents in (x.shape, x.stride))
        return Laid(shape, stride, x.dtype)
    if type(x) is not int:
        return x
    constant, *powers = _powers(x, traced)
    return constant * math.prod(map(pow, grown, powers))


def _run_again(op: Any, leaves: tuple[Any, ...], nested: TreeSpec) -> _Run:
    """Run a fused op again, within `as_on`. On meta tensors, which are faster to make than fake ones."""

    def leaf(x: Any) -> Any:
        return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta") if isinstance(x, Laid) else x

    seen = Allocations(gpu=True)
    arguments = tree_unflatten([leaf(x) for x in leaves], nested)
    first = max(seen.see(arguments)) + 1
    with seen:
        result = registry.IMPLEMENTATIONS[op](*arguments, backend="triton")
    outputs = [number - first for number in seen.see(result) if number >= first]
    events = [(number - first, 1 if came else -1) for number, came in seen.events if number >= first]
    number, sign = np.array(events, int).reshape(-1, 2).T
    return _Run(number, sign, np.array([block.asked for block in seen.blocks[first:]], int), outputs)


@functools.cache
def _powers(n: int, grown: tuple[int, ...]) -> tuple[int, ...]:
    """Constant, and the powers of what grows."""
    found = []
    for value in grown:
        power = 0
        while value > 1 and n and n % value == 0:
            n //= value
            power += 1
        found.append(power)
    return n, *found


def _primes(n: int) -> set[int]:
    """Those that divide n."""
    found, divisor = set(), 2
    while n > 1:
        while n % divisor == 0:
            found.add(divisor)
            n //= divisor
        divisor += 1
    return found
