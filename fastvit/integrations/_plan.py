"""How one module of another library gets a fused forward: reading it, refusing with a reason, falling back by call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastvit import _halves as halves
from fastvit._fusible import active_p, affine, untouched
from fastvit._halves import AttentionParts, Ends, MlpParts, Norm

LINEAR = ("torch.nn.modules.linear.Linear",)
IDENTITY = ("torch.nn.modules.linear.Identity",)
DROPOUT = ("torch.nn.modules.dropout.Dropout",)
LAYER_NORM = ("torch.nn.modules.normalization.LayerNorm", "timm.layers.norm.LayerNorm")
ACTIVATIONS = {
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
    "timm.layers.activations.QuickGELU": "quick_gelu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.QuickGELUActivation": "quick_gelu",
    "transformers.activations.SiLUActivation": "silu",
}


class Cannot(Exception):
    """Why a module's own forward has to run: raised while it is read, or by what a call asks for."""


def only_input(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The argument of a forward that has one, by position or under whatever name."""
    if len(args) + len(kwargs) != 1:
        raise Cannot("other arguments than its input")
    return args[0] if args else next(iter(kwargs.values()))


@dataclass(frozen=True)
class Plan:
    """What `accelerate` does with instances of one class.

    read: module -> its parts, as `run` takes them, a tuple of which each item is, or begins with, a tensor whose type
        has to fit the input's, or is none; raises `Cannot` for what no op can stand for. Called anew for every call,
        since hooks, adapters and other parameters come and go.
    run: (module, input, parts) -> what the module's own forward returns.
    ops: the names of the ops that run, for the report.
    admit: (module, *args, **kwargs), the arguments of a call -> its input; raises `Cannot` for what else they ask for.
    ndim: of the input, or None for any.
    """

    read: Callable[[Any], Any]
    run: Callable[[Any, Tensor, Any], Any]
    ops: str
    admit: Callable[..., Any] = only_input
    ndim: int | None = 3


def fused_forward(plan: Plan, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of module.forward."""
    try:
        x = plan.admit(module, *args, **kwargs)
        parts = plan.read(module)
        check_input(x, parts, plan.ndim)
    except Cannot as reason:
        return own_forward(module, reason, *args, **kwargs)
    return plan.run(module, x, parts)


_warned: set[tuple[str, str]] = set()


def own_forward(module: nn.Module, reason: Cannot, *args: Any, **kwargs: Any) -> Any:
    """The forward of the module's class, with one warning for each class and reason."""
    _warn(type(module).__name__, reason.args[0])  # not str(reason), which torch.compile of 2.11 does not trace
    return type(module).forward(module, *args, **kwargs)


def _warn(name: str, reason: str) -> None:
    if (name, reason) not in _warned:
        _warned.add((name, reason))
        warnings.warn(f"{name} runs its own forward instead of fastvit's: {reason}", stacklevel=5)


# What torch.compiler.assume_constant_result sets, without importing the compiler, which then calls the function as it
# traces: a warning itself cannot be traced by torch 2.11.
_warn._dynamo_marked_constant = True  # type: ignore[attr-defined]


_PLAIN = (Tensor, nn.Parameter)


def check_input(x: Any, parts: Any, ndim: int | None) -> None:
    """Whether a call's input can go into the ops: what they would refuse is left to the module's own forward."""
    if not isinstance(x, Tensor) or x.is_nested:
        raise Cannot(f"its input is no plain tensor but {type(x).__name__}")
    if ndim is not None and x.dim() != ndim:
        raise Cannot(f"its input has {x.dim()} dimensions, not {ndim}")
    for leaf in (x, *parts):
        while isinstance(leaf, tuple):
            leaf = leaf[0]
        if not isinstance(leaf, Tensor):
            continue
        if type(leaf) not in _PLAIN and is_traceable_wrapper_subclass(leaf):
            raise Cannot(f"a {type(leaf).__name__}")
        if x.dtype != leaf.dtype and not torch.is_autocast_enabled(x.device.type):
            raise Cannot(f"its input is {x.dtype} and its parameters are {leaf.dtype}")


def qualified(module: nn.Module) -> str:
    """Its class as "package.module.Class": libraries need not be imported to know their classes."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def part(module: nn.Module, name: str, kinds: tuple[str, ...]) -> Any:
    """The submodule `name`, which must be exactly of one of these classes, with its own forward and no hooks."""
    child = module._modules.get(name)
    if child is None:
        raise Cannot(f"it has no {name}")
    if qualified(child) not in kinds:
        raise Cannot(f"{name} is {type(child).__name__}")
    if not untouched(child, type(child)):
        raise Cannot(f"{name} has hooks or a forward of its own")
    return child


def read_norm(norm: nn.LayerNorm) -> Norm:
    if len(norm.normalized_shape) != 1:
        raise Cannot("it normalises more than the last dimension")
    if norm.weight is None or norm.bias is None:
        raise Cannot("a LayerNorm without weight or bias")
    if getattr(norm, "_fast_norm", False):
        raise Cannot("timm's fast norm is on, which rounds otherwise")
    return Norm(norm.weight, norm.bias, norm.eps)


def read_activation(module: nn.Module, name: str) -> str:
    act = part(module, name, tuple(ACTIVATIONS))
    return "gelu_tanh" if getattr(act, "approximate", "none") == "tanh" else ACTIVATIONS[qualified(act)]


def read_dropout(module: nn.Module, name: str) -> float:
    """The probability of the dropout `name` that applies now."""
    return check_dropout(active_p(part(module, name, DROPOUT)))


def read_dropouts(mlp: nn.Module, first: str, second: str) -> tuple[float, float]:
    """Of an MLP's dropouts behind activation and fc2, which `MlpParts` wants equal, or the first 0."""
    p = read_dropout(mlp, first), read_dropout(mlp, second)
    if p[0] and p[0] != p[1]:
        raise Cannot(f"its two dropouts differ: {p[0]} and {p[1]}")
    return p


def check_dropout(p: float) -> float:
    if p >= 1.0:
        raise Cannot("a dropout of everything")
    return p


def read_packed_attention(attn: Any, attn_p: float, scale: float | None) -> AttentionParts:
    """The layout that timm and Meta share: qkv, proj, proj_drop. attn_p, scale: as this version of it applies them."""
    qkv, proj = part(attn, "qkv", LINEAR), part(attn, "proj", LINEAR)
    heads = attn.num_heads
    check_heads(proj.in_features, heads)
    if qkv.out_features != 3 * proj.in_features:
        raise Cannot(f"qkv has {qkv.out_features} outputs for {proj.in_features} inputs of proj")
    proj_p = read_dropout(attn, "proj_drop")
    return AttentionParts((affine(qkv),), affine(proj), heads, scale, check_dropout(attn_p), proj_p)


def check_heads(width: int, num_heads: int) -> None:
    """Of q, k or v: whether `ops.attention` takes the head dimension."""
    head_dim, rest = divmod(width, num_heads)
    if rest or head_dim % 8 or not 16 <= head_dim <= 256:
        raise Cannot(f"head_dim {width / num_heads:g} is not a multiple of 8 from 16 to 256")


FUSED_BLOCK = "layer_norm_linear, attention_qkvpacked, linear, layer_norm_mlp"
# What a block plan's read returns
BlockParts = tuple[AttentionParts, Ends, MlpParts, Ends]


def run_block(block: Any, x: Tensor, parts: BlockParts) -> Tensor:
    attention, attention_ends, mlp, mlp_ends = parts
    return halves.mlp(halves.attention(x, attention, attention_ends), mlp, mlp_ends)


def run_attention(attn: Any, x: Tensor, parts: AttentionParts) -> Tensor:
    return halves.attention(x, parts)


def run_mlp(mlp: Any, x: Tensor, parts: MlpParts) -> Tensor:
    return halves.mlp(x, parts)
