"""Find the cheapest choice of what each block recomputes within a peak of memory.

While block i runs forward, A_i + forward are in use, where A_i is what the start and the blocks before it hold; while
it runs backward, A_i + saved + backward + late_i, where late_i are the gradients that exist by then. The choice of a
block changes A of later blocks, and these two numbers of its own. So of two choices for the first blocks that cost the
same, the one that holds less is never worse, and the search keeps, for each amount held, the cheapest: it is exact for
these numbers, for any stack of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fastvit.study.fitting.choices import NOTHING, Choice


class BlockCosts(NamedTuple):
    """One block with one choice. Bytes, and multiplications and additions.

    Attributes:
        saved: held from its forward pass to its backward pass, its output included.
        forward: the most in use during its forward pass, over what was before it.
        backward: the most in use during its backward pass, over what was before that.
        flops: what the backward pass computes again.
    """

    saved: int
    forward: int
    backward: int
    flops: int


@dataclass(frozen=True)
class StepCosts:
    """A step, by what its blocks may choose.

    Attributes:
        blocks: for each block, in the order in which they run, its choices.
        before: bytes in use before the first block.
        between: the most in use from the last block's forward to its backward pass, over what is before that.
        late: for each block, bytes in use at the start of its backward pass, over those after its forward pass.
        outside: the most in use before the first block runs forward and after it ran backward.
        flops: of the step, without recomputation.
    """

    blocks: tuple[dict[Choice, BlockCosts], ...]
    before: int
    between: int
    late: tuple[int, ...]
    outside: int
    flops: int

    def peak(self, choices: Sequence[Choice]) -> int:
        """Return the peak in bytes."""
        held, peak = self.before, self.outside
        for options, late, choice in zip(self.blocks, self.late, choices, strict=True):
            peak = max(peak, held + self._own(options[choice], late))
            held += options[choice].saved
        return max(peak, held + self.between)

    def recomputed(self, choices: Sequence[Choice]) -> int:
        """Return the FLOPs of the recomputation."""
        return sum(options[choice].flops for options, choice in zip(self.blocks, choices, strict=True))

    def towards(self, other: StepCosts, share: float) -> StepCosts:
        """Return the costs at a share of the way from these to those of another batch: they grow on a straight line."""

        def mixed(a: int, b: int) -> int:
            return round(a + (b - a) * share)

        def block(a: BlockCosts, b: BlockCosts) -> BlockCosts:
            return BlockCosts(*map(mixed, a, b))

        blocks = (
            {choice: block(a[choice], b[choice]) for choice in a}
            for a, b in zip(self.blocks, other.blocks, strict=True)
        )
        late = tuple(map(mixed, self.late, other.late))
        names = "before", "between", "outside", "flops"
        rest = {name: mixed(getattr(self, name), getattr(other, name)) for name in names}
        return StepCosts(blocks=tuple(blocks), late=late, **rest)

    @staticmethod
    def _own(costs: BlockCosts, late: int) -> int:
        return max(costs.forward, costs.saved + late + costs.backward)

    def least_peak(self) -> int:
        """Return the least peak of all choices."""
        low, high = 0, self.peak([NOTHING] * len(self.blocks))
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(middle) else (middle + 1, high)
        return low

    def _fits(self, budget: int) -> bool:
        held = self.before
        for options, late in zip(self.blocks, self.late, strict=True):
            fitting = [costs.saved for costs in options.values() if held + self._own(costs, late) <= budget]
            if not fitting:
                return False
            held += min(fitting)
        return max(self.outside, held + self.between) <= budget

    def cheapest(self, budget: int) -> tuple[Choice, ...] | None:
        """Return the choices with the least recomputation whose peak is at most `budget` bytes, or None if there are
        none. Of choices that cost the same, blocks that recompute more come first."""
        if self.outside > budget:
            return None
        held, cost = np.array([self.before]), np.array([0])
        steps = []  # for each block, the choice and the predecessor of every state
        for options, late in zip(self.blocks, self.late, strict=True):
            grown: list[np.ndarray] = []
            for rank, costs in enumerate(options.values()):
                (fitting,) = np.nonzero(held + self._own(costs, late) <= budget)
                # ties go to the earlier choice, which recomputes less
                spent = cost[fitting] + costs.flops * len(options) + rank
                grown.append(np.array([held[fitting] + costs.saved, spent, np.full(len(fitting), rank), fitting]))
            states = np.concatenate(grown, 1)
            states = states[:, np.lexsort((states[1], states[0]))]
            cheaper = np.minimum.accumulate(states[1])
            states = states[:, np.append(True, cheaper[1:] < cheaper[:-1])[: states.shape[1]]]
            held, cost = states[0], states[1]
            steps.append((states[2], states[3]))
        (fitting,) = np.nonzero(held + self.between <= budget)
        if not len(fitting):
            return None
        state, found = int(fitting[np.argmin(cost[fitting])]), []
        for options, (ranks, before) in zip(reversed(self.blocks), reversed(steps), strict=True):
            found.append([*options][int(ranks[state])])
            state = int(before[state])
        return self._in_order(tuple(reversed(found)), budget)

    def _in_order(self, choices: tuple[Choice, ...], budget: int) -> tuple[Choice, ...]:
        """Let the first blocks recompute most, where blocks have the same options and the peak allows it: fewer words
        say what happens."""
        if any(options != self.blocks[0] for options in self.blocks):
            return choices
        ordered = tuple(sorted(choices, key=lambda choice: self.blocks[0][choice].saved))
        return ordered if self.peak(ordered) <= budget else choices
