"""Read from traces of a step what each choice costs each block: bytes, and what is computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from fastvit.study.fitting.choices import NOTHING, Choice, choices_of, has_halves, put_on
from fastvit.study.fitting.search import BlockCosts, Gap, StepCosts
from fastvit.study.memory.allocations import Allocations
from fastvit.study.memory.plan import trace_step
from fastvit.study.memory.step import StepSpec
from fastvit.study.sources import model_source
from fastvit.study.sources.model_source import output_of


@dataclass
class _Counted(Allocations):
    """Also notes the FLOPs of every op, and the event at which it ran."""

    flops: list[tuple[int, int]] = field(default_factory=list)

    def ran(self, op: Any, args: tuple[Any, ...], keywords: dict[str, Any], out: Any, first: int) -> None:
        formula = flop_registry.get(getattr(op, "_overloadpacket", None))
        if formula is not None:
            self.flops.append((len(self.events), int(formula(*args, **keywords, out_val=out))))


class Trace:
    """One traced step with a choice for each block.

    Args:
        choices: for each block; or the number of a turn, in which the blocks of a kind take its options one after the
            other, so that a few turns have all options of all kinds.

    Attributes:
        names: of the blocks.
        kinds: for each block, what decides its costs, and what it may recompute.
        choices: for each block.
        peak: bytes.
        flops: of the whole step.

    Raises:
        ValueError: the blocks do not run once each, in the order of the model's modules.
    """

    def __init__(self, step: StepSpec, choices: Sequence[Choice] | int) -> None:
        seen = _Counted(step.gpu)

        def prepare(model: nn.Module) -> None:
            blocks = blocks_of(model)
            self.names = tuple(blocks)
            self.kinds = [Kind(_signature(block), choices_of(block)) for block in blocks.values()]
            self.choices = tuple(_in_turn(self.kinds, choices) if isinstance(choices, int) else choices)
            for block, choice in zip(blocks.values(), self.choices, strict=True):
                put_on(block, choice)
            self._follow([*blocks.values()], seen)

        found = trace_step(step, seen, prepare)
        if self._ran != [*range(len(self.names))]:
            raise ValueError(f"{step.source.name} does not run {self.names[0]} to {self.names[-1]} once each, in order")
        self._begin, self._last = found.begin, found.last
        # the search adds bytes, and FLOPs as often as blocks have options, in 64 bits
        flops = sum(count for _, count in seen.flops) * sum(len(kind.options) for kind in self.kinds)
        if max(flops, sum(storage.nbytes for storage in seen.storages)) >= 2**63:
            raise ValueError(f"{step.source.name}: batch {step.batch} at this image_size is too large to be planned")
        nbytes = np.array([storage.nbytes for storage in seen.storages])
        number, came = np.array(seen.events).T
        self._held = np.append(0, np.cumsum(nbytes[number] * np.where(came, 1, -1)))  # before each event
        self._flops = np.array(seen.flops, int).reshape(-1, 2)
        self.peak, self.flops = int(self._held[self._begin :].max()), int(self._flops[:, 1].sum())

    def _follow(self, blocks: Sequence[nn.Module], seen: Allocations) -> None:
        """Note from now on the events at which these blocks begin and end, in both passes."""
        self._ran: list[int] = []  # blocks, as they run forward
        self._forward = [(0, 0)] * len(blocks)  # the first event, and the one after the last
        self._start: list[int | None] = [None] * len(blocks)  # of the backward pass; None if there is none
        self._end: list[int | None] = [None] * len(blocks)  # of the same; None if the block's input needs no gradient

        def begins(i: int, inputs: Any) -> None:
            self._ran.append(i)
            self._forward[i] = len(seen.events), 0
            x = next((t for t in tree_iter(inputs) if isinstance(t, Tensor) and t.requires_grad), None)
            if x is not None:
                x.register_hook(lambda _: self._end.__setitem__(i, len(seen.events)))

        def ends(i: int, result: Any) -> None:
            self._forward[i] = self._forward[i][0], len(seen.events)
            if (out := output_of(result)).requires_grad:
                out.register_hook(lambda _: self._start.__setitem__(i, len(seen.events)))

        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda _, *inputs, i=i: begins(i, inputs), with_kwargs=True)
            block.register_forward_hook(lambda _module, _args, result, i=i: ends(i, result))

    def _most(self, first: int, last: int, over: int) -> int:
        """Return the most in use between two events, over what is in use before a third."""
        return int(self._held[first : last + 1].max() - self._held[over]) if first <= last else 0

    def _backward(self, i: int) -> tuple[int, int] | None:
        """Return the first event of block i's backward pass and the one after its last, or None if it has none."""
        start, end = self._start[i], self._end[i]
        return None if start is None else (start, self._last if end is None else end)

    def costs(self, i: int) -> BlockCosts:
        """Return the costs of block i, with the FLOPs of its whole backward pass."""
        (begin, end), backward = self._forward[i], self._backward(i)
        saved, forward = int(self._held[end] - self._held[begin]), self._most(begin, end, begin)
        if backward is None:
            return BlockCosts(saved, forward, 0, 0)
        start, stop = backward
        events, flops = self._flops.T
        return BlockCosts(
            saved, forward, self._most(start, stop, start), int(flops[(events >= start) & (events < stop)].sum())
        )

    def step_costs(self, blocks: Sequence[dict[Choice, BlockCosts]]) -> StepCosts:
        """Return the costs of the step, for these costs of its blocks."""
        forward = self._forward
        late, gaps, turn = [], [], self._last  # turn: where the backward pass of what runs after a block begins
        for i in reversed(range(len(blocks))):
            _, end = forward[i]
            after = forward[i + 1][0] if i + 1 < len(blocks) else end
            back = self._backward(i)
            start = turn if back is None else back[0]
            late.append(0 if back is None else int(self._held[start] - self._held[end]))
            first = turn if i + 1 < len(blocks) else end  # after the last block, the loss lies between
            most = max(self._most(end, after, end), self._most(first, start, end))
            gaps.append(Gap(int(self._held[after] - self._held[end]), most))
            turn = start if back is None else back[1]
        again = sum(options[choice].flops for options, choice in zip(blocks, self.choices, strict=True))
        return StepCosts(
            blocks=tuple(blocks),
            gaps=tuple(reversed(gaps)),
            late=tuple(reversed(late)),
            before=int(self._held[forward[0][0]]),
            outside=int(max(self._held[self._begin : forward[0][0] + 1].max(), self._held[turn:].max())),
            flops=self.flops - again,
        )


class Kind(NamedTuple):
    """Describes a block: what decides its costs, as far as the module shows it, and what it may recompute."""

    signature: Any
    options: tuple[Choice, ...]


def _signature(block: nn.Module) -> Any:
    parameters = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())
    rates = tuple(m.p > 0 for m in block.modules() if isinstance(m, nn.Dropout))
    # Stochastic depth, which the first block often lacks, is one number an image in the fused halves. Elsewhere it
    # decides whether checkpointing computes the last layer again.
    classes = () if has_halves(block) else tuple(map(type, block.modules()))
    return type(block), parameters, rates, classes


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's blocks by name, in the order of its modules: all modules of the class that the longest list of
    equal modules has, without those of V-JEPA 2's predictor, which `model_source.call` leaves out.

    Raises:
        ValueError: the model has no list of modules of one class.
    """
    listed = model_source.blocks(model)
    if not listed:
        raise ValueError(f"{type(model).__name__} has no list of blocks of one class")
    kind = type(listed[0])
    predictors = [module for module in model.modules() if type(module).__name__ == "VJEPA2Predictor"]
    left_out = {block for predictor in predictors for block in predictor.modules()}
    return {name: module for name, module in model.named_modules() if type(module) is kind and module not in left_out}


def costs_of(step: StepSpec) -> StepCosts:
    """Trace the step with every choice of every kind of block, several choices in one trace, and return the costs."""
    traces, known = list[Trace](), dict[tuple[Kind, Choice], BlockCosts]()
    while not traces or any((kind, choice) not in known for kind in traces[0].kinds for choice in kind.options):
        traces.append(trace := Trace(step, len(traces)))
        for i, key in enumerate(zip(trace.kinds, trace.choices, strict=True)):
            known[key] = trace.costs(i)  # of the last such block: the first one may lack stochastic depth

    def costs(kind: Kind, choice: Choice) -> BlockCosts:
        found, plain = known[kind, choice], known[kind, NOTHING]
        return found._replace(flops=max(found.flops - plain.flops, 0))

    blocks = [{choice: costs(kind, choice) for choice in kind.options} for kind in traces[0].kinds]
    return traces[0].step_costs(blocks)


def _in_turn(kinds: Sequence[Kind], turn: int) -> list[Choice]:
    """Return a choice for each block, see `Trace`."""
    count, place, found = Counter(kinds), Counter[Kind](), []
    for kind in kinds:
        found.append(kind.options[(turn * count[kind] + place[kind]) % len(kind.options)])
        place[kind] += 1
    return found
