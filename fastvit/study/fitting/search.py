"""Find the cheapest choice of what each block recomputes within a peak of memory.

While block i runs forward, A_i + forward are in use, where A_i is what the start, the blocks before it, and what runs
between these hold; while it runs backward, A_i + saved + late_i + backward, where late_i are the gradients that exist
by then. So the choice of a block changes A of later blocks, and these two numbers of its own. Of two choices for the
first blocks that cost the same, the one that holds less is never worse, and the search keeps, for each amount held, the
cheapest: it is exact for these numbers, for any stack of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch.utils._pytree import tree_map

from fastvit.study.fitting.choices import NOTHING, Choice


class BlockCosts(NamedTuple):
    """One block with one choice. Bytes, and FLOPs.

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


class Gap(NamedTuple):
    """The bytes of what runs between a block and the next one, in both passes; after the last block, of the rest of the
    model and the loss.

    Attributes:
        saved: held from the forward to the backward pass.
        most: the most in use in either pass, over what is in use after the block's forward pass.
    """

    saved: int
    most: int


class StepCosts(NamedTuple):
    """A step, by what its blocks may choose.

    Attributes:
        blocks: for each block, in the order in which they run, its choices.
        gaps: what runs after each block.
        late: for each block, bytes in use at the start of its backward pass, over those after its forward pass.
        before: bytes in use before the first block.
        outside: the most in use before the first block runs forward and after it ran backward.
        flops: of the step, without recomputation.
    """

    blocks: tuple[dict[Choice, BlockCosts], ...]
    gaps: tuple[Gap, ...]
    late: tuple[int, ...]
    before: int
    outside: int
    flops: int

    def peak(self, choices: Sequence[Choice]) -> int:
        """Return the peak in bytes."""
        held, peak = self.before, self.outside
        for i, choice in enumerate(choices):
            costs = self.blocks[i][choice]
            peak = max(peak, held + self._most(i, costs))
            held += costs.saved + self.gaps[i].saved
        return peak

    def recomputed(self, choices: Sequence[Choice]) -> int:
        """Return the FLOPs of the recomputation."""
        return sum(options[choice].flops for options, choice in zip(self.blocks, choices, strict=True))

    def towards(self, other: StepCosts, share: float) -> StepCosts:
        """Return the costs at a share of the way from these to those of another batch: they grow on a straight line."""
        found: StepCosts = tree_map(lambda a, b: round(a + (b - a) * share), self, other)
        return found

    def _most(self, i: int, costs: BlockCosts) -> int:
        """Return the most in use during block i and after it, over what is in use before its forward pass."""
        after = costs.saved + max(self.late[i] + costs.backward, self.gaps[i].most)
        return max(costs.forward, after)

    def least_peak(self) -> int:
        """Return the least peak of all choices."""
        low, high = 0, self.peak([NOTHING] * len(self.blocks))
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(middle) else (middle + 1, high)
        return low

    def _fits(self, budget: int) -> bool:
        held = self.before
        for i, options in enumerate(self.blocks):
            fitting = [costs.saved for costs in options.values() if held + self._most(i, costs) <= budget]
            if not fitting:
                return False
            held += min(fitting) + self.gaps[i].saved
        return self.outside <= budget

    def cheapest(self, budget: int) -> tuple[Choice, ...] | None:
        """Return the choices with the least recomputation whose peak is at most `budget` bytes, or None if there are
        none. Of choices that cost the same, blocks that recompute more come first."""
        if self.outside > budget:
            return None
        # FLOPs count this often, so that the choices' ranks decide between equal FLOPs only: early ones recompute less
        unit = 1 + sum(len(options) - 1 for options in self.blocks)
        held, cost = np.array([self.before]), np.array([0])
        steps = []  # for each block, the choice and the predecessor of every state
        for i, options in enumerate(self.blocks):
            grown: list[np.ndarray] = []
            for rank, costs in enumerate(options.values()):
                (fitting,) = np.nonzero(held + self._most(i, costs) <= budget)
                spent, saved = cost[fitting] + costs.flops * unit + rank, costs.saved + self.gaps[i].saved
                grown.append(np.array([held[fitting] + saved, spent, np.full(len(fitting), rank), fitting]))
            states = np.concatenate(grown, 1)
            if not states.shape[1]:
                return None
            states = states[:, np.lexsort((states[1], states[0]))]
            cheapest = np.minimum.accumulate(states[1])
            states = states[:, np.append(True, cheapest[1:] < cheapest[:-1])]
            held, cost = states[0], states[1]
            steps.append((states[2], states[3]))
        state, found = int(np.argmin(cost)), []
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
