"""Read from traces of a step what each choice costs each block: bytes, and what is computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from fastvit.study.fitting.choices import NOTHING, Choice, choices_of, put_on
from fastvit.study.fitting.search import BlockCosts, StepCosts
from fastvit.study.memory.allocations import Allocations
from fastvit.study.memory.plan import trace_step
from fastvit.study.memory.step import Setting
from fastvit.study.sources.model_source import ModelSource, output_of


class FitStep(NamedTuple):
    """The step that has to fit.

    Attributes:
        source: the model; its blocks run as fused ops where they can.
        image_size: (height, width) in pixels.
        gpu: plan for a GPU; else for a CPU.
        accumulates: gradients of earlier batches exist.
    """

    source: ModelSource
    image_size: tuple[int, int]
    batch: int
    setting: Setting
    gpu: bool
    accumulates: bool = False


@dataclass
class _Counted(Allocations):
    """Also notes the FLOPs of every op, and the event at which it ran."""

    flops: list[tuple[int, int]] = field(default_factory=list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._count(func, args, kwargs or {}, out)
        return out

    def _run_op(self, op: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        outermost = not self._inside
        out = super()._run_op(op, args, keywords)
        if outermost:
            self._count(op, args, {}, out)
        return out

    def _count(self, op: Any, args: tuple[Any, ...], keywords: dict[str, Any], out: Any) -> None:
        formula = None if self._inside else flop_registry.get(getattr(op, "_overloadpacket", None))
        if formula is not None:
            self.flops.append((len(self.events), int(formula(*args, **keywords, out_val=out))))


@dataclass
class _Marks:
    """The events at which blocks begin and end.

    Attributes:
        forward: for each block, the event at which its forward pass begins; then the one at which the last ends.
        backward: for each block, the event at which its backward pass begins; None if it has none.
        end: the event at which the first block's backward pass ends, or None.
    """

    forward: list[int]
    backward: list[int | None]
    end: int | None = None

    @classmethod
    def of(cls, blocks: Sequence[nn.Module], seen: Allocations) -> _Marks:
        """Note the events of these blocks from now on."""
        marks = cls([0] * (len(blocks) + 1), [None] * len(blocks))

        def begins(i: int, x: Any) -> None:
            marks.forward[i] = len(seen.events)
            if i == 0 and isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(lambda _: setattr(marks, "end", len(seen.events)))

        def ends(i: int, result: Any) -> None:
            marks.forward[i + 1] = len(seen.events)
            if (out := output_of(result)).requires_grad:
                out.register_hook(lambda _: marks.backward.__setitem__(i, len(seen.events)))

        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda _, args, i=i: begins(i, args[0] if args else None))
            block.register_forward_hook(lambda _module, _args, result, i=i: ends(i, result))
        return marks


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
    """

    def __init__(self, step: FitStep, choices: Sequence[Choice] | int) -> None:
        def prepare(model: nn.Module, seen: Allocations) -> None:
            blocks = blocks_of(model)
            self.names = tuple(blocks)
            self.kinds = [Kind(_signature(block), choices_of(block)) for block in blocks.values()]
            self.choices = tuple(_in_turn(self.kinds, choices) if isinstance(choices, int) else choices)
            for block, choice in zip(blocks.values(), self.choices, strict=True):
                put_on(block, choice)
            self._marks = _Marks.of([*blocks.values()], seen)

        found = trace_step(
            step.source, "fused", step.image_size, step.batch, step.setting, gpu=step.gpu, seen=_Counted(step.gpu),
            prepare=prepare, accumulates=step.accumulates,
        )  # fmt: skip
        seen, begin = found.seen, found.begin
        assert isinstance(seen, _Counted)
        nbytes = np.array([storage.nbytes for storage in seen.storages])
        number, came = np.array(seen.events).T
        self._held = np.append(0, np.cumsum(nbytes[number] * np.where(came, 1, -1)))  # before each event
        self._begin = begin
        self.peak = int(self._held[begin:].max())
        self._flops = np.array(seen.flops, int).reshape(-1, 2)
        self._end = found.last if self._marks.end is None else self._marks.end
        # first event of each block's backward pass and the one after its last; None for a block without one
        self._backward = list[tuple[int, int] | None]()
        stop = self._end
        for start in self._marks.backward:
            self._backward.append(None if start is None else (start, stop))
            stop = stop if start is None else start
        self._turn = stop  # where the first of all backward passes begins

    def _most(self, first: int, last: int) -> int:
        return int(self._held[first : last + 1].max())

    def costs(self, i: int) -> BlockCosts:
        """Return the costs of block i, with the FLOPs of its whole backward pass."""
        (begin, end), backward = self._marks.forward[i : i + 2], self._backward[i]
        saved, forward = self._held[end] - self._held[begin], self._most(begin, end) - self._held[begin]
        if backward is None:
            return BlockCosts(int(saved), int(forward), 0, 0)
        (start, stop), events = backward, self._flops[:, 0]
        flops = self._flops[(events >= start) & (events < stop), 1].sum()
        return BlockCosts(int(saved), int(forward), self._most(start, stop) - int(self._held[start]), int(flops))

    def step_costs(self, blocks: Sequence[dict[Choice, BlockCosts]]) -> StepCosts:
        """Return the costs of the step, for these costs of its blocks."""
        forward = self._marks.forward
        late = (
            0 if backward is None else int(self._held[backward[0]] - self._held[end])
            for backward, end in zip(self._backward, forward[1:], strict=True)
        )
        again = sum(options[choice].flops for options, choice in zip(blocks, self.choices, strict=True))
        return StepCosts(
            blocks=tuple(blocks),
            before=int(self._held[forward[0]]),
            between=self._most(forward[-1], self._turn) - int(self._held[forward[-1]]),
            late=tuple(late),
            outside=max(self._most(self._begin, forward[0]), self._most(self._end, len(self._held) - 1)),
            flops=int(self._flops[:, 1].sum()) - again,
        )


class Kind(NamedTuple):
    """What decides a block's costs, as far as the module shows it, and what it may recompute."""

    signature: Any
    options: tuple[Choice, ...]


def _signature(block: nn.Module) -> Any:
    parameters = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())
    # not stochastic depth, which takes one number an image, and which the first block alone often lacks
    rates = tuple(m.p > 0 for m in block.modules() if isinstance(m, nn.Dropout))
    return type(block), parameters, rates


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's blocks by name, in the order of its modules: all modules of the class that the longest list of
    equal modules has.

    Raises:
        ValueError: the model has no list of at least two modules of one class.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len({*map(type, m)}) == 1]
    longest = max(lists, key=len, default=nn.ModuleList())
    if len(longest) < 2:
        raise ValueError(f"{type(model).__name__} has no list of blocks of one class")
    kind = type(longest[0])
    return {name: module for name, module in model.named_modules() if type(module) is kind}


def costs_of(step: FitStep) -> StepCosts:
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
