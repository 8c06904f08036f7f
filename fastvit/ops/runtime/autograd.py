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
    """Return whether a functorch transform (vmap, grad, ...) is active, or may be."""
    return are_functorch_transforms_active is None or are_functorch_transforms_active()


def needs_autograd(name: str, *tensors: Tensor | None) -> bool:
    """Return whether a call of `fastvit.ops.<name>` must go through its `autograd.Function`. Raise if a tensor has a
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
    """Return the arguments, with views for repeated ones while torch.compile traces: it refuses a Function that gets
    one tensor twice, as linear(x, weight, residual=x) does."""
    if not is_dynamo_compiling():
        return tensors
    seen: list[Tensor | None] = []
    for t in tensors:
        repeated = t is not None and any(t is other for other in seen)
        seen.append(t.view_as(t) if t is not None and repeated else t)
    return tuple(seen)


def unshared(output: Tensor) -> Tensor:
    """Protect an output that its Function also saves. If it is edited in place, the backward pass raises, but not where
    torch.compile traces the Function: there the edit would silently change what is saved. So the caller gets a copy,
    which Inductor removes if nothing edits it."""
    return output.clone() if is_dynamo_compiling() else output


def unviewed(output: Tensor) -> Tensor:
    """Turn a new output that is a view into a tensor without a base: a view that a Function returns, or that was made
    under no_grad, may not be edited in place. A trace keeps its gradient."""
    return output if is_jit_tracing() else output.detach()


class FusedFunction(torch.autograd.Function):
    """Base of the ops' gradients. Subclasses define `forward`, `setup_context` and `backward`, and do the work of
    `backward` through `differentiable_once` or `consume_saved`."""

    generate_vmap_rule = True

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Apply the Function without torch's look at the signature of `forward`, which fills in defaults and takes 20
        us a call. Ops pass all arguments."""
        if unwrap_if_dead is None or are_functorch_transforms_active is None or are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*_unwrapped(args))  # type: ignore[misc]


def _unwrapped(args: tuple[Any, ...]) -> list[Any]:
    return [unwrap_if_dead(a) if isinstance(a, Tensor) else a for a in args]


class FusedHalf(FusedFunction):
    """Base of the gradients of a block's halves, for `run`. The first output is the result, the others are what the
    backward pass reads, and `cast` is what autocast does to the inputs.

    Every half also has a fast variant, used outside torch.compile and functorch: it saves tensors directly instead of
    returning them as tracked outputs, and casts inside the node. It saves 7 us for a call of five outputs, and 4 us a
    cast."""

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
        """Return the inputs of `forward` for those of `run`. Autograd casts the gradients back."""
        raise NotImplementedError


def run(half: type[FusedHalf], autograd: bool, *inputs: Any) -> Any:
    """Return the half's result. autograd: whether it may need a gradient."""
    if not autograd:
        return half.forward(*half.cast(*inputs))[0]
    if unwrap_if_dead is None or transforming() or is_dynamo_compiling():
        return half.apply(*half.cast(*repeats_as_views(*inputs)))[0]
    return half.in_one_step(*_unwrapped(inputs))


def cast_to(dtype: torch.dtype | None, *tensors: Tensor | None) -> list[Any]:
    """Return the tensors in that dtype, or as they are for None."""
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
    """Run function(*args), the backward pass of the op `name`. Differentiating it again raises an error that names the
    op; an opaque op alone would give no gradient."""
    if torch.is_grad_enabled():
        return _DifferentiableOnce.apply(name, function, *args)
    return _run_backward(function, args)


def consume_saved(ctx: Any, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run function(saved, *args) like `differentiable_once`; `saved` is the list of saved tensors. Unless the graph is
    retained, the node releases them: what `function` takes out of the list and drops is freed while it still runs.
    """
    saved = list(ctx.saved_tensors)
    if torch.is_grad_enabled():
        n = len(saved)
        return _DifferentiableOnce.apply(name, lambda *flat: function([*flat[:n]], *flat[n:]), *saved, *args)
    if clear_saved_tensors is not None and not is_dynamo_compiling():
        ctx.maybe_clear_saved_tensors()
    return _run_backward(function, args, saved)


def _run_backward(function: Callable[..., Any], args: tuple[Any, ...], saved: list[Any] | None = None) -> Any:
    """Run function(*args), or function(saved, *args), without autocast: the forward pass has chosen the dtypes."""
    if is_any_autocast_enabled is None or is_any_autocast_enabled() or is_dynamo_compiling():
        kind = next(a.device.type for a in args if isinstance(a, Tensor))
        if kind != "meta":  # autocast refuses meta tensors
            with torch.autocast(kind, enabled=False):
                return _for_each_gradient(function, args, saved)
    return _for_each_gradient(function, args, saved)


def _for_each_gradient(function: Callable[..., Any], args: tuple[Any, ...], saved: list[Any] | None) -> Any:
    """Run `function` once for each gradient of a batch, and once where there is no batch.

    `torch.autograd.grad(is_grads_batched=True)` and `jacobian(vectorize=True)` map over gradients with a vmap that is
    older than torch.func's. It lacks rules for most functions of a backward pass, and for code that depends on a
    tensor's memory."""
    before = () if saved is None else (saved,)
    if is_batched_gradient is None or is_dynamo_compiling():
        return function(*before, *args)
    batched = [isinstance(a, Tensor) and is_batched_gradient(a) for a in args]
    if True not in batched:
        return function(*before, *args)
    # level 1: a second level would differentiate twice
    each = [remove_batch_dim(a, 1, 1, 0) if b else a for a, b in zip(args, batched, strict=True)]
    set_dispatch_key_included("VmapMode", False)  # that mode refuses random numbers, which dropout draws again
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
    """Return autocast's dtype on x's device; None outside autocast and for float64."""
    if is_any_autocast_enabled is not None and not is_any_autocast_enabled():
        return None
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:  # refuses meta tensors
        return torch.get_autocast_dtype(kind)
    return None
