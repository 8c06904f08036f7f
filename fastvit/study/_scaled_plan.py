"""Plans of a step at many image sizes and batches from one run on fake tensors.

The bytes of every allocation of a ViT are a constant times powers of the batch B, of the side h of the patch grid, and
of the tokens N. One step is traced at a B, an h and an N with primes that the model's own widths do not have, so that
dividing an allocation by them tells its powers. At another size each is evaluated, and the peak found anew. That is
exact where the step allocates the same things in the same order at both sizes; where it does not (one image, whose
reductions are views; partial sums of as many programs as a kernel has), it is off by about as much as they hold."""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import numpy as np
from torch import nn

from fastvit.study._plan import Parts, Setting, run
from fastvit.study._subject import Subject

_PRIMES = (17, 19, 23, 29, 31, 37, 41, 43, 47)


class Traced(NamedTuple):
    """At which sizes a step is traced: images, patches down and across, and tokens, one of whose prime factors is as
    good as their number; 0 for tokens that are the patches alone."""

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
    """The plan of one provider's step at one patch size, for square images and batches of any number.

    Args:
        patch: pixels.
        prefix: tokens before the patches.
        gpu: plan as on a GPU.
    """

    def __init__(
        self, subject: Subject, provider: str, patch: int, setting: Setting, at: Traced, prefix: int, *, gpu: bool
    ) -> None:
        self.patch, self.prefix = patch, prefix
        size = at.side * patch
        self.seen, self.begin, _, groups = run(
            subject, provider, (size, size), at.batch, setting, gpu=gpu, patch_size=(patch, patch)
        )
        blocks = self.seen.blocks
        self.constant, self.of_batch, self.of_side, self.of_tokens = np.array([_powers(b.asked, at) for b in blocks]).T
        self.part = np.full(len(blocks), len(groups))  # temporaries, which have no group
        for i, group in reversed(list(enumerate(groups.values()))):
            self.part[list(group)] = i
        self.number = np.array([number for number, _ in self.seen.events])
        self.sign = np.array([1 if came else -1 for _, came in self.seen.events])

    def parts(self, image_size: int, batch: int) -> Parts:
        """As `plan` has them. image_size: pixels, a multiple of the patch."""
        side = image_size // self.patch
        tokens = side * side + self.prefix
        nbytes = self.constant * batch**self.of_batch * side**self.of_side * tokens**self.of_tokens
        nbytes = self.seen.rounded(nbytes)
        held = np.cumsum(nbytes[self.number] * self.sign)
        until = self.begin + int(held[self.begin :].argmax()) + 1
        there = np.bincount(self.number[:until], self.sign[:until], len(nbytes)) > 0
        return Parts(*(int(nbytes[there & (self.part == part)].sum()) for part in range(len(fields(Parts)))))


def _powers(nbytes: int, at: Traced) -> tuple[int, int, int, int]:
    """Constant, and the powers of batch, side and tokens."""
    found = []
    for value in (at.batch, at.side, at.tokens):
        power = 0
        while value and nbytes and nbytes % value == 0:
            nbytes //= value
            power += 1
        found.append(power)
    return nbytes, found[0], found[1], found[2]


def _factors(n: int) -> set[int]:
    found, divisor = set(), 2
    while n > 1:
        while n % divisor == 0:
            found.add(divisor)
            n //= divisor
        divisor += 1
    return found
