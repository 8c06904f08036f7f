"""One kind of call of a model, captured: its static tensors, its graphs, and the gradients of a replayed call."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fastvit.cuda_graphs.recorder import Recorder, Replay, Unfit
from fastvit.cuda_graphs.tensors import as_argument, as_leaf, copies, leaves_of, replaced, static_copy
from fastvit.cuda_graphs.version import versions_of
from fastvit.ops.runtime.backend import is_observed
from fastvit.ops.runtime.torch_private import after_backward, is_batched_gradient

_GROUP_BYTES = 25 * 2**20  # of gradients that are given out together, as in DistributedDataParallel's buckets

Run = Callable[[Sequence[Tensor]], Any]  # the model's forward as a function of a call's tensors


class Index(int):
    """The index of a tensor in a list of tensors."""


class Outputs(NamedTuple):
    """The tensors that a model returned, each once, and its result's leaves, with indices instead of tensors."""

    tensors: list[Tensor]
    leaves: list[Any]
    spec: TreeSpec

    @classmethod
    def of(cls, result: Any) -> Outputs:
        leaves, spec = tree_flatten(result)
        tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
        indices = {id(t): Index(i) for i, t in enumerate(tensors)}
        return cls(tensors, [indices.get(id(leaf), leaf) for leaf in leaves], spec)

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """Return the result, made of other tensors."""
        return tree_unflatten([tensors[leaf] if type(leaf) is Index else leaf for leaf in self.leaves], self.spec)


@dataclass(eq=False)
class Part:
    """A part of the backward pass: a node of autograd.

    outputs: numbers of the outputs whose gradients it takes; none if it goes on with what an earlier part has begun.
    indices: of the tensors that it computes gradients of, among those that want one.
    is_captured: whether a graph computes them; else the forward pass runs again.
    replay: runs that graph. None when it is released.
    gradients: its results.
    """

    outputs: list[int]
    indices: list[int]
    is_captured: bool = False
    replay: Replay | None = None
    gradients: Sequence[Tensor] = ()


class Arena:
    """Graphs that share memory. What the forward pass of a call has saved there lasts until the next replay."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.call: Callable[[], Call | None] = lambda: None  # a weak reference

    def is_free(self) -> bool:
        """Return whether no call still needs what it has saved."""
        call = self.call()
        return call is None or call.left == 0


class Captured:
    """The graphs of one kind of call.

    Args:
        run: the model's forward.
        arena: where the graphs are.
        model: whose parameters `run` reads.
        tensors: of a call.
        with_gradient: numbers of the outputs that gradients come for; none in inference.
        grouped: give out gradients in groups, each with a graph of its own, as soon as they are computed.
        draws: whether the forward pass draws random numbers.
    """

    def __init__(
        self, run: Run, arena: Arena, model: nn.Module, tensors: Sequence[Tensor], with_gradient: frozenset[int],
        grouped: bool, draws: bool,
    ) -> None:  # fmt: skip
        self.run, self.arena, self.model, self.draws = run, arena, model, draws
        self.grouped, self.replays, self._is_unwanted = grouped, 0, False
        record, before = arena.recorder.record, arena.recorder.bytes()
        self.inputs, self._are_leaves = [static_copy(t) for t in tensors], [t.is_leaf for t in tensors]
        self.wanted_inputs = sum(t.requires_grad for t in tensors)
        self.description = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
        self._live: tuple[list[Tensor], list[Tensor]] = [], []  # outputs and tensors that want gradients
        (outputs, self._static), self._forward = record(self._run_forward)
        if with_gradient and leaves_of(outputs.tensors).keys() - {*map(id, self._live[1])}:
            raise Unfit("it uses a tensor that wants gradients and is no parameter of a module in it")
        self.outputs = outputs._replace(tensors=[])
        self.differentiable = [t.requires_grad for t in outputs.tensors]
        self.parts: list[Part] = []
        self.out_gradients = {i: torch.empty_like(self._static[i]) for i in sorted(with_gradient)}
        if with_gradient:
            self._capture_backward(outputs.tensors)
        del outputs
        self.groups = [part for part in self.parts if part.is_captured]  # the last to run is the first
        self._live = [], []  # what was saved is released: the memory is there for other captures of this arena
        outside = sum(t.untyped_storage().nbytes() for t in (*self.inputs, *self.out_gradients.values()))
        self.bytes = arena.recorder.bytes() - before + outside

    # ---- what is captured ----

    def _run_forward(self, _: Replay) -> tuple[Outputs, list[Tensor]]:
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in self.inputs]
        torch.clear_autocast_cache()
        # Parameters of their own: no hooks, and no gradient nodes that belong to another stream
        with replaced(self.model, as_leaf) as parameters:
            outputs = Outputs.of(self.run([*map(as_argument, inputs, self._are_leaves)]))
        torch.clear_autocast_cache()
        self._live = outputs.tensors, [t for t in (*inputs, *parameters) if t.requires_grad]
        return outputs, [t.detach() for t in outputs.tensors]

    def _capture_backward(self, outputs: Sequence[Tensor]) -> None:
        wanted = self._live[1]
        # A part for each output that no gradient is expected for: autograd calls hooks of all that a node has a
        # gradient for, so those that only this output depends on must not belong to another node.
        for i, t in enumerate(outputs):
            if self.differentiable[i] and i not in self.out_gradients:
                leaves = leaves_of([t])
                self.parts.append(Part([i], [k for k, w in enumerate(wanted) if id(w) in leaves]))
        (gradients, group_of), replays = self.arena.recorder.record(self._run_backward)
        if self.grouped and any(g is None for g in gradients):  # DistributedDataParallel would wait for it
            raise Unfit("a parameter has no gradient, under DistributedDataParallel")
        others = {i for part in self.parts for i in part.outputs}
        for group, replay in reversed([*enumerate(replays)]):
            chosen = {k: g for k, g in enumerate(gradients) if g is not None and group_of[k] == group}
            taken = [i for i in range(len(outputs)) if group == 0 and i not in others]
            self.parts.append(Part(taken, [*chosen], True, replay, [*chosen.values()]))

    def _run_backward(self, cut: Replay) -> tuple[list[Tensor | None], list[int]]:
        outputs, wanted = self._live
        # Hooks hold no tensors: they, and all that the capture has saved, would never be freed if it is interrupted
        found, sizes, grouped = leaves_of(outputs), [t.nbytes for t in wanted], self.grouped
        sources = [found.get(id(t), 0) for t in wanted]
        groups, left, ready, group = [0] * len(wanted), sum(sizes), 0, 0
        awaited = Counter(found.values())  # how many gradients each node has still to give

        def gradient_is_ready(_: Tensor, i: int) -> None:
            nonlocal left, ready, group
            groups[i], awaited[sources[i]] = group, awaited[sources[i]] - 1
            left, ready = left - sizes[i], ready + sizes[i]
            if grouped and left and ready >= _GROUP_BYTES and not awaited[sources[i]]:
                cut()
                group, ready = group + 1, 0

        for i, t in enumerate(wanted):
            t.register_hook(partial(gradient_is_ready, i=i))
        of, given = [outputs[i] for i in self.out_gradients], list(self.out_gradients.values())
        with torch.autocast(wanted[0].device.type, enabled=False):  # backward passes run outside of it
            return list(torch.autograd.grad(of, wanted, given, allow_unused=True)), groups

    # ---- replays ----

    def replay_forward(self, tensors: Sequence[Tensor], rows: int | None) -> list[Tensor]:
        """Replay the forward pass. Return copies of the outputs. rows: how many of each output; None: all."""
        self.replays += 1
        self.arena.recorder.begin_replay()
        for static, t in zip(self.inputs, tensors, strict=True):
            if static.shape == t.shape:
                static.copy_(t)
            else:
                static[: len(t)].copy_(t)
                static[len(t) :].zero_()
        for replay in self._forward:
            replay()
        return copies(self._static if rows is None else [t[:rows] for t in self._static])

    def replay_backward(self, part: Part, given: Sequence[Tensor | None]) -> list[Tensor]:
        """Replay a part of the backward pass. Return copies of its gradients. given: for its outputs."""
        self.arena.recorder.begin_replay()
        for i, g in zip(part.outputs, given, strict=False):
            if g is not None:
                self.out_gradients[i].copy_(g)
        assert part.replay is not None
        part.replay()
        return copies(part.gradients)

    def attach(self, call: Call, outputs: list[Tensor], wanted: Sequence[Tensor]) -> list[Tensor]:
        """Return the copied outputs as functions of the tensors that want gradients. A captured part is linked to the
        one that runs after it by a token, an empty tensor: an input of the first and the output of the second."""
        self.arena.call = weakref.ref(call)
        token: Sequence[Tensor] = ()
        attached = list(outputs)
        for part in self.parts:
            results = [outputs[i] for i in part.outputs] or [torch.empty(0, device=outputs[0].device)]
            made = _apply(call, part, results, *[wanted[k] for k in part.indices], *(token if part.is_captured else ()))
            if part.outputs:
                for i, t in zip(part.outputs, made, strict=True):
                    attached[i] = t
            else:
                token = made
        return attached

    def release(self) -> None:
        """Release the graphs and their memory: now, or when the backward pass of the last call is done."""
        self._is_unwanted = True
        call = self.arena.call()
        self.done(call.left if call is not None and call.captured is self else 0)

    def done(self, left: int) -> None:
        """Note how many captured parts of the last call are left. What is unwanted is released at 0: outputs that the
        caller keeps have no need of it."""
        if self._is_unwanted and left == 0:
            self._forward, self._static, self.inputs, self.out_gradients = [], [], [], {}
            for part in self.groups:
                part.replay, part.gradients = None, ()


class Call:
    """A replayed forward pass that gradients may be wanted of.

    tensors, parameters: of the call and of the model.
    held: other tensors of the model. The graphs read their memory, which the model may let go of.
    is_gone: returns whether memory of the model's tensors was freed even so, as `.data` and half() free it.
    again: function (the call's tensors, whether gradients are differentiated) that runs the forward pass without a
        graph, as it was. It returns the outputs, and the tensors that want gradients.
    read: function that is told the numbers of the outputs that a backward pass has had gradients for; or None.
    left: how many captured parts have not been computed.
    """

    def __init__(
        self, captured: Captured, tensors: Sequence[Tensor], parameters: Sequence[Tensor],
        held: Sequence[Sequence[Tensor]], is_gone: Callable[[], bool],
        again: Callable[[Sequence[Tensor], bool], tuple[list[Tensor], list[Tensor]]],
        read: Callable[[set[int]], None] | None,
    ) -> None:  # fmt: skip
        self.captured, self.tensors, self.left = captured, tensors, len(captured.groups)
        self._parameters, self._versions = parameters, versions_of(parameters)
        self._held, self._is_gone, self._again, self._read = held, is_gone, again, read
        self._came: set[int] = set()  # the numbers of the outputs that this backward pass has had gradients for
        self._recomputed: list[Tensor | None] | None = None  # for the captured parts of this backward pass

    def gradients(
        self, part: Part, given: Sequence[Tensor | None], saved: Callable[[], Sequence[Tensor]]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of a part.

        Args:
            given: the gradients of its outputs.
            saved: returns the call's tensors. PyTorch raises if they have changed since, or were released.

        Raises:
            RuntimeError: parameters, or for a recomputation the model, have changed since the forward pass.
        """
        of = {i: g for i, g in zip(part.outputs, given, strict=False) if g is not None}
        if part.outputs:
            self._check_parameters(part)
            if self._read is not None:
                if not self._came:
                    after_backward(self._tell)
                self._came |= of.keys()
        if not part.is_captured:
            recomputed = self._recompute(of, saved())
            return [recomputed[k] for k in part.indices]
        if part.outputs:
            batched = is_batched_gradient is None or any(map(is_batched_gradient, of.values()))
            mapped = batched or is_observed(profilers=False)
            first = self.left == len(self.captured.groups)
            as_captured = first and of.keys() == self.captured.out_gradients.keys()
            fits = as_captured and not mapped and not torch.is_grad_enabled()  # a gradient of gradients is wanted
            if fits and self._is_gone():
                raise RuntimeError("the model has changed between a forward pass and its backward pass")
            self._recomputed = None if fits else self._recompute(of, saved())
        if self._recomputed is None:
            gradients = self.captured.replay_backward(part, given)
            self.left -= 1  # from 0 on other threads may replay what is in this arena
            self.captured.done(self.left)
            return gradients
        recomputed = self._recomputed
        if part is self.captured.groups[0]:
            self._recomputed = None
        return [recomputed[k] for k in part.indices]

    def _tell(self) -> None:
        assert self._read is not None
        self._read(self._came)
        self._came = set()

    def _check_parameters(self, part: Part) -> None:
        """Raise if parameters have changed since the forward pass. Those that another part has computed gradients of
        may have: hooks on gradients may run an optimizer."""
        if self._versions == (now := versions_of(self._parameters)):
            return
        captured = self.captured
        indices = {k for each in (captured.groups if part.is_captured else [part]) for k in each.indices}
        wanted = [i for i, p in enumerate(self._parameters) if p.requires_grad]
        computed = {i for k, i in enumerate(wanted, captured.wanted_inputs) if k not in indices}
        if any(a != b and i not in computed for i, (a, b) in enumerate(zip(self._versions, now, strict=True))):
            raise RuntimeError("a parameter was modified in place between a forward pass and its backward pass")

    def _recompute(self, of: dict[int, Tensor], tensors: Sequence[Tensor]) -> list[Tensor | None]:
        differentiated = torch.is_grad_enabled()
        with torch.enable_grad():
            outputs, wanted = self._again(tensors, differentiated)
        results = [outputs[i] for i in of]
        gradients = torch.autograd.grad(results, wanted, [*of.values()], allow_unused=True, create_graph=differentiated)
        return list(gradients)


class _Node(torch.autograd.Function):
    """Computes the gradients of a part."""

    @staticmethod
    def forward(ctx: Any, call: Call, part: Part, results: list[Tensor], *tensors: Tensor) -> Any:
        ctx.call, ctx.part, ctx.inputs = call, part, len(tensors)
        ctx.set_materialize_grads(False)
        if part.outputs:
            ctx.save_for_backward(*call.tensors)
            differentiable = [call.captured.differentiable[i] for i in part.outputs]
            ctx.mark_non_differentiable(*(t for t, d in zip(results, differentiable, strict=True) if not d))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        gradients = ctx.call.gradients(ctx.part, given, lambda: ctx.saved_tensors)
        return (None, None, None, *gradients, *[None] * (ctx.inputs - len(gradients)))  # none for a token


_apply = super(torch.autograd.Function, _Node).apply  # not its `apply`, see ops/runtime/autograd.py
