"""Plans a step at many image sizes, patch sizes and batches from two traces on fake tensors.

In a ViT the bytes of almost every allocation are a constant times powers of the sizes that grow: batch, side of the
patch grid, tokens, relative positions, patch. Two traces of different sizes tell which. At another size every
allocation is evaluated, and the peak searched again. The scratch memory of a fused op counts as one allocation. Where
it is no such product, because partial sums are as many as a GPU runs at once, the op runs again on tensors of the other
size. A batch of one needs traces of its own: a sum over one image is a view.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from fastvit.ops.runtime import registry
from fastvit.ops.runtime.backend import Path
from fastvit.ops.runtime.call import UNKEPT
from fastvit.study.memory.allocations import Allocations, OpTrace, TensorLayout, as_on
from fastvit.study.memory.peak import running_peak
from fastvit.study.memory.plan import Parts, trace_step
from fastvit.study.memory.step import Setting
from fastvit.study.sources.model_source import ModelSource

_SIDES, _BATCHES = (29, 46), (16, 37)  # of the two traces: no two products grow by the same factor


class StepSizes(NamedTuple):
    """Sizes of a step. All images and patches are square.

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

    def products(self) -> list[int]:
        """Return what bytes are proportional to, the simplest first. An extent is the side, the patches, patches + 1
        (positions of CLS and patches where registers have none), all tokens, or the relative positions (BEiT's and
        timm's table)."""
        patches, relative = self.side**2, (2 * self.side - 1) ** 2 + 3 * self.prefix
        extents = (1, self.side, patches, patches + 1, patches + self.prefix, relative)
        pairs = itertools.combinations_with_replacement(extents, 2)
        factors = itertools.product((1, self.batch), (1, self.patch, self.patch**2), pairs)
        return [batch * pixels * a * b for batch, pixels, (a, b) in factors]


class ScaledStep:
    """Plan one provider's step for any square image and patch.

    Args:
        prefix: tokens before the patches.
        patches: sizes of patches to plan for, in pixels.
        one_image: plan for a batch of one; else for any other batch.
        gpu: plan for a GPU.

    Raises:
        ValueError: the step runs other functions at other sizes.
    """

    def __init__(
        self, source: ModelSource, provider: str, setting: Setting, prefix: int, patches: Sequence[int], *,
        one_image: bool, gpu: bool,
    ) -> None:  # fmt: skip
        batches = (1, 1) if one_image else _BATCHES
        self.prefix, traces, products = prefix, list[_Trace](), list[list[int]]()
        for batch, side, patch in zip(batches, _SIDES, (patches[0], patches[-1]), strict=True):
            size = side * patch, side * patch
            seen, begin, _, groups = trace_step(
                source, provider, size, batch, setting, gpu=gpu, patch_size=(patch, patch)
            )
            traces.append(_with_joint_scratch(seen, begin, list(groups.values())))
            products.append(StepSizes(batch, side, prefix, patch).products())
        first, second = traces
        if first.events != second.events:
            raise ValueError(f"{source.name} runs other functions at other sizes")
        self.pairs = [*zip(*products, strict=True)]
        terms = [*map(self._term, first.asked, second.asked)]
        # what is no product, and does not run again, counts as in the larger trace; the product 0 is 1
        self.terms = [term or (max(pair), 0) for term, *pair in zip(terms, first.asked, second.asked, strict=True)]
        self.again = {n: (op, second.ops[n]) for n, op in first.ops.items() if gpu and terms[n] is None}
        self.runs: dict[Any, int] = {}
        self.seen, self.begin, self.part = seen, first.begin, np.array(first.parts)
        self.number, came = np.array(first.events).T
        self.sign = np.where(came, 1, -1)

    def parts(self, image_size: int, patch: int, batch: int) -> Parts:
        """Return what `plan` would. image_size and patch are pixels, image_size a multiple of patch."""
        products = StepSizes(batch, image_size // patch, self.prefix, patch).products()
        asked = np.array([factor * products[product] for factor, product in self.terms])
        with as_on(self.seen.gpu):
            for n, ops in self.again.items():
                asked[n] = self._scratch(*ops, products)
        nbytes = self.seen.rounded(asked)
        held = np.cumsum(nbytes[self.number] * self.sign)
        until = self.begin + int(held[self.begin :].argmax()) + 1
        alive = np.bincount(self.number[:until], self.sign[:until], len(nbytes)) > 0
        return Parts(*(int(nbytes[alive & (self.part == part)].sum()) for part in range(len(fields(Parts)))))

    def _term(self, first: int, second: int) -> tuple[int, int] | None:
        """Return the factor and the number of the product that is this in both traces, or None if no product is."""
        for i, (a, b) in enumerate(self.pairs):
            if first % a == 0 and first // a * b == second:
                return first // a, i
        return None

    def _scratch(self, first: OpTrace, second: OpTrace, products: list[int]) -> int:
        """Return the scratch memory of a fused op at the sizes of these products. Call it within `as_on`."""

        def scaled(a: Any, b: Any) -> Any:
            if isinstance(a, TensorLayout):
                shape, stride = (tuple(map(scaled, *pair)) for pair in ((a.shape, b.shape), (a.stride, b.stride)))
                return TensorLayout(shape, stride, a.dtype)
            if type(a) is not int or a == b:
                return a
            term = self._term(a, b)
            assert term is not None, f"an argument of {first.op} is {a} and {b}"
            return term[0] * products[term[1]]

        leaves = tuple(map(scaled, first.leaves, second.leaves))
        if (key := (first.op, leaves)) not in self.runs:
            self.runs[key] = _scratch_of_run(first.op, leaves, first.nested)
        return self.runs[key]


def _scratch_of_run(op: Any, leaves: tuple[Any, ...], nested: TreeSpec) -> int:
    """Run a fused op on meta tensors, and return the most scratch memory that it holds."""
    tensors = [
        torch.empty_strided(*x[:2], dtype=x.dtype, device="meta") if isinstance(x, TensorLayout) else x for x in leaves
    ]
    seen = Allocations(gpu=True)
    arguments, keywords = tree_unflatten(tensors, nested)
    given = set(seen.see((arguments, keywords)))
    with seen:
        result = registry.IMPLEMENTATIONS[op](*arguments, call=UNKEPT[Path.TRITON], **keywords)
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
