"""Register an op: one schema with two implementations, one on PyTorch's own functions and one that launches Triton
kernels (`launch.py` of the op's folder, imported by the first such call).

Both are one op of the `fastvit::` namespace, with a fake implementation for `torch.compile` and `torch.export`.
`backend.py` and `call.py` decide for each call which one runs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastvit.ops.runtime import record
from fastvit.ops.runtime.backend import (
    KernelUnsupported,
    Route,
    choose_route,
    fall_back,
    is_jit_tracing,
    wants_triton,
)
from fastvit.ops.runtime.call import begin
from fastvit.ops.runtime.torch_private import is_any_autocast_enabled

_LIB = torch.library.Library("fastvit", "DEF")
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}  # overload -> its decomposition
IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {}  # overload -> its implementation: (*arguments, route=, out=)
LAUNCH_MODULES: set[str] = set()  # names of modules, imported when a kernel is first wanted
_EXC = "torch._inductor.exc"
_SHOWS_LATER = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
_done: set[int] = set()
_DISPATCHER, _ATEN = Route.DISPATCHER, Route.ATEN


def register(
    schema: str,
    *,
    fake: Callable[..., Any],
    plain: Callable[..., Any] | None = None,
    aten: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
) -> Callable[..., Any]:
    """Define `fastvit::<schema>` and return the function that the rest of the package calls. It runs the registered op,
    or, where nothing observes the call, the implementation without the dispatcher's 3 us. route=: of the call that it
    is a part of; without one, its own is chosen. out=: for an op whose implementations take it, a tensor or tensors to
    write results into, which may be arguments; the dispatcher's op returns new ones all the same, see `takes_out`.

    schema: "name(Tensor x, ...) -> ..."; the first argument is a tensor on the op's device. No argument is mutated
        and no output aliases an input or another output.
    fake: the op on fake tensors; shapes, dtypes and strides exactly as both implementations return them. An argument
        stands for a new contiguous tensor of its shape and dtype. It is defined in the op's folder: `launch.py` there
        has a function of the op's name, with arguments as in the schema, for Triton. That may raise
        `KernelUnsupported`; then the call runs on ATen.
    plain: a forward op in plain PyTorch, most of it calls of `reference.ops`, arguments as in the schema. Exporters
        record it, so it changes nothing in place.
    aten: what a CPU runs instead of `plain`, if that earns its lines by a figure, and for a backward op. Of several
        results, None is one that the call does not have; the dispatcher's op, and `fake`, return an empty tensor. One
        of plain and aten must be given.
    flops: as `torch.utils.flop_counter.register_flop_formula` takes it, shapes for tensors, `out_shape` by keyword;
        None for an op without a matmul.
    """
    name = schema[: schema.index("(")]
    launch_module = fake.__module__.rpartition(".")[0] + ".launch"
    LAUNCH_MODULES.add(launch_module)
    on_aten: Any = aten or plain
    assert on_aten is not None, f"{name} has neither plain nor aten"

    @functools.cache
    def launcher() -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(importlib.import_module(launch_module), name)
        return function

    def op(*args: Any, route: Route | None = None, out: Any = None) -> Any:
        if route is None:
            route = choose_route(*args)
        if route is _DISPATCHER:
            if runner is not None:
                with _isolated(args[0]):
                    return runner(overload, args, {} if out is None else {"out": out})
            if plain is not None and _wants_functions_of_torch():
                return plain(*args)
            return overload(*args)
        if route is _ATEN:
            return on_aten(*args) if out is None else on_aten(*args, out=out)
        try:
            return launcher()(*args) if out is None else launcher()(*args, out=out)
        except KernelUnsupported as reason:
            fall_back(name, str(reason))
            if (recorder := record.current()) is not None:
                recorder.refusal = "a kernel was refused"
            with _isolated(args[0]):
                return on_aten(*args) if out is None else on_aten(*args, out=out)

    def dispatched(*args: Any) -> Any:
        x = args[0]
        if torch.is_grad_enabled():
            with torch.no_grad():
                return dispatched(*args)
        call, _ = begin(dispatched_name, args)
        if call.route is _DISPATCHER or is_any_autocast_enabled is None or is_any_autocast_enabled():
            with _isolated(x):
                results = op(*args, route=Route.TRITON if wants_triton(x) else Route.ATEN)
                return _as_tuple(x, results) if has_results else results
        results = call.run(lambda _: _as_tuple(x, op(*args, route=call.route)), [*args])
        return results if has_results else results[0]

    @functools.wraps(fake)
    def faked(*args: Any) -> Any:
        _keep_messages_short()
        results = fake(*args)
        new = [_made(t, args) for t in (results if has_results else (results,))]
        return tuple(new) if has_results else new[0]

    dispatched_name, has_results = f"dispatched {name}", schema.endswith(")")
    _LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    for backend in ("CPU", "CUDA"):
        for layout in ("", "Sparse", "SparseCsr"):
            _LIB.impl(name, dispatched, layout + backend)
    torch.library.register_fake(f"fastvit::{name}", faked, lib=_LIB)
    overload = getattr(torch.ops.fastvit, name).default
    IMPLEMENTATIONS[overload] = op
    if plain is not None:
        DECOMPOSITIONS[overload] = plain
    if flops is not None:
        from torch.utils.flop_counter import register_flop_formula

        register_flop_formula(getattr(torch.ops.fastvit, name))(flops)
    return op


def _made(result: Tensor | None, args: tuple[Any, ...]) -> Tensor:
    """Return a result of a fake implementation."""
    if result is None:
        return args[0].new_empty((0,))
    return result.new_empty(result.shape) if any(result is a for a in args) else result


def _as_tuple(x: Tensor, results: Any) -> tuple[Tensor, ...]:
    """Return results as the dispatcher takes them: an empty tensor for None."""
    if isinstance(results, Tensor):
        return (results,)
    return tuple([x.new_empty((0,)) if result is None else result for result in results])


def _keep_messages_short() -> None:
    """Let Inductor name our ops in its messages without their arguments. Called by the fake implementations, which run
    once Inductor is imported and before it lowers a graph.

    For every custom op, torch 2.9 to 2.12 compose a message that is never shown, with the arguments written out, and
    theirs: 2^depth lines in a residual network. At 12 blocks that took over two minutes; from 2.13 on, only a message
    that is shown is composed.
    """
    if _SHOWS_LATER or (module := sys.modules.get(_EXC)) is None or id(module) in _done:
        return
    _done.add(id(module))
    issue = getattr(module, "OperatorIssue", None)
    if (plain := getattr(issue, "operator_str", None)) is None:
        return

    def operator_str(target: Any, args: Any, kwargs: Any) -> str:
        if getattr(target, "namespace", None) == "fastvit":
            return f"  target: {target}"
        return str(plain(target, args, kwargs))

    issue.operator_str = staticmethod(operator_str)  # type: ignore[union-attr]


def _wants_functions_of_torch() -> bool:
    """Return whether the call is recorded by a tracer that knows PyTorch's own functions only: ONNX, or
    torch.jit.trace, which records no `autograd.Function`, so that an opaque op in its trace would have no gradient."""
    return is_jit_tracing() or (torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export())


Runner = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
runner: Runner | None = None  # see `run_by`


def takes_out(route: Route) -> bool:
    """Return whether ops on the route write into the tensors that they are given for results."""
    return route is not Route.DISPATCHER or runner is not None


@contextlib.contextmanager
def run_by(function: Runner) -> Iterator[None]:
    """Let function(overload, arguments, keywords) run what the dispatcher would, within the context. For studies of
    memory: ops write in place, as they do in calls that nothing observes."""
    global runner
    before, runner = runner, function
    try:
        yield
    finally:
        runner = before


@contextlib.contextmanager
def _isolated(x: Tensor) -> Iterator[None]:
    """Run an implementation that the dispatcher calls. No autocast: the op has chosen its dtypes. No autograd: that is
    the FusedNodes' task, and on when an exported program calls the op itself. On x's device."""
    kind = x.device.type
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if kind != "meta" and torch.is_autocast_enabled(kind):  # autocast refuses meta tensors
            stack.enter_context(torch.autocast(kind, enabled=False))
        if x.is_cuda:
            stack.enter_context(torch.cuda.device(x.device))
        yield
