"""Plans of a step at many image sizes and batches from one run on fake tensors.

The bytes of every allocation of a ViT are a constant times powers of the batch B, of the side h of the patch grid, and
of the tokens N. One step is traced at a B, an h and an N with primes that the model's own widths do not have, so that
dividing a number by them tells its powers. At another size each is evaluated, and the peak found anew. Fused ops, whose
kernels write partial sums of as many programs as they have, are run again on fake tensors of the other size. All of it
is exact where the step runs the same functions at both sizes. One image, a sum over which is a view, wants a trace of
its own."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_unflatten

from fastvit.study._allocations import Allocations, Call, Sizes, as_on
from fastvit.study._plan import Parts, Setting, run
from fastvit.study._subject import Subject

_PRIMES = (17, 19, 23, 29, 31, 37, 41, 43, 47)


class Traced(NamedTuple):
    """At which sizes a step is traced: images, patches down and across, and tokens, one of whose prime factors is as
    good as their number; 0 for tokens that are the patches alone, and a batch of 1 for one image alone."""

    batch: int
    side: int
    tokens: int
    prime: int


def traced_at(model: nn.Module, prefix: int) -> Traced:
    """Sizes whose primes divide no extent of a parameter, nor each other."""
    extents = {extent for p in model.parameters() for extent in p.shape}
    free = [p for p in _PRIMES if not any(extent % p == 0 for extent in extents if extent)]
    for side in reversed(free):
        tokens = side * side + prefix
        prime = max(_factors(tokens)) if prefix else 0
        if prefix and (prime < _PRIMES[0] or any(extent % prime == 0 for extent in extents if extent)):
            continue
        for batch in free:
            if batch != side and (not prefix or tokens % batch):
                return Traced(batch, side, tokens if prefix else 0, prime)
    raise ValueError(f"no sizes to trace {type(model).__name__} at: its widths have all primes of {_PRIMES}")


class ScaledPlan:
    """The plan of one provider's step at one patch size, for square images and batches of any number; a trace of one
    image for one image only.

    Args:
        patch: pixels.
        prefix: tokens before the patches.
        gpu: plan as on a GPU.
    """

    def __init__(
        self, subject: Subject, provider: str, patch: int, setting: Setting, at: Traced, prefix: int, *, gpu: bool
    ) -> None:
        self.patch, self.prefix, self.at = patch, prefix, at
        size = at.side * patch
        self.seen, self.begin, _, groups = run(
            subject, provider, (size, size), at.batch, setting, gpu=gpu, patch_size=(patch, patch)
        )
        self.powers = np.array([_powers(b.asked, at) for b in self.seen.blocks]).T
        self.part = np.full(len(self.seen.blocks), len(groups))  # temporaries, which have no group
        for i, group in reversed(list(enumerate(groups.values()))):
            self.part[list(group)] = i
        self.number = np.array([number for number, _ in self.seen.events])
        self.sign = np.array([1 if came else -1 for _, came in self.seen.events])

    def parts(self, image_size: int, batch: int) -> Parts:
        """As `plan` has them. image_size: pixels, a multiple of the patch."""
        side = image_size // self.patch
        constant, *powers = self.powers
        sizes = batch, side, side * side + self.prefix
        asked = constant * np.prod([size**power for size, power in zip(sizes, powers, strict=True)], 0)
        number, sign, asked = self._with_calls(asked, sizes)
        nbytes = self.seen.rounded(asked)
        held = np.cumsum(nbytes[number] * sign)
        until = self.begin + int(held[self.begin :].argmax()) + 1
        there = np.bincount(number[:until], sign[:until], len(nbytes)) > 0
        part = np.pad(self.part, (0, len(nbytes) - len(self.part)), constant_values=len(fields(Parts)) - 1)
        return Parts(*(int(nbytes[there & (part == p)].sum()) for p in range(len(fields(Parts)))))

    def _with_calls(self, asked: np.ndarray, sizes: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Blocks and signs of all events, and the bytes of all blocks, with those of the fused ops' at these sizes.
        On a CPU they allocate as PyTorch's functions do, whose powers tell all."""
        numbers, signs, nbytes, blocks, done = [], [], [asked], len(asked), 0
        runs: dict[Any, _Run] = {}
        for call in self.seen.calls if self.seen.gpu else ():
            key = call.op, call.leaves, call.nested
            if key not in runs:
                runs[key] = _run_again(call, self.at, sizes)
            again, (begin, end) = runs[key], call.events
            own = np.arange(blocks, blocks + len(again.asked))
            for mine, theirs in zip(again.outputs, call.outputs, strict=True):
                if mine >= 0:
                    own[mine], asked[theirs] = theirs, again.asked[mine]
            of_others = self.number[begin:end] < call.blocks[0]  # that went meanwhile
            numbers += [self.number[done:begin], own[again.number], self.number[begin:end][of_others]]
            signs += [self.sign[done:begin], again.sign, self.sign[begin:end][of_others]]
            nbytes.append(again.asked)
            blocks, done = blocks + len(again.asked), end
        numbers.append(self.number[done:])
        signs.append(self.sign[done:])
        return np.concatenate(numbers), np.concatenate(signs), np.concatenate(nbytes)


class _Run(NamedTuple):
    """A fused op's events by block, the bytes of its blocks, and which its outputs are: -1 for an argument's."""

    number: np.ndarray
    sign: np.ndarray
    asked: np.ndarray
    outputs: list[int]


def _run_again(call: Call, at: Traced, sizes: tuple[int, int, int]) -> _Run:
    """At other sizes, on a GPU; on meta tensors, of which launchers make new ones faster than of fake ones."""

    def scaled(n: int) -> int:
        constant, *powers = _powers(n, at)
        return constant * math.prod(size**power for size, power in zip(sizes, powers, strict=True))

    def leaf(x: Any) -> Any:
        if isinstance(x, Sizes):
            shape, stride = tuple(map(scaled, x.shape)), tuple(map(scaled, x.stride))
            return torch.empty_strided(shape, stride, dtype=x.dtype, device="meta")
        return scaled(x) if type(x) is int else x

    seen = Allocations(gpu=True)
    arguments = tree_unflatten([leaf(x) for x in call.leaves], call.nested)
    first = max(seen.see(arguments)) + 1
    with as_on(gpu=True):
        result = seen.look_into(call.op, arguments)
    outputs = [max(number - first, -1) for number in seen.see(result)]
    events = [(number - first, 1 if came else -1) for number, came in seen.events if number >= first]
    number, sign = np.array(events, int).reshape(-1, 2).T
    return _Run(number, sign, np.array([block.asked for block in seen.blocks[first:]], int), outputs)


def _powers(n: int, at: Traced) -> tuple[int, int, int, int]:
    """Constant, and the powers of batch, side and tokens."""
    found = []
    for value in (at.batch, at.side, at.tokens):
        power = 0
        while value > 1 and n and n % value == 0:
            n //= value
            power += 1
        found.append(power)
    return n, found[0], found[1], found[2]


def _factors(n: int) -> set[int]:
    found, divisor = set(), 2
    while n > 1:
        while n % divisor == 0:
            found.add(divisor)
            n //= divisor
        divisor += 1
    return found
