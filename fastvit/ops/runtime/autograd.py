"""Base classes and helpers of the ops' gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from fastvit.ops.runtime.dispatch import is_jit_tracing
from fastvit.ops.runtime.torch_private import (
    add_batch_dim,
    are_functorch_transforms_active,
    clear_saved_tensors,
    has_forward_level,
    is_any_autocast_enabled,
    is_batched_gradient,
    remove_batch_dim,
    set_dispatch_key_included,
    unwrap_if_dead,
)


def transforming() -> bool:
    """Whether a functorch transform (vmap, grad, ...) is or may be active."""
    return are_functorch_transforms_active is None or are_functorch_transforms_active()


def needs_autograd(name: str, *tensors: Tensor | None) -> bool:
    """Whether a call of `fastvit.ops.<name>` must go through its `autograd.Function`. Raises where a tensor carries a
    forward-mode tangent, which an opaque op would drop silently."""
    if not has_forward_level or forward_ad._current_level >= 0:
        for t in tensors:
            if t is not None and forward_ad.unpack_dual(t).tangent is not None:
                raise NotImplementedError(f"fastvit.ops.{name} does not support forward-mode AD")
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return not is_jit_tracing()
    return False


def repeats_as_views(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The arguments with repeats replaced by views while torch.compile traces, which refuses to see one tensor twice
    among a Function's inputs, as in linear(x, weight, residual=x)."""
    if not is_dynamo_compiling():
        return tensors
    seen: list[Tensor | None] = []
    for t in tensors:
        repeated = t is not None and any(t is other for other in seen)
        seen.append(t.view_as(t) if t is not None and repeated else t)
    return tuple(seen)


def unshared(output: Tensor) -> Tensor:
    """An output that its Function also saves. Editing it in place raises in the backward pass, but not where
    torch.compile traces the Function: there the edit would silently reach what is saved. So the caller gets a copy,
    which Inductor removes where nothing edits it."""
    return output.clone() if is_dynamo_compiling() else output


def unviewed(output: Tensor) -> Tensor:
    """A fresh output that is a view of other dimensions, as a tensor of its own: a view that a Function returns, or
    that was made under no_grad, may not be edited in place. A trace keeps its gradient."""
    return output if is_jit_tracing() else output.detach()


class FusedFunction(torch.autograd.Function):
    """Base of the ops' gradients. Subclasses define `forward`, `setup_context` and `backward`, and do the work of
    `backward` through `differentiable_once` or `consume_saved`."""

    generate_vmap_rule = True

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As torch's own, which inspects the signature of `forward` on every call to fill in defaults: 20 us that no
        op here needs, since all arguments are given."""
        if unwrap_if_dead is None or are_functorch_transforms_active is None or are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*_unwrapped(args))  # type: ignore[misc]


def _unwrapped(args: tuple[Any, ...]) -> list[Any]:
    return [unwrap_if_dead(a) if isinstance(a, Tensor) else a for a in args]


class FusedHalf(FusedFunction):
    """Base of the gradients of a block's halves, for `run`: the first output is the result, the others are what the
    backward pass reads, and `cast` is what autocast does to the inputs.

    Each is there once more, in one step, for calls that no transform and no compiler takes apart: what the backward
    pass reads need not leave it as an output that autograd tracks, nor what is cast come from a node of its own. 7 us
    less for a call of five outputs, 4 for each cast."""

    in_one_step: Callable[..., Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)

        def forward(ctx: Any, *inputs: Any) -> Any:
            inputs = cls.cast(*inputs)
            output = cls.forward(*inputs)
            cls.setup_context(ctx, inputs, output)
            return output[0]

        members = {"forward": staticmethod(forward), "backward": staticmethod(cls.backward)}
        one: Any = type(cls.__name__, (torch.autograd.Function,), members)
        cls.in_one_step = super(torch.autograd.Function, one).apply  # type: ignore[misc]  # as `FusedFunction.apply`

    @staticmethod
    def cast(*inputs: Any) -> tuple[Any, ...]:
        """The inputs of `forward` from those of `run`. Gradients autograd casts back."""
        raise NotImplementedError


def run(half: type[FusedHalf], autograd: bool, *inputs: Any) -> Any:
    """The half's result. autograd: whether it may need a gradient."""
    if not autograd:
        return half.forward(*half.cast(*inputs))[0]
    if unwrap_if_dead is None or transforming() or is_dynamo_compiling():
        return half.apply(*half.cast(*repeats_as_views(*inputs)))[0]
    return half.in_one_step(*_unwrapped(inputs))


def cast_to(dtype: torch.dtype | None, *tensors: Tensor | None) -> list[Any]:
    """The tensors in that dtype, or as they are."""
    return [*tensors] if dtype is None else [None if t is None else t.to(dtype) for t in tensors]


class _DifferentiableOnce(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, function: Callable[..., Any], *args: Any) -> Any:
        return _run_backward(function, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"fastvit.ops.{ctx.name} does not support double backward")


def differentiable_once(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), the backward pass of the op `name`: differentiating it again raises and names the op, where an
    opaque op would give no gradient at all."""
    if torch.is_grad_enabled():
        return _DifferentiableOnce.apply(name, function, *args)
    return _run_backward(function, args)


def consume_saved(ctx: Any, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """function(saved, *args) as in `differentiable_once`, saved being the list of the saved tensors. Unless the graph
    is retained, the node gives them up: what `function` takes out of the list and drops is freed while it still runs.
    """
    saved = list(ctx.saved_tensors)
    if torch.is_grad_enabled():
        n = len(saved)
        return _DifferentiableOnce.apply(name, lambda *flat: function([*flat[:n]], *flat[n:]), *saved, *args)
    if clear_saved_tensors is not None and not is_dynamo_compiling():
        ctx.maybe_clear_saved_tensors()
    return _run_backward(function, args, saved)


def _run_backward(function: Callable[..., Any], args: tuple[Any, ...], saved: list[Any] | None = None) -> Any:
    """function(*args), or function(saved, *args). An autocast region around `backward()` changes nothing: the forward
    pass has chosen the dtypes."""
    if is_any_autocast_enabled is None or is_any_autocast_enabled() or is_dynamo_compiling():
        kind = next(a.device.type for a in args if isinstance(a, Tensor))
        if kind != "meta":  # autocast refuses meta tensors
            with torch.autocast(kind, enabled=False):
                return _for_each_gradient(function, args, saved)
    return _for_each_gradient(function, args, saved)


def _for_each_gradient(function: Callable[..., Any], args: tuple[Any, ...], saved: list[Any] | None) -> Any:
    """Run `function` once for each gradient of a batch, and once where there is no batch.

    `torch.autograd.grad(is_grads_batched=True)` and `jacobian(vectorize=True)` map over gradients with a vmap that is
    older than torch.func's. It has no rules for most of what a backward pass calls, and none for code that depends on a
    tensor's memory."""
    before = () if saved is None else (saved,)
    if is_batched_gradient is None or is_dynamo_compiling():
        return function(*before, *args)
    batched = [isinstance(a, Tensor) and is_batched_gradient(a) for a in args]
    if True not in batched:
        return function(*before, *args)
    # level 1, for a second one would differentiate twice
    each = [remove_batch_dim(a, 1, 1, 0) if b else a for a, b in zip(args, batched, strict=True)]
    set_dispatch_key_included("VmapMode", False)  # which refuses random numbers, as dropout draws again
    try:
        found = []
        for i in range(len(each[batched.index(True)])):
            before = () if saved is None else ([*saved],)
            found.append(function(*before, *(a[i] if b else a for a, b in zip(each, batched, strict=True))))
    finally:
        set_dispatch_key_included("VmapMode", True)
    if isinstance(found[0], Tensor):
        return add_batch_dim(torch.stack(found), 0, 1)
    return tuple([None if of[0] is None else add_batch_dim(torch.stack(of), 0, 1) for of in zip(*found, strict=True)])


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast wants on x's device, or None outside autocast and for float64 input."""
    if is_any_autocast_enabled is not None and not is_any_autocast_enabled():
        return None
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:  # refuses meta tensors
        return torch.get_autocast_dtype(kind)
    return None
