"""The forward of a graphed model: which calls are warmed up, captured, replayed, or run as without graphs."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils._pytree import tree_flatten, tree_unflatten

from fastvit.blocks.hooks import has_global_hooks
from fastvit.cuda_graphs import recorder
from fastvit.cuda_graphs.captured import Arena, Call, Captured, Index, Outputs
from fastvit.cuda_graphs.kind import WARM_UPS, Kind, circumstances, ddp_runs, described
from fastvit.cuda_graphs.recorder import Unfit
from fastvit.cuda_graphs.rounding import Leaves, coarsest, grown, rows_are_independent
from fastvit.cuda_graphs.tensors import as_argument, as_leaf, copies, put_back, replaced
from fastvit.cuda_graphs.version import OPAQUE, Version, changes, marks_of, versions_of, why_not
from fastvit.cuda_graphs.warm_up import run_and_judge, watch_backward
from fastvit.modules.features import Backbone
from fastvit.ops.runtime import backend
from fastvit.ops.runtime.torch_private import after_backward, current_function_mode, top_saved_tensors_hooks

_MOST_ARENAS = 4  # calls that wait for their backward pass at one time, each with memory of its own
_MOST_CAPTURES = 16  # for each graph that is kept: more would cost more time than they save
_MOST_VERSIONS, _KEPT_VERSIONS = 100, 8  # of the model
_MOST_KINDS = 1000
_CHANGES_TENSORS = "it changes tensors of the model in place that are no buffers"


class Graphed:
    """Stands for a method of a model, see `method_of`. Copies and pickles have no graphs, and capture their own.

    Args:
        model: has the method.
        name: of the method.
        keep: how many graphs are kept.
        rounded: function of the leaves of a call in inference that returns what it may run as instead; None: as it is.
        before: what the instance had under that name, or None.
    """

    def __init__(
        self, model: nn.Module, name: str, keep: int, rounded: Callable[[list[Any]], Leaves] | None, before: Any
    ) -> None:
        self.model, self.name, self.keep, self.rounded, self.before = model, name, keep, rounded, before
        self.captured: OrderedDict[Captured, Kind] = OrderedDict()  # the last used is the last
        self.reasons: Counter[str] = Counter()  # why calls ran as without graphs
        self._kinds: dict[Any, Kind] = {}
        self._lock = threading.RLock()
        self._arenas: list[Arena] = []
        self._versions: list[Version] = []  # the last used is the first
        self._refusal: str | None = None  # why no graph can stand for the model as it was in the last call
        self._made = Counter[str]()

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("model", "name", "keep", "rounded", "before")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def plain(self) -> Callable[..., Any]:
        """The method without graphs."""
        return self.before or partial(getattr(type(self.model), self.name), self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # What compiles, traces, counts or captures has to see what the model calls
        if is_compiling() or recorder.Recorder.is_capturing():
            return self.plain(*args, **kwargs)
        if not backend.is_observed(profilers=False):
            try:
                return self._run(args, kwargs)
            except Unfit as reason:
                self.note(str(reason))
        elif current_function_mode is not None and type(current_function_mode()).__name__ == "DeviceContext":
            self.note("torch.set_default_device, or a device as context, is a mode that sees every call")
        return self.plain(*args, **kwargs)

    def note(self, reason: str) -> None:
        """Count a call that ran as without graphs. Warn of the first of a reason."""
        self.reasons[reason] += 1
        if self.reasons[reason] == 1:
            name = type(self.model).__name__
            warnings.warn(f"{name} runs as without fastvit.graphs: {reason}", stacklevel=6)

    def forget(self) -> None:
        """Release all graphs."""
        with self._lock:
            for captured in [*self.captured]:
                self._release(captured)
            self._kinds, self._arenas, self._versions = {}, [], []

    # ---- internal ----

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if has_global_hooks():
            raise Unfit("there are hooks on all modules, which replays do not call")
        if top_saved_tensors_hooks is None or top_saved_tensors_hooks(True) is not None:
            raise Unfit("hooks see what is saved for the backward pass, as around a checkpoint")
        values, spec = (list(args), None) if _is_one_tensor(args, kwargs) else tree_flatten((args, kwargs))
        given, values = values, _once(values)
        tensors = [v for v in values if isinstance(v, Tensor)]

        def plain() -> Any:
            """Run the call as it is. No graph runs calls of its kind if it changes lists and dicts among its arguments,
            or tensors of the model other than buffers, which a recomputation would change again."""
            held = [*parameters, *others]
            versions = versions_of(held)
            result = self.plain(*args, **kwargs)
            if versions != versions_of(held):
                kind.reason = _CHANGES_TENSORS
            if spec is not None:
                now, spec_now = tree_flatten((args, kwargs))
                if spec != spec_now or any(a is not b for a, b in zip(given, now, strict=True)):
                    kind.reason = "it changes its arguments in place"
            return result

        with self._lock:
            version, parameters, buffers, others = self._current_version()
            if not tensors:
                raise Unfit("it has no tensor as argument")
            recorder.Recorder.check(tensors)
            if reason := why_not([*tensors, *parameters[:1], *buffers[:1]], of="with its arguments, the model has"):
                raise Unfit(reason)
            wants = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *parameters))
            if wants and after_backward is None:
                raise Unfit("this PyTorch does not tell when a backward pass ends")
            leaves = Leaves(values, [None] * len(tensors))
            if self.rounded is not None and not (wants or self.model.training):
                if args and isinstance(args[0], list | tuple):
                    if isinstance(self.model, Backbone):
                        return self.plain(*args, **kwargs)  # which calls `_blocks_packed`, with graphs of its own
                    raise Unfit("a list has no batch size to be rounded")
                leaves = self.rounded(values)
            key = version, spec, *described(leaves, wants), *circumstances(tensors[0].device.type), wants
            if len(self._kinds) > _MOST_KINDS:
                self._kinds = {key: kind for key, kind in self._kinds.items() if kind.captured}
            kind = self._kinds.setdefault(key, Kind())
            if kind.reason:
                raise Unfit(kind.reason)
            run = self._function(spec, leaves)
            tensors = [v for v in leaves.values if isinstance(v, Tensor)]
            if kind.is_warm(wants) and (leaves.rows is None or kind.rows_are_independent):
                captured = self._captured(kind, run, leaves, tensors)
                held = (parameters, buffers, others) if wants else None
                return self._replay(captured, kind, run, version, leaves, tensors, held)
            with recorder.alone():
                if leaves.rows is not None and not kind.rows_are_independent:
                    result = self._compare_rows(kind, run, leaves, tensors, buffers, plain)
                elif wants and kind.forwards < WARM_UPS:  # not in every call of a loop without backward passes
                    before = marks_of([*buffers, *others, *parameters])
                    result = self._warm_up(kind, lambda _: plain(), leaves, tensors, wants)
                    changed = changes(before, marks_of([*buffers, *others, *parameters]))
                    kind.buffers |= changed
                    if any(i >= len(buffers) for i in changed):
                        kind.reason = _CHANGES_TENSORS
                else:
                    as_it_is = leaves.rows is None
                    result = self._warm_up(kind, (lambda _: plain()) if as_it_is else run, leaves, tensors, wants)
            if kind.forwards > 1 and version.tensors(self.model) is None:  # the first call may make tables
                kind.reason = "it changes the model: its modes, hooks, parameters or other attributes"
            return result

    def _current_version(self) -> tuple[Version, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Return the model's present version and its tensors. Forget versions that will not return."""
        for i, version in enumerate(self._versions):
            if (tensors := version.tensors(self.model)) is not None:
                self._versions.insert(0, self._versions.pop(i))
                return version, *tensors
        if self._made["version"] == _MOST_VERSIONS:
            raise Unfit(
                self._refusal or "the model changes too often: its modes, hooks, parameters or other attributes"
            )
        self._made["version"] += 1
        version = Version(self.model)
        self._refusal = version.reason
        if version.reason:
            raise Unfit(version.reason)
        self._versions = [version, *(v for v in self._versions if not v.is_gone())][:_KEPT_VERSIONS]
        for key in [key for key in self._kinds if key[0] not in self._versions]:
            for captured in [*self._kinds.pop(key).captured.values()]:
                self._release(captured)
        tensors = version.tensors(self.model)
        assert tensors is not None
        return version, *tensors

    def _function(self, spec: Any, leaves: Leaves) -> Callable[[Sequence[Tensor]], Any]:
        """Return the method as a function of the tensors among its arguments."""
        others = [Tensor if isinstance(v, Tensor) else v for v in leaves.values]  # holds no tensor of the caller

        def run(tensors: Sequence[Tensor]) -> Any:
            if spec is None:
                return self.plain(*tensors)
            left = iter(tensors)
            values = [next(left) if v is Tensor else tensors[v] if type(v) is Index else v for v in others]
            args, kwargs = tree_unflatten(values, spec)
            return self.plain(*args, **kwargs)

        return run

    def _arena(self, kind: Kind, device: torch.device) -> Arena:
        """Return where a call may run now, if possible where its kind is captured."""
        free = [a for a in self._arenas if a.recorder.device == device and a.is_free()]
        for arena in free:
            if arena in kind.captured:
                return arena
        if free:
            return free[0]
        if len(self._arenas) == _MOST_ARENAS:
            raise Unfit(f"{_MOST_ARENAS} earlier calls wait for their backward passes")
        self._arenas.append(Arena(recorder.Recorder(device)))
        return self._arenas[-1]

    def _warm_up(self, kind: Kind, run: Callable[..., Any], leaves: Leaves, tensors: list[Tensor], wants: bool) -> Any:
        of = self._arena(kind, tensors[0].device).recorder
        result, outputs = run_and_judge(kind, lambda: run(grown(tensors, leaves.sizes)), tensors, of, wants)
        if not wants:
            kind.calls += 1
            return result if leaves.rows is None else outputs.result([t[: leaves.rows] for t in outputs.tensors])
        if kind.forwards > WARM_UPS and not kind.calls:
            self.note("no backward pass came; torch.no_grad() would let the call be captured")
        version = self._versions[0]
        watch_backward(kind, outputs, lambda: version.tensors(self.model) is not None)
        return result

    def _compare_rows(
        self, kind: Kind, run: Callable[..., Any], leaves: Leaves, tensors: list[Tensor], buffers: Sequence[Tensor],
        plain: Callable[[], Any],
    ) -> Any:  # fmt: skip
        """Run a call as it is, and with more rows unless that has been done. Note whether the results agree."""
        result = plain()
        if kind.rows_are_independent is None and leaves.rows and not kind.reason:
            own = Outputs.of(result)
            of, before = self._arena(kind, tensors[0].device).recorder, copies(buffers)
            random = of.random_state()  # what it draws does not count

            def drawn(tensors: Sequence[Tensor]) -> Any:
                with of.drawing_from(random):
                    return run(tensors)

            precision = coarsest([*tensors, *own.tensors, *self.model.parameters()])
            try:
                with recorder.may_wait():
                    kind.rows_are_independent = rows_are_independent(drawn, own, tensors, leaves, precision)
            except Exception as error:  # as where it checks the values of its inputs
                kind.reason = f"with more samples it fails: {recorder.described(error)}"
            put_back(buffers, before)
            kind.calls += 1
        if kind.rows_are_independent is False:
            self.note("its results depend on the batch size, so that it cannot be rounded")
        return result

    def _captured(self, kind: Kind, run: Callable[..., Any], leaves: Leaves, tensors: list[Tensor]) -> Captured:
        """Return the graphs of a kind of calls; capture them if there are none."""
        arena = self._arena(kind, tensors[0].device)
        gradients = frozenset(kind.gradients)
        captured = kind.captured.get(arena)
        if captured is not None and captured.out_gradients.keys() != gradients:
            self._release(captured)
            captured = None
        if captured is None:
            with recorder.alone():
                self._made["capture"] += 1
                if self._made["capture"] > _MOST_CAPTURES * self.keep:
                    raise Unfit(f"there were {_MOST_CAPTURES * self.keep} captures: calls are of too many kinds")
                larger = grown(tensors, leaves.sizes)
                for hook in kind.hooks:
                    hook.remove()
                try:
                    captured = Captured(run, arena, self.model, larger, gradients, ddp_runs(), kind.draws)
                except (Unfit, RuntimeError) as error:  # the latter without memory, or a snapshot of it
                    kind.reason = recorder.described(error)
                    raise Unfit(kind.reason) from error
            kind.captured[arena] = captured
            self.captured[captured] = kind
            if len(self.captured) > self.keep:
                self._release(next(iter(self.captured)))
        self.captured.move_to_end(captured)
        return captured

    def _release(self, captured: Captured) -> None:
        del self.captured.pop(captured).captured[captured.arena]
        captured.release()

    def _replay(
        self, captured: Captured, kind: Kind, run: Callable[..., Any], version: Version, leaves: Leaves,
        tensors: list[Tensor], held: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]] | None,
    ) -> Any:  # fmt: skip
        """Replay a call. held: the model's parameters, buffers and other tensors; None in inference."""
        of = captured.arena.recorder
        state = of.random_state() if captured.draws and held is not None else None
        changed = [] if held is None else [held[1][i] for i in sorted(kind.buffers)]
        with torch.no_grad():
            found = copies(changed)
            outputs = captured.replay_forward(tensors, leaves.rows)
        if held is not None:
            parameters = held[0]
            device = of.device.type
            cast = (
                torch.get_autocast_dtype(device),
                torch.is_autocast_enabled(device),
                torch.is_autocast_cache_enabled(),
            )

            def again(tensors: Sequence[Tensor], differentiated: bool) -> tuple[list[Tensor], list[Tensor]]:
                if version.tensors(self.model) is None:
                    raise RuntimeError("the model has changed between a forward pass and its backward pass")
                stand_in = _view if differentiated else as_leaf
                inputs = [stand_in(t) if t.requires_grad else t for t in tensors]
                arguments = map(as_argument, inputs, [t.is_leaf or differentiated for t in tensors])
                stand_ins, buffers = replaced(self.model, stand_in), [*self.model.buffers()]
                before = copies(buffers)
                put_back(changed, found)
                with torch.autocast(device, *cast), of.drawing_from(state), stand_ins as parameters:
                    results = Outputs.of(run([*arguments])).tensors
                put_back(buffers, before)
                return results, [*(t for t in inputs if t.requires_grad), *parameters]

            read = None if kind.settled else kind.read
            call = Call(captured, tensors, parameters, held[1:], version.is_gone, again, read)
            outputs = captured.attach(call, outputs, [t for t in (*tensors, *parameters) if t.requires_grad])
        return captured.outputs.result(outputs)


OPAQUE.add(Graphed)


def method_of(graphed: Graphed) -> Any:
    """Return what is put on the model's instance: a partial, which torch.export takes, with the method's signature,
    which transformers' Trainer reads."""
    method = partial(_call, graphed)
    method.__signature__ = inspect.signature(graphed.plain)  # type: ignore[attr-defined]
    return method


def graphed_of(value: Any) -> Graphed | None:
    """Return the `Graphed` of what `method_of` returned, or None for anything else."""
    return value.args[0] if isinstance(value, partial) and value.func is _call else None


def _call(graphed: Graphed, /, *args: Any, **kwargs: Any) -> Any:
    return graphed(*args, **kwargs)


def _is_one_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether arguments have no structure, which would take 30 us to compare."""
    return not kwargs and len(args) == 1 and isinstance(args[0], Tensor)


def _once(values: list[Any]) -> list[Any]:
    """Return values with the index of a tensor, among the tensors, where it comes again."""
    indices: dict[int, Index] = {}
    once: list[Any] = []
    for v in values:
        is_new = not isinstance(v, Tensor) or id(v) not in indices
        once.append(v if is_new else indices[id(v)])
        if is_new and isinstance(v, Tensor):
            indices[id(v)] = Index(len(indices))
    return once


def _view(t: Tensor) -> Tensor:
    return t.view_as(t)
