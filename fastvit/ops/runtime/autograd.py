"""The gradients of ops: one base class of their autograd nodes, and what a call has to ask before it uses one."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from fastvit.ops.runtime.backend import Route, is_jit_tracing
from fastvit.ops.runtime.call import begin
from fastvit.ops.runtime.torch_private import (
    add_batch_dim,
    are_functorch_transforms_active,
    clear_saved_tensors,
    has_forward_level,
    is_any_autocast_enabled,
    is_batched_gradient,
    remove_batch_dim,
    set_dispatch_key_included,
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


_LIB = torch.library.Library("fastvit", "FRAGMENT")
_LIB.define("in_backward(Tensor x, Tensor gradient) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIB.impl("in_backward", lambda x, gradient: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("fastvit::in_backward", lambda x, gradient: torch.empty_like(x), lib=_LIB)


def in_backward(x: Tensor, gradient: Tensor) -> Tensor:
    """Return x, from which a backward pass computes something again.

    The compiler has both passes in one graph. It joins equal expressions, and puts into the forward pass, and saves,
    whatever needs no gradient of the output. There this is a copy of x that needs `gradient`."""
    if not is_dynamo_compiling():
        return x
    copy: Tensor = torch.ops.fastvit.in_backward(x, gradient)
    return copy


def unviewed(output: Tensor) -> Tensor:
    """Turn a new output that is a view into a tensor without a base: a view that a Function returns, or that was made
    under no_grad, may not be edited in place. A trace keeps its gradient. So does a compiler: where a graph returns two
    views of this output, it would take the detached tensor for their base, which has no gradient."""
    if is_jit_tracing():
        return output
    if torch.compiler.is_compiling():
        plain: Tensor = torch.ops.aten._unsafe_view(output, output.shape)
        return plain
    return output.detach()


Computed = tuple[tuple[Any, ...], dict[str, Any]]  # what `FusedNode.compute` returns


def inputs(*names: str) -> Any:
    """Return a class for `FusedNode.Inputs` of tensors, or None, of these names."""
    return namedtuple("Inputs", ["options", "route", *names])


class FusedNode:
    """Base of the ops' autograd nodes. A subclass defines

    Inputs: a NamedTuple of `options`, `route` and tensors or None. options is a NamedTuple of plain values, of which
        `op` is the public op's name, and `cast` autocast's dtype, if the op casts inputs. route: for the ops within.
    casts: names of the inputs that autocast casts; of a variadic op its last field. Autograd casts the gradients back.
    intermediates: names of the tensors that `compute` makes for the backward pass.
    saved: names of what the backward pass reads: inputs, then `intermediates` and "result", the first result.
    single: whether the op returns a tensor, not a tuple.
    variadic: whether the last field of Inputs, and of its gradients, is a tuple of any number of weights and as many
        biases. The weights are saved, too, under numbers.
    compute(t): a tuple of the results, and a dict of the tensors of `intermediates`.
    gradients(s, douts, o, needs_grad, route): a dict of gradients by the names of inputs; missing ones are None. s:
        what was saved, by name; memory that is popped from it is free while the function runs, unless the graph is
        retained. douts: gradients of the results, not all of them None. o: the options. needs_grad: Inputs of bools.

    and, where it differs from the default,

    intermediates_of(t): `intermediates`, if it depends on the inputs.
    needed(t, intermediates, needs_grad): for names of `saved` that the backward pass may not need, whether it does.
    sizes(t): numbers for the backward pass that torch.compile may have to treat as symbols, in s["sizes"].

    It gets two autograd Functions. torch.compile and functorch take `in_two_steps`, whose tensors for the backward pass
    are outputs that autograd tracks, and whose casts are nodes of their own. All other calls run `in_one_step`, which
    saves 7 us for five such tensors, and 4 us a cast, and which a replayed call needs."""

    Inputs: Any
    casts: tuple[str, ...] = ()
    intermediates: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    single = True
    variadic = False
    in_one_step: Callable[..., Any]
    in_two_steps: Any
    named: Callable[..., Any]  # (tensors, options, route) -> Inputs
    saved_inputs: tuple[str, ...]  # of `saved`

    @classmethod
    def intermediates_of(cls, t: Any) -> tuple[str, ...]:
        """Return the names of the tensors that `compute` makes for the backward pass."""
        return cls.intermediates

    @staticmethod
    def compute(t: Any) -> Computed:
        raise NotImplementedError

    @staticmethod
    def needed(t: Any, intermediates: dict[str, Any], needs_grad: Any) -> dict[str, bool]:
        return {}

    @staticmethod
    def sizes(t: Any) -> tuple[int, ...]:
        return ()

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: Any, needs_grad: Any, route: Any) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def tensors(cls, t: Any) -> Sequence[Any]:
        """Return the tensors of Inputs, flat."""
        return (*t[2:-1], *t[-1]) if cls.variadic else t[2:]

    @classmethod
    def cast_inputs(cls, t: Any) -> Any:
        """Return Inputs in autocast's dtype."""
        if not cls.casts or t.options.cast is None:
            return t

        def cast(x: Any) -> Any:
            return tuple([cast(a) for a in x]) if isinstance(x, tuple) else None if x is None else x.to(t.options.cast)

        return cls.Inputs(*[cast(x) if name in cls.casts else x for name, x in zip(t._fields, t, strict=True)])

    @classmethod
    def saved_tensors(cls, t: Any, intermediates: dict[str, Any], results: Any, needs_grad: Any) -> dict[Any, Any]:
        """Return what the backward pass reads, by name, without None."""
        values: dict[Any, Any] = {name: getattr(t, name) for name in cls.saved_inputs}
        values |= {
            name: results[0] if name == "result" else intermediates.get(name)
            for name in cls.saved
            if name not in values
        }
        if cls.variadic:
            values |= dict(enumerate(t[-1][: len(t[-1]) // 2]))
        needed = cls.needed(t, intermediates, needs_grad)
        return {name: value for name, value in values.items() if value is not None and needed.get(name, True)}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Inputs, fixed = cls.Inputs, len(cls.Inputs._fields) - 3  # tensors before the variadic field

        def named(tensors: Sequence[Any], options: Any = None, route: Any = None) -> Any:
            if cls.variadic:
                return Inputs(options, route, *tensors[:fixed], tensors[fixed:])
            return Inputs(options, route, *tensors)

        def forward(options: Any, route: Route, *tensors: Any) -> Any:
            t = named(tensors, options, route)
            results, intermediates = cls.compute(t)
            return *results, *[intermediates[name] for name in cls.intermediates_of(t)]

        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            t = named(inputs[2:], *inputs[:2])
            intermediates, needs_input_grad = cls.intermediates_of(t), ctx.needs_input_grad[2:]
            count = len(output) - len(intermediates)
            ctx.mark_non_differentiable(*[t for t in output[count:] if t is not None])
            values = cls.saved_tensors(
                t, dict(zip(intermediates, output[count:], strict=True)), output, named(needs_input_grad)
            )
            ctx.of_backward = OfBackward(t.options, tuple(values), cls.sizes(t), needs_input_grad, count)
            ctx.save_for_backward(*values.values())
            ctx.set_materialize_grads(False)

        def backward(ctx: Any, *douts: Any) -> Any:
            return None, None, *_backward(ctx, cls, douts)

        def forward_in_one_step(
            ctx: Any, work: Callable[..., Any], indices: GradientIndices | None, *tensors: Any
        ) -> Any:
            outputs, ctx.of_backward = work(*tensors, needs_input_grad=ctx.needs_input_grad[2:])
            count, ctx.indices = ctx.of_backward.results, indices
            ctx.save_for_backward(*outputs[count:])
            ctx.set_materialize_grads(False)
            return outputs[:count]

        def backward_in_one_step(ctx: Any, *douts: Any) -> Any:
            gradients = _backward(ctx, cls, douts)
            if ctx.indices is None:
                return None, None, *gradients
            indices, shapes = ctx.indices
            of_given = [None if index < 0 else gradients[index] for index in indices]
            for i, shape in shapes.items():
                of_given[i] = None if of_given[i] is None else of_given[i].reshape(shape)
            return None, None, *of_given

        cls.named = staticmethod(named)
        cls.saved_inputs = tuple([name for name in cls.saved if name in Inputs._fields])
        two: dict[str, Any] = {"forward": forward, "setup_context": setup_context, "backward": backward}
        one: dict[str, Any] = {"forward": forward_in_one_step, "backward": backward_in_one_step}
        cls.in_two_steps = _function(cls.__name__, two, generate_vmap_rule=True)
        # not its `apply`, which looks at the signature of `forward` to fill in defaults, for 20 us a call
        cls.in_one_step = super(torch.autograd.Function, _function(cls.__name__, one)).apply  # type: ignore[misc]


# For each given tensor the index of its gradient among those of a node's tensors, or -1; and, by its number, the shape
# of a given tensor whose gradient has another one with as many elements. Autograd sums a gradient with more.
GradientIndices = tuple[list[int], dict[int, torch.Size]]


class OfBackward(NamedTuple):
    """Tell a backward pass what the saved tensors do not say. needs_input_grad: a bool for each input. results: how
    many there are."""

    options: Any
    names: tuple[Any, ...]  # of the saved tensors
    sizes: tuple[int, ...]
    needs_input_grad: tuple[bool, ...]
    results: int


def _function(name: str, methods: dict[str, Callable[..., Any]], **attributes: Any) -> Any:
    """Return an autograd Function with these static methods."""
    static = {key: staticmethod(method) for key, method in methods.items()}
    return type(name, (torch.autograd.Function,), {**static, **attributes})


class _DifferentiableOnce(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"fastvit.ops.{ctx.name} does not support double backward")


def _backward(ctx: Any, node: type[FusedNode], douts: tuple[Any, ...]) -> Any:
    """Return the gradients of all inputs. Differentiating them again raises an error that names the op; an opaque op
    alone would give no gradient."""
    o, names, sizes, needs_input_grad, count = of_backward = ctx.of_backward
    douts = douts[:count]
    if all([dout is None for dout in douts]):
        return (None,) * len(needs_input_grad)

    def gradients(inputs: list[Any], route: Route) -> tuple[Any, ...]:
        douts, s = (*inputs[:count],), dict.fromkeys(node.saved) | dict(zip(names, inputs[count:], strict=True))
        inputs.clear()
        if sizes:
            s["sizes"] = sizes
        needs_grad = node.named(needs_input_grad)
        found = node.gradients(s, douts, o, needs_grad, route)
        each = tuple([found.pop(name, None) for name in needs_grad._fields[2:]])
        assert not found, f"{node.__name__} returns gradients {[*found]} of inputs {needs_grad._fields}"
        return (*each[:-1], *(each[-1] or (None,) * len(needs_grad[-1]))) if node.variadic else each

    def work(saved: list[Any], *douts: Any) -> Any:
        inputs = [*douts, *saved]
        saved.clear()
        call, _ = begin(node.__name__, tuple(inputs), of_backward)
        del _  # holds tensors
        return call.run(lambda inputs: gradients(inputs, call.route), inputs)

    saved = [*ctx.saved_tensors]
    if torch.is_grad_enabled():

        def from_flat(*tensors: Any) -> Any:
            return _without_autocast(work, [*tensors[count:]], *tensors[:count])

        return _DifferentiableOnce.apply(o.op, from_flat, *douts, *saved)
    if clear_saved_tensors is not None and not is_dynamo_compiling():
        ctx.maybe_clear_saved_tensors()
    return _without_autocast(work, saved, *douts)


def _without_autocast(work: Callable[..., Any], saved: list[Any], *douts: Any) -> Any:
    """Run work(saved, *douts) without autocast: the forward pass has chosen the dtypes."""
    if is_dynamo_compiling():
        # At the first such question Dynamo gives up and traces the backward pass once more. Within the context below,
        # it would leave autocast switched off for the rest of the forward pass.
        next(dout for dout in douts if dout is not None).is_contiguous()
    if is_any_autocast_enabled is None or is_any_autocast_enabled() or is_dynamo_compiling():
        kind = next(dout.device.type for dout in douts if dout is not None)
        if is_dynamo_compiling() and kind != "meta":  # autocast refuses meta tensors
            with torch.autocast(kind, enabled=False):
                return _for_each_gradient(work, saved, *douts)
        if kind != "meta" and torch.is_autocast_enabled(kind):
            torch.set_autocast_enabled(kind, False)  # a tenth of the context's time
            try:
                return _for_each_gradient(work, saved, *douts)
            finally:
                torch.set_autocast_enabled(kind, True)
    return _for_each_gradient(work, saved, *douts)


def _for_each_gradient(work: Callable[..., Any], saved: list[Any], *douts: Any) -> Any:
    """Run `work` once for each gradient of a batch, and once where there is no batch.

    `torch.autograd.grad(is_grads_batched=True)` and `jacobian(vectorize=True)` map over gradients with a vmap that is
    older than torch.func's. It lacks rules for most functions of a backward pass, and for code that depends on a
    tensor's memory."""
    if is_batched_gradient is None or is_dynamo_compiling():
        return work(saved, *douts)
    batched = [dout is not None and is_batched_gradient(dout) for dout in douts]
    if True not in batched:
        return work(saved, *douts)
    # level 1: a second level would differentiate twice
    each = [remove_batch_dim(a, 1, 1, 0) if b else a for a, b in zip(douts, batched, strict=True)]
    set_dispatch_key_included("VmapMode", False)  # that mode refuses random numbers, which dropout draws again
    try:
        found = []
        for i in range(len(each[batched.index(True)])):
            found.append(work([*saved], *(a[i] if b else a for a, b in zip(each, batched, strict=True))))
    finally:
        set_dispatch_key_included("VmapMode", True)
    return tuple([None if of[0] is None else add_batch_dim(torch.stack(of), 0, 1) for of in zip(*found, strict=True)])
