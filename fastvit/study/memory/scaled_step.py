"""Plans a step at many image sizes, patch sizes and batches from two traces on fake tensors.

In a ViT the bytes of almost every allocation are a constant times powers of the sizes that grow: batch, side of the
patch grid, tokens, relative positions, patch. Two traces of different sizes tell which. At another size every
allocation is evaluated, and the peak searched again. The scratch memory of a fused op counts as one allocation; the op
runs again on tensors of the other size to tell it, because partial sums are as many as a GPU runs at once. A batch of
one needs traces of its own: a sum over one image is a view.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec

from fastvit.ops.runtime import registry
from fastvit.ops.runtime.backend import Route
from fastvit.study.memory.allocations import Allocations, OpTrace, as_on, without_data
from fastvit.study.memory.peak import running_peak
from fastvit.study.memory.plan import Parts, trace_step
from fastvit.study.memory.step import Setting, StepSpec
from fastvit.study.sources.model_source import ModelSource

_SIDES, _BATCHES = (29, 46), (16, 37)  # of the two traces: no two products grow by the same factor


def _products(batch: int, side: int, prefix: int, patch: int) -> list[int]:
    """Return what bytes are proportional to, the simplest first, in a step of square images and patches. An extent is
    the side, the patches, patches + 1 (positions of CLS and patches where registers have none), all tokens, or the
    relative positions (BEiT's and timm's table).

    Args:
        batch: images.
        side: patches down and across.
        prefix: tokens before the patches.
        patch: pixels of a patch down and across.
    """
    patches, relative = side**2, (2 * side - 1) ** 2 + 3 * prefix
    pairs = itertools.combinations_with_replacement((1, side, patches, patches + 1, patches + prefix, relative), 2)
    factors = itertools.product((1, batch), (1, patch, patch**2), pairs)
    return [images * pixels * a * b for images, pixels, (a, b) in factors]


class ScaledStep:
    """Plan one provider's step for any square image and patch.

    Args:
        prefix: tokens before the patches.
        patches: sizes of patches to plan for, in pixels.
        one_image: plan for a batch of one; else for any other batch.
        gpu: plan for a GPU.

    Raises:
        ValueError: the step runs other functions at other sizes, or a fused op has an argument that is no product.
    """

    def __init__(
        self, source: ModelSource, provider: str, setting: Setting, prefix: int, patches: Sequence[int], *,
        one_image: bool, gpu: bool,
    ) -> None:  # fmt: skip
        batches = (1, 1) if one_image else _BATCHES
        self.name, self.prefix, traces, products = source.name, prefix, list[_Trace](), list[list[int]]()
        for batch, side, patch in zip(batches, _SIDES, (patches[0], patches[-1]), strict=True):
            size = side * patch, side * patch
            spec = StepSpec(source, size, batch, setting, gpu, provider, patch_size=(patch, patch))
            seen, begin, *_, groups = trace_step(spec)
            traces.append(_with_joint_scratch(seen, begin, list(groups.values())))
            products.append(_products(batch, side, prefix, patch))
        first, second = traces
        if first.events != second.events:
            raise ValueError(f"{source.name} runs other functions at other sizes")
        self.pairs, self.seen = [*zip(*products, strict=True)], seen
        self.term = functools.cache(self._term)
        self.scratch_of_run = functools.cache(_scratch_of_run)  # only here: it depends on settings, such as threads
        # {op, its arguments in both traces, how they are nested: storages}: the model's blocks share most
        self.again: dict[tuple[Any, tuple[Any, ...], tuple[Any, ...], TreeSpec], list[int]] = {}
        for n, op in first.ops.items():
            key = op.op, op.leaves, second.ops[n].leaves, op.nested
            self.again.setdefault(key, []).append(n)
        # the few others, such as tables of 2 * side - 1 rows, count as in the larger trace: product 0 is 1
        pairs = zip(first.asked, second.asked, strict=True)
        self.terms = [self.term(*pair) or (max(pair), 0) for pair in pairs]
        self.begin, self.part = first.begin, np.array(first.parts)
        self.number, came = np.array(first.events).T
        self.sign = np.where(came, 1, -1)
        self.parts(_SIDES[0] * patches[0], patches[0], batches[0])  # raises if an argument of an op is no product

    def parts(self, image_size: int, patch: int, batch: int) -> Parts:
        """Return what `plan` would. image_size and patch are pixels, image_size a multiple of patch."""
        products = _products(batch, image_size // patch, self.prefix, patch)
        asked = np.array([factor * products[product] for factor, product in self.terms])
        with as_on(self.seen.gpu):
            for op, numbers in self.again.items():
                asked[numbers] = self._scratch(*op, products)
        nbytes = self.seen.rounded(asked)
        held = np.cumsum(nbytes[self.number] * self.sign)
        until = self.begin + int(held[self.begin :].argmax()) + 1
        alive = np.bincount(self.number[:until], self.sign[:until], len(nbytes)) > 0
        return Parts(*(int(nbytes[alive & (self.part == part)].sum()) for part in range(len(fields(Parts)))))

    def _term(self, first: int, second: int) -> tuple[int, int] | None:
        """Return the factor and the number of the product that is this in the first and in the second trace, or None if
        no product is."""
        fitting = (
            (first // a, i) for i, (a, b) in enumerate(self.pairs) if first % a == 0 and first // a * b == second
        )
        return next(fitting, None)

    def _scratch(
        self, op: Any, first: tuple[Any, ...], second: tuple[Any, ...], nested: TreeSpec, products: list[int]
    ) -> int:
        """Return the scratch memory of a fused op at the sizes of these products, from its arguments in both traces.
        Call it within `as_on`."""

        def scaled(a: Any, b: Any) -> Any:
            if type(a) is not int:
                return a
            if (term := self.term(a, b)) is None:
                raise ValueError(f"{op} of {self.name} has an argument that grows from {a} to {b}")
            return term[0] * products[term[1]]

        return self.scratch_of_run(op, tuple(map(scaled, first, second)), nested, self.seen.gpu)


def _scratch_of_run(op: Any, leaves: tuple[Any, ...], nested: TreeSpec, gpu: bool) -> int:
    """Run a fused op on tensors without data, and return the most scratch memory that it holds. A GPU's launchers take
    meta tensors, which are faster to make; a CPU's functions depend on the device."""
    device, fakes = ("meta", contextlib.nullcontext()) if gpu else ("cpu", FakeTensorMode())
    seen, route = Allocations(gpu), Route.TRITON if gpu else Route.ATEN
    with fakes:
        arguments, keywords = without_data(leaves, nested, device)
        given = set(seen.see((arguments, keywords)))
        with seen:
            result = registry.IMPLEMENTATIONS[op](*arguments, route=route, **keywords)
    return _most(seen, range(len(seen.events)), set(range(len(seen.storages))) - given - set(seen.see(result)))


def _most(seen: Allocations, events: Iterable[int], scratch: set[int]) -> int:
    """Return the most bytes that these storages hold at one time during these events."""
    changes = (seen.events[i] for i in events if seen.events[i][0] in scratch)
    return running_peak(seen.storages[n].asked * (1 if came else -1) for n, came in changes)


class _Trace(NamedTuple):
    """One of the two traces.

    Attributes:
        begin: the first event of the step itself.
        events: storage, and True if it was allocated.
        asked: bytes of each storage.
        parts: the part of each storage, by number.
        ops: the op of each storage that is the scratch memory of an op.
    """

    begin: int
    events: list[tuple[int, bool]]
    asked: list[int]
    parts: list[int]
    ops: dict[int, OpTrace]


def _with_joint_scratch(seen: Allocations, begin: int, groups: Sequence[set[int]]) -> _Trace:
    """Let the scratch memory of each fused op be one storage, which is there when the op ends. Storages are numbered in
    the order of their events, which does not depend on sizes. No op runs before `begin`."""
    trace, numbers = _Trace(begin, [], [], [], {}), dict[int, int]()
    scratch = {n for op in seen.ops for n in range(*op.storages) if n not in op.outputs}
    ends = {op.events[1]: op for op in seen.ops if range(*op.events)}

    def add(nbytes: int, part: int) -> int:
        trace.asked.append(nbytes)
        trace.parts.append(part)
        return len(trace.asked) - 1

    for i, (n, came) in enumerate([*seen.events, (-1, False)]):
        if op := ends.get(i):
            joint = add(_most(seen, range(*op.events), scratch), len(groups))
            trace.ops[joint] = op
            trace.events.extend([(joint, True), (joint, False)])
        if n >= 0 and n not in scratch:
            if came:
                part = next((p for p, group in enumerate(groups) if n in group), len(groups))
                numbers[n] = add(seen.storages[n].asked, part)
            trace.events.append((numbers[n], came))
    return trace
