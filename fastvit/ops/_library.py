"""How a fused op is registered, dispatched and differentiated: the only module that knows.

An op has one schema and two implementations of its name: one in `fastvit.ops.aten` (PyTorch's own functions), one in
`fastvit.ops.launch` (launches kernels of `fastvit.kernels`, imported when first wanted). Both sit behind one entry of
the `fastvit::` namespace, with a fake implementation for `torch.compile` and `torch.export`. Which one runs is decided
per call by the first tensor's device and by

    FASTVIT_BACKEND   auto (default: Triton on a GPU or under TRITON_INTERPRET=1, else ATen) | triton | aten
    FASTVIT_STRICT    1: what Triton cannot take raises instead of falling back to ATen with one warning (default: 0)

or by `use_backend`, which goes before them. Both variables are read in every call: a change of `os.environ` counts.

    FASTVIT_CACHE_DIR the folder of launch choices that `fastvit tune` measured (default: `cache_folder`), read when the
                      first op meets a GPU
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from fastvit.kernels import _tuned
from fastvit.ops._private import (
    FakeTensor,
    add_batch_dim,
    are_functorch_transforms_active,
    clear_saved_tensors,
    has_forward_level,
    is_any_autocast_enabled,
    is_batched_gradient,
    is_torch_function_mode_enabled,
    is_tracing,
    is_zerotensor,
    len_torch_dispatch_stack,
    profiler_enabled,
    remove_batch_dim,
    set_dispatch_key_included,
    unwrap_if_dead,
)

BACKENDS = ("auto", "triton", "aten")
VARIABLES = {  # and what stands for a variable that is not set
    "FASTVIT_BACKEND": "auto", "FASTVIT_STRICT": "0",
    "FASTVIT_CACHE_DIR": "fastvit in $XDG_CACHE_HOME or ~/.cache",
}  # fmt: skip
_SETTINGS = ("FASTVIT_BACKEND", "FASTVIT_STRICT")
INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
HAVE_TRITON = importlib.util.find_spec("triton") is not None

_LIB = torch.library.Library("fastvit", "DEF")
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}  # overload -> the same in functions that exporters know
IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {}  # overload -> what runs behind it: (*arguments, backend=)
_warned: set[tuple[str, str]] = set()


class Unsupported(ValueError):
    """Raised by a launcher for a shape, dtype or GPU that its kernels cannot take. What it launched before counts for
    nothing: results are fresh, and ATen writes all of them."""


Settings = tuple[str, bool]  # backend, strict

# os.environ's own dict, where there is one: 20 ns for a variable that is not set, where os.environ takes 800
_environ: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_BACKEND, _STRICT = (os.environ.encodekey(name) if _environ is not os.environ else name for name in _SETTINGS)
_chosen: Settings | None = None  # by use_backend


@functools.lru_cache(maxsize=8)
def _parsed(*_raw: Any) -> Settings:
    """What the environment says, by its raw values."""
    backend, strict = (os.environ.get(name) or VARIABLES[name] for name in _SETTINGS)
    if backend not in BACKENDS:
        raise ValueError(f"FASTVIT_BACKEND must be one of {BACKENDS}, got {backend!r}")
    if strict not in ("0", "1"):
        raise ValueError(f"FASTVIT_STRICT must be 0 or 1, got {strict!r}")
    return backend, strict == "1"


def settings() -> Settings:
    """The backend, and whether what Triton cannot take raises, as they are now."""
    return _chosen or _parsed(_environ.get(_BACKEND), _environ.get(_STRICT))


settings()  # a wrong value is an error at import


def cache_folder() -> Path | None:
    """Return the folder of the user's files: $FASTVIT_CACHE_DIR, else fastvit in $XDG_CACHE_HOME, else in ~/.cache. It
    need not be there. None for a user without a home."""
    chosen, cache = (os.environ.get(name) for name in ("FASTVIT_CACHE_DIR", "XDG_CACHE_HOME"))
    try:
        return Path(chosen).expanduser() if chosen else Path(cache or "~/.cache").expanduser() / "fastvit"
    except RuntimeError:
        return None


@contextlib.contextmanager
def use_backend(name: str, *, strict: bool | None = None) -> Iterator[None]:
    """Within the context every op runs on the backend of that name, whatever FASTVIT_BACKEND says.

        with fastvit.ops.use_backend("aten"):
            loss = model(images).sum()

    The choice is the whole process's, since autograd runs backward passes in threads of its own, and an op asks for it
    whenever it runs: a backward pass, and a compiled model, take what holds when they run. Contexts may be nested; of
    several threads, one at a time may enter and leave them. A CUDA graph replays what it has captured.

    Args:
        name: "triton", "aten", or "auto": Triton for tensors on a GPU (with TRITON_INTERPRET=1 for all), else ATen.
        strict: whether what Triton cannot take raises (True) or falls back to ATen with one warning (False); None for
            what holds outside: the enclosing context's, or FASTVIT_STRICT's.

    Raises:
        ValueError: another name.
        TypeError: another type of strict.
        RuntimeError: from an op on "triton", where Triton cannot run on its tensors' device at all.
    """
    global _chosen
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {name!r}")
    if not isinstance(strict, bool | None):
        raise TypeError(f"strict must be True, False or None, got {strict!r}")
    before = _chosen
    _chosen = name, settings()[1] if strict is None else strict
    try:
        yield
    finally:
        _chosen = before


def wants_triton(x: Tensor) -> bool:
    """Whether ops on x's device run Triton kernels."""
    backend = (_chosen or _parsed(_environ.get(_BACKEND), _environ.get(_STRICT)))[0]  # `settings`, without its call
    if backend == "aten" or not (HAVE_TRITON and (x.is_cuda or INTERPRET)):
        if backend == "triton":
            raise RuntimeError(
                f"the backend is 'triton', by FASTVIT_BACKEND or use_backend, but Triton cannot run on {x.device}: "
                + ("set TRITON_INTERPRET=1 for CPU tensors" if HAVE_TRITON else "triton is not installed")
            )
        return False
    return True


def register(
    schema: str,
    *,
    aten: Callable[..., Any],
    launch: str,
    fake: Callable[..., Any],
    flops: Callable[..., int] | None = None,
    decomposition: Callable[..., Any] | None = None,
    planned: bool = False,
) -> Callable[..., Any]:
    """Defines `fastvit::<schema>` and returns the function that the rest of the package calls: the registered op, or,
    where nothing could tell the difference, its implementation without the dispatcher's 3 us. From a caller that runs
    several ops it takes `backend=`, what `choose_backend` said, or the `Plans` of the caller's call.

    schema: "name(Tensor x, ...) -> ..."; the first argument is a tensor on the op's device. No argument is mutated
        and no output aliases an input or another output.
    aten: positional arguments as in the schema.
    launch: the module of `fastvit.ops.launch` that has the function `name`, with the same arguments, for Triton. It
        may raise `Unsupported`.
    fake: the same on fake tensors; shapes, dtypes and strides exactly as both implementations return them.
    flops: as `torch.utils.flop_counter.register_flop_formula` takes it, shapes for tensors, `out_shape` by keyword.
    decomposition: the same in functions that exporters know, for a forward op.
    planned: whether the launcher takes `plans=`.
    """
    name = schema[: schema.index("(")]

    @functools.cache
    def launcher() -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(importlib.import_module(f"fastvit.ops.launch.{launch}"), name)
        return function

    def op(*args: Any, backend: Any = None) -> Any:
        if backend is None:
            backend = choose_backend(*args)
        if backend == "dispatcher":
            if runner is not None:
                with _isolated(args[0]):
                    return runner(overload, args)
            if decomposition is not None and _wants_functions_of_torch():
                return decomposition(*args)
            return overload(*args)
        if backend == "aten":
            return aten(*args)
        is_plans = backend != "triton"
        try:
            return launcher()(*args, plans=backend) if is_plans and planned else launcher()(*args)
        except Unsupported as reason:
            _warn_or_raise(name, str(reason))
            if is_plans:
                backend.abandon()
            with _isolated(args[0]):
                return aten(*args)

    def dispatched(*args: Any) -> Any:
        with _isolated(args[0]):
            return op(*args, backend="triton" if wants_triton(args[0]) else "aten")

    _LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _LIB.impl(name, dispatched, "CPU")
    _LIB.impl(name, dispatched, "CUDA")
    torch.library.register_fake(f"fastvit::{name}", fake, lib=_LIB)
    overload = getattr(torch.ops.fastvit, name).default
    IMPLEMENTATIONS[overload] = op
    if decomposition is not None:
        DECOMPOSITIONS[overload] = decomposition
    if flops is not None:
        from torch.utils.flop_counter import register_flop_formula

        register_flop_formula(getattr(torch.ops.fastvit, name))(flops)
    return op


def _wants_functions_of_torch() -> bool:
    """Whether a call is written down for readers that know PyTorch's own functions only: ONNX, and torch.jit.trace,
    which records no `autograd.Function`, so that an opaque op in its trace would have no gradient."""
    return is_jit_tracing() or (torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export())


def is_jit_tracing() -> bool:
    """Whether torch.jit.trace records the calls that are made now."""
    return not is_dynamo_compiling() and is_tracing is not None and is_tracing()


# Arguments that are what they seem: no subclass of Tensor such as a fake, a distributed or a tracer's
_PLAIN_TYPES = frozenset({Tensor, Parameter, type(None), bool, int, float, str, torch.dtype})

# Without one of these nobody can say whether a call is observed
_KNOWS_OBSERVERS = has_forward_level and None not in (
    len_torch_dispatch_stack,
    is_torch_function_mode_enabled,
    are_functorch_transforms_active,
    clear_saved_tensors,
    is_any_autocast_enabled,
    is_tracing,
    profiler_enabled,
    is_zerotensor,
)


def is_observed() -> bool:
    """Whether modes (fake tensors, FLOP counters, checkpoint policies, tracers), functorch transforms, profilers or
    forward-mode AD are to see the calls that are made now, or may be."""
    return bool(
        not _KNOWS_OBSERVERS
        or is_dynamo_compiling()
        or len_torch_dispatch_stack()
        or is_torch_function_mode_enabled()
        or are_functorch_transforms_active()
        or is_tracing()
        or profiler_enabled()
        or forward_ad._current_level >= 0
    )


runner: Callable[[Any, tuple[Any, ...]], Any] | None = None  # see `run_by`


@contextlib.contextmanager
def run_by(function: Callable[[Any, tuple[Any, ...]], Any]) -> Iterator[None]:
    """Within the context function(overload, arguments) runs what the dispatcher would. For studies of memory: ops write
    in place, as they do where nothing observes them."""
    global runner
    before, runner = runner, function
    try:
        yield
    finally:
        runner = before


@contextlib.contextmanager
def hidden_from_profilers() -> Iterator[None]:
    """Within the context a profiler does not count as an observer: calls run, and allocate, as they do without one. The
    profiler sees PyTorch's functions and their memory, and no fused op."""
    global profiler_enabled
    before, profiler_enabled = profiler_enabled, lambda: False
    try:
        yield
    finally:
        profiler_enabled = before


def choose_backend(*args: Any) -> str:
    """What runs an op on these arguments, and every other op on what comes of them: "dispatcher", "triton" or "aten".

    The dispatcher for whatever it would not lead straight to the implementation: calls that are observed or under
    autocast, tensor subclasses and other devices; for Triton also a GPU that is not the current one, and lazy
    negations, as gradients of conj() have, which ATen's functions carry out themselves. Autograd is the
    FusedFunctions' part."""
    x = args[0]
    if (
        is_observed()
        or is_any_autocast_enabled()
        or not _PLAIN_TYPES.issuperset(map(type, args))
        or not (x.is_cpu or x.is_cuda)
    ):
        return "dispatcher"
    if not wants_triton(x):
        return "aten"
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return "dispatcher"
    tensors = [a for a in args if type(a) is Tensor or type(a) is Parameter]
    if any(map(Tensor.is_neg, tensors)) or any(map(is_zerotensor, tensors)):
        return "dispatcher"
    return "triton"


@contextlib.contextmanager
def _isolated(x: Tensor) -> Iterator[None]:
    """What the dispatcher hands over runs without autocast, because an op has chosen its dtypes; without autograd,
    which is the FusedFunctions' and on where an exported program calls the op itself; and on x's device."""
    kind = x.device.type
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if kind != "meta" and torch.is_autocast_enabled(kind):  # autocast refuses meta tensors
            stack.enter_context(torch.autocast(kind, enabled=False))
        if x.is_cuda:
            stack.enter_context(torch.cuda.device(x.device))
        yield


def _warn_or_raise(name: str, reason: str) -> None:
    """That Triton cannot take a call: an error if strict, else one warning for each reason."""
    if settings()[1]:
        raise Unsupported(f"fastvit::{name}: {reason}")
    if (name, reason) not in _warned:
        _warned.add((name, reason))
        warnings.warn(f"fastvit::{name} runs on ATen instead of Triton: {reason}", stacklevel=4)


@functools.cache
def _cuda_arch(index: int) -> str:
    """Also takes over what was tuned for this model of GPU: configs depend on it and on shapes only."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = str(properties.gcnArchName).split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    _tuned.load(arch, properties.name, cache_folder())
    return arch


without_gpu = 4  # multiprocessors, where there is no GPU; in the interpreter few, so that persistent loops iterate


def multiprocessors(index: int | None) -> int:
    """Streaming multiprocessors of a GPU."""
    return without_gpu if index is None else _multiprocessors(index)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _target(x: Tensor) -> str:
    return _cuda_arch(x.device.index) if x.is_cuda else "sm_90"


def arch(x: Tensor) -> str:
    """The target that launch configs are chosen for: "sm_90", "gfx942", ...; the interpreter takes Hopper's. Raises
    `Unsupported` for NVIDIA GPUs without bfloat16 or asynchronous copies, for which no kernel is compiled."""
    found = _target(x)
    if found.startswith(("sm_5", "sm_6", "sm_7")):
        raise Unsupported(f"{found} is older than sm_80")
    return found


def stat_dtype(x: Tensor) -> torch.dtype:
    """Of statistics, softmax and sums over x: float32, or float64 for float64."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def is_fake(x: Tensor) -> bool:
    """Whether x has no data: a study of memory runs ops on it. Where an op works in parts that need the same memory,
    one part is enough."""
    return FakeTensor is not None and isinstance(x, FakeTensor)


def float32_precision() -> str:
    """PyTorch's setting for matmuls of float32, by either of its ways, which it refuses to see mixed."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def dot_precision(x: Tensor) -> str:
    """`tl.dot`'s input_precision for x: float32 follows PyTorch's setting, 16-bit operands are exact either way. Tensor
    cores cut TF32 operands off where cuBLAS may round them: a product is up to 2^-9 too small (tests/test_tf32.py)."""
    tf32 = x.dtype is torch.float32 and float32_precision() != "highest"
    return "tf32" if tf32 else "ieee"


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
