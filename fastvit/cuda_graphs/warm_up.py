"""Calls before a capture: they run as without graphs, and tell whether a graph could do the same."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastvit.cuda_graphs.captured import Outputs
from fastvit.cuda_graphs.kind import Kind, is_constant
from fastvit.cuda_graphs.recorder import Recorder, may_wait
from fastvit.cuda_graphs.version import versions_of
from fastvit.ops.runtime.torch_private import after_backward


def run_and_judge(
    kind: Kind, call: Callable[[], Any], tensors: Sequence[Tensor], recorder: Recorder, wants: bool
) -> tuple[Any, Outputs]:
    """Run a call, and note what speaks against graphs of its kind.

    Args:
        call: runs the model's forward.
        tensors: its arguments.
        wants: whether gradients are wanted.

    Returns:
        The call's result, as it is and flattened.
    """
    wanted, versions = [t.requires_grad for t in tensors], versions_of(tensors)
    random, host = recorder.random_state(), recorder.host_state()
    before = [t.clone() for t in tensors if t.is_inference()]
    result, waits, checkpoints = recorder.watch(call)
    kind.draws |= not torch.equal(random, recorder.random_state())
    kind.forwards += 1
    outputs = Outputs.of(result)
    odd = [leaf for leaf in outputs.leaves if not is_constant(leaf) or inspect.isfunction(leaf)]
    with may_wait():
        same = all(map(torch.equal, before, (t for t in tensors if t.is_inference())))
    if waits and kind.forwards > 1:  # the first call may wait for tables that it makes
        kind.reason = f"an operation at {waits} waits for the GPU"
    elif host != recorder.host_state():
        kind.reason = "it draws random numbers on the host, which a graph would repeat"
    elif versions != versions_of(tensors) or wanted != [t.requires_grad for t in tensors] or not same:
        kind.reason = "it changes its arguments in place"
    elif odd:
        kind.reason = f"it returns a {type(odd[0]).__name__}, which may change"
    elif kind.draws and checkpoints:
        kind.reason = "it draws random numbers and has checkpoints, which would restore the generator's state"
    elif not wants and any(t.requires_grad for t in outputs.tensors):
        kind.reason = "it uses a tensor that wants gradients and is no parameter of a module in it"
    return result, outputs


def watch_backward(kind: Kind, outputs: Outputs, is_unchanged: Callable[[], bool]) -> None:
    """Let the backward pass of a call tell for which outputs gradients come, and whether a graph could do the same.

    Args:
        is_unchanged: returns whether the model is as it was in the call.
    """
    for hook in kind.hooks:  # of the last call
        hook.remove()
    came, later = set[int](), _computed_from(outputs.tensors)

    def check_after_backward() -> None:
        if not is_unchanged():
            kind.reason = "its backward pass changes the model: its attributes, or modes"

    def gradient_came(gradient: Tensor | None, i: int, output: weakref.ref[Tensor]) -> None:
        if gradient is None:
            return
        if not came and is_unchanged():  # else, the caller has changed it
            after_backward(check_after_backward)
        t = output()
        if t is not None and later[i] & came and (t.retains_grad or len(t._backward_hooks or ()) > 1):
            kind.reason = "the gradient of one output with respect to another is wanted, and replays have none"
        kind.gradient_came(came, later, i)

    kind.hooks = [
        t.register_hook(partial(gradient_came, i=i, output=weakref.ref(t)))
        for i, t in enumerate(outputs.tensors)
        if t.requires_grad
    ]


def _computed_from(outputs: Sequence[Tensor]) -> list[set[int]]:
    """Return for each output the numbers of those that are computed from it."""
    numbers = {(t.grad_fn, t.output_nr): i for i, t in enumerate(outputs) if t.grad_fn is not None}
    later: list[set[int]] = [set() for _ in outputs]
    for (node, _), i in numbers.items() if len(numbers) > 1 else ():
        left, seen = [node], set[Any]()
        while left:
            for edge in left.pop().next_functions:
                if edge in numbers:
                    later[numbers[edge]].add(i)
                if edge[0] is not None and edge[0] not in seen:
                    seen.add(edge[0])
                    left.append(edge[0])
    return later
