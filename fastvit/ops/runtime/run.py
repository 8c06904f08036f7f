"""Run a public op: in Python, recorded, or replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fastvit.ops.runtime.autograd import FusedNode, GradientIndices, OfBackward, transforming
from fastvit.ops.runtime.backend import Route
from fastvit.ops.runtime.call import Call, RecordedCall, begin
from fastvit.ops.runtime.record import Recorder, Replay
from fastvit.ops.runtime.torch_private import unwrap_if_dead

Prepared = tuple[type[FusedNode], bool, Any, tuple[Any, ...]]  # node, whether it needs autograd, options, tensors


def run(op: str, prepare: Callable[..., Prepared], arguments: tuple[Any, ...], options: tuple[Any, ...] = ()) -> Any:
    """Run a public op; return its results: a tensor or a tuple.

    Args:
        op, arguments, options: as `begin` takes them.
        prepare: (*arguments, *options) -> the node, whether the call may need a gradient, and the node's options and
            tensors. It checks the call. What it computes, such as views and seeds, is recorded with it.
    """
    call, tensors = begin(op, arguments, options)
    if call.replay is not None and (results := call.replay(tensors)) is not None:
        return results[0] if call.single else results
    if isinstance(call, RecordedCall):
        recorder = Recorder(tensors)
        with recorder:
            prepared = prepare(*arguments, *options)
        results, replay = _recorded(recorder, call.route, prepared, tensors)
        call.keep(replay, single=prepared[0].single)
    else:
        prepared = prepare(*arguments, *options)
        results = _in_python(call, prepared)
    return results[0] if prepared[0].single else results


def _in_python(call: Call, prepared: Prepared) -> tuple[Any, ...]:
    node, autograd, options, tensors = prepared
    t = node.Inputs(options, call.route, *tensors)
    if not autograd:
        results, _ = node.compute(node.cast_inputs(t))
    elif unwrap_if_dead is None or transforming() or is_dynamo_compiling():
        t = node.cast_inputs(t)
        results = node.in_two_steps.apply(*t[:2], *_repeats_as_views(node.tensors(t)))
        results = results if isinstance(results, tuple) else (results,)
        if "result" in node.saved and is_dynamo_compiling():
            # An edit in place would silently change what is saved; in other calls the backward pass then raises.
            # Inductor removes the copy if nothing edits it.
            results = results[0].clone(), *results[1:]
        results = results[: len(results) - len(node.intermediates_of(t))]
    else:
        flat = node.tensors(t)
        if not call.is_plain:
            flat = [a if a is None else unwrap_if_dead(a) for a in flat]
        results = node.in_one_step(functools.partial(_work, node, options, call.route), None, *flat)
    return results


def _work(
    node: type[FusedNode], options: Any, route: Route, *tensors: Any, needs_input_grad: tuple[bool, ...]
) -> tuple[tuple[Any, ...], OfBackward]:
    """Compute the results of a node and what it saves."""
    t = node.cast_inputs(node.named(tensors, options, route))
    results, intermediates = node.compute(t)
    values = node.saved_tensors(t, intermediates, results, node.named(needs_input_grad))
    of_backward = OfBackward(options, tuple(values), node.sizes(t), needs_input_grad, len(results))
    return (*results, *values.values()), of_backward


def _recorded(
    recorder: Recorder, route: Route, prepared: Prepared, given: Sequence[Tensor]
) -> tuple[tuple[Any, ...], Replay | None]:
    """Run a call of these tensors, and record it. Also return what replays it from tensors like these."""
    node, autograd, options, tensors = prepared
    t = node.Inputs(options, route, *tensors)
    if not autograd:
        with recorder:
            results, _ = node.compute(node.cast_inputs(t))
        return results, recorder.plan(results)
    replay: Replay | None = None

    def work(*tensors: Any, needs_input_grad: tuple[bool, ...]) -> Any:
        nonlocal replay
        with recorder:
            outputs, of_backward = _work(node, options, route, *tensors, needs_input_grad=needs_input_grad)
        plan, indices = recorder.plan(outputs), _gradient_indices(given, tensors, needs_input_grad)
        if plan is not None and indices is not None:
            replay = _with_gradient(node, plan, of_backward, indices)
        return outputs, of_backward

    return node.in_one_step(work, None, *node.tensors(t)), replay


def _with_gradient(node: type[FusedNode], plan: Replay, of_backward: OfBackward, indices: GradientIndices) -> Replay:
    """Return what replays a call with the node."""

    def work(*tensors: Any, needs_input_grad: tuple[bool, ...]) -> Any:
        if (outputs := plan([*tensors])) is None:
            raise _NotReplayed
        return outputs, of_backward

    apply = node.in_one_step

    def replay(tensors: list[Any]) -> Any:
        try:
            return apply(work, indices, *tensors)
        except _NotReplayed:
            return None

    return replay


class _NotReplayed(Exception):
    """A plan does not take these tensors."""


def _gradient_indices(
    given: Sequence[Tensor], tensors: Sequence[Any], needs_input_grad: Sequence[bool]
) -> GradientIndices | None:
    """Return them. None if a gradient is that of another tensor, of which only an expanded view is known to be one of a
    given tensor."""
    indices = [-1] * len(given)
    shapes: dict[int, torch.Size] = {}
    for index, t in enumerate(tensors):
        if t is not None and needs_input_grad[index]:
            found = [i for i, g in enumerate(given) if indices[i] == -1 and g.requires_grad and _is_expanded(t, g)]
            if not found:
                return None
            i = min(found, key=lambda i: given[i] is not t)
            indices[i] = index
            if given[i].shape != t.shape and given[i].numel() == t.numel():
                shapes[i] = given[i].shape
    return indices, shapes


def _is_expanded(view: Tensor, t: Tensor) -> bool:
    """Return whether the view is t, with dimensions of one element repeated, or put before the others."""
    if view is t:
        return True
    if view.data_ptr() != t.data_ptr() or view.dtype is not t.dtype or view.dim() < t.dim():
        return False
    aligned = t[(None,) * (view.dim() - t.dim())]
    if any(size not in (1, wanted) for size, wanted in zip(aligned.shape, view.shape, strict=True)):
        return False
    return aligned.expand(view.shape).stride() == view.stride()


def _repeats_as_views(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors, with views for repeated ones while torch.compile traces: it refuses a Function that gets one
    tensor twice, as linear(x, weight, residual=x) does."""
    if not is_dynamo_compiling():
        return [*tensors]
    seen: list[Any] = []
    for a in tensors:
        repeated = a is not None and any(a is other for other in seen)
        seen.append(a.view_as(a) if repeated else a)
    return seen
