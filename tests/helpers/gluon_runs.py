"""Ops whose kernels in Gluon run in the emulator, and the faults that it reports."""

import gluon_emulator
import pytest

from fastvit.ops.runtime import launch as launches


class Emulated:
    """For `launches.launching`: kernels in Gluon run in the emulator, in the schedule of `seed`, others as always.

    seen: the names of what ran. programs, stored: of the last one in Gluon; stored tells how often it stored to each
    element of each of its results, which must be once unless stores_all is false.
    """

    def __init__(self, *, stores_all=True):
        self.seed, self.seen, self.stores_all, self._own = 0, [], stores_all, launches._instead

    def __call__(self, kernel, programs, tensors, numbers, constants):
        self.seen.append(kernel.__name__)
        if not hasattr(kernel, "boxes"):
            self._own(kernel, programs, tensors, numbers, constants)
            return
        arguments = kernel.described((*tensors, *numbers))
        self.programs = programs
        self.stored = gluon_emulator.launch(kernel.kernel, (programs,), *arguments, seed=self.seed, **constants)
        if self.stores_all:
            assert all((counts == 1).all() for counts in self.stored.values()), "each element is stored once"


def assert_found(kinds, check, run, schedules):
    """Assert that the emulator reports a fault of one of these kinds, or for "" that numbers are wrong."""
    for run.seed in range(schedules):
        run.seen.clear()
        with pytest.raises((gluon_emulator.Fault, AssertionError)) as found:
            check()
        kind = getattr(found.value, "kind", "")
        assert kind in kinds.split() or kind == kinds, found.value
