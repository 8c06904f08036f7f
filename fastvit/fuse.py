"""The two halves of a pre-norm transformer block as fused ops: described by tensors, run, and read from modules.

    x + drop_path(layer_scale * attention(norm(x)))    layer_norm_attention
    x + drop_path(layer_scale * mlp(norm(x)))          layer_norm_mlp

Modules of timm's shape, ours included, are read here; those of other libraries in `fastvit.integrations`, into the same
descriptions. Modules are read anew for every call, since hooks, adapters, modes and parameters come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from fastvit import ops
from fastvit._modules import Classes, Unsupported, qualified_name, read_or_none, submodules
from fastvit.ops import Rotary
from fastvit.ops._activations import GATED

Branch = TypeVar("Branch", "Attention", "Mlp")

# ---- descriptions; probabilities are those that apply now: 0.0 in evaluation ----


class Linear(NamedTuple):
    """weight (out, in), bias (out,) or None."""

    weight: Tensor
    bias: Tensor | None


class Call(NamedTuple):
    """A linear layer that is more than weight and bias, with LoRA's adapters: its module is called, between fused ops.
    weight: of the layer that is adapted."""

    module: nn.Module
    weight: Tensor


Layer = Linear | Call


class Norm(NamedTuple):
    """LayerNorm: weight (D,), bias (D,)."""

    weight: Tensor
    bias: Tensor
    eps: float


class Attention(NamedTuple):
    """Multi-head self-attention. qkv: one packed layer (3 * H * d, D), or three for q, k and v; scale: None for
    d**-0.5; attn_drop: of the attention probabilities; proj_drop: behind the projection."""

    qkv: tuple[Layer, ...]
    proj: Layer
    num_heads: int
    scale: float | None = None
    attn_drop: float = 0.0
    proj_drop: float = 0.0


class Mlp(NamedTuple):
    """activation: as `ops.mlp` names it; act: the same, or the gate's, as a module, behind a Call. drop1: behind the
    activation, 0.0 or equal to drop2; drop2: behind fc2. If gated, fc1 is the gate's layer beside the value's, or both
    in one, the gate's rows first or last; inner_norm: before fc2."""

    fc1: Layer
    fc2: Layer
    activation: str
    act: nn.Module
    drop1: float = 0.0
    drop2: float = 0.0
    value: Layer | None = None
    gate_last: bool = False
    inner_norm: Norm | None = None


class Half(NamedTuple, Generic[Branch]):
    """x + drop_path(layer_scale * branch(norm(x))). scale_by_keep: whether samples that drop_path keeps are divided by
    1 - drop_path."""

    branch: Branch
    norm: Norm
    layer_scale: Tensor | None = None
    drop_path: float = 0.0
    scale_by_keep: bool = True


Block = tuple[Half[Attention], Half[Mlp]]

# ---- running them: (B, N, D) -> (B, N, D), an MLP alone (..., D) -> (..., D) ----


def run_block(x: Tensor, block: Block, rotary: Rotary | None = None) -> Tensor:
    attention, mlp = block
    return run_mlp_half(run_attention_half(x, attention, rotary), mlp)


def run_attention_half(x: Tensor, half: Half[Attention], rotary: Rotary | None = None) -> Tensor:
    attn, norm = half.branch, half.norm
    if Call in (*map(type, attn.qkv), type(attn.proj)):
        return _run_last(_attend(ops.layer_norm(x, *norm), attn, rotary), attn.proj, attn.proj_drop, x, half)
    weights: Any
    weights, biases = attn.qkv[0] if len(attn.qkv) == 1 else zip(*attn.qkv, strict=True)
    if rotary is not None and (rotary.sin.requires_grad or rotary.cos.requires_grad):  # learnt frequencies
        qkv = ops.layer_norm_linear(x, norm.weight, norm.bias, weights, biases, eps=norm.eps)
        return _run_last(_attend_packed(qkv, attn, rotary), attn.proj, attn.proj_drop, x, half)
    arguments = x, norm.weight, norm.bias, weights, biases, *attn.proj, attn.num_heads
    if attn.proj_drop:
        branch = ops.layer_norm_attention(
            *arguments, eps=norm.eps, scale=attn.scale, dropout_p=attn.attn_drop, rotary=rotary
        )
        return _add_branch(x, ops.dropout(branch, attn.proj_drop), half)
    row_scale = draw_drop_path(x, half.drop_path, half.scale_by_keep) if half.drop_path else None
    return ops.layer_norm_attention(
        *arguments, eps=norm.eps, scale=attn.scale, dropout_p=attn.attn_drop,
        layer_scale=half.layer_scale, row_scale=row_scale, residual=x, rotary=rotary,
    )  # fmt: skip


def run_mlp_half(x: Tensor, half: Half[Mlp]) -> Tensor:
    mlp, norm = half.branch, half.norm
    if Call in (type(mlp.fc1), type(mlp.value), type(mlp.fc2)):
        return _run_last(_widen(ops.layer_norm(x, *norm), mlp), mlp.fc2, mlp.drop2, x, half)
    fc1 = mlp.fc1 if mlp.value is None and not mlp.gate_last else _gate_and_value(mlp)
    tensors = (norm.weight, norm.bias, *fc1, *mlp.fc2)
    if mlp.drop1 != mlp.drop2:
        branch = ops.layer_norm_mlp(x, *tensors, eps=norm.eps, activation=mlp.activation, inner_norm=mlp.inner_norm)
        return _add_branch(x, ops.dropout(branch, mlp.drop2), half)
    row_scale = draw_drop_path(x, half.drop_path, half.scale_by_keep) if half.drop_path else None
    return ops.layer_norm_mlp(
        x, *tensors, eps=norm.eps, activation=mlp.activation, dropout_p=mlp.drop1,
        layer_scale=half.layer_scale, row_scale=row_scale, residual=x, inner_norm=mlp.inner_norm,
    )  # fmt: skip


def run_attention(x: Tensor, attn: Attention, rotary: Rotary | None = None) -> Tensor:
    return ops.dropout(_run(_attend(x, attn, rotary), attn.proj), attn.proj_drop)


def run_mlp(x: Tensor, mlp: Mlp) -> Tensor:
    if Call in (type(mlp.fc1), type(mlp.value), type(mlp.fc2)):
        return ops.dropout(_run(_widen(x, mlp), mlp.fc2), mlp.drop2)
    fc1 = mlp.fc1 if mlp.value is None and not mlp.gate_last else _gate_and_value(mlp)
    tensors = (*fc1, *mlp.fc2)
    out = ops.mlp(x, *tensors, activation=mlp.activation, dropout_p=mlp.drop1, inner_norm=mlp.inner_norm)
    return ops.dropout(out, mlp.drop2) if mlp.drop1 != mlp.drop2 else out


def _run(x: Tensor, layer: Layer) -> Tensor:
    return layer.module(x) if isinstance(layer, Call) else ops.linear(x, *layer)


def _attend(x: Tensor, attn: Attention, rotary: Rotary | None) -> Tensor:
    """Attention up to its projection: (B, N, D) -> (B, N, H * d)."""
    projected = [layer.module(x) if isinstance(layer, Call) else F.linear(x, *layer) for layer in attn.qkv]
    if len(projected) == 1:
        return _attend_packed(projected[0], attn, rotary)
    q, k, v = (t.unflatten(-1, (attn.num_heads, -1)) for t in projected)
    if rotary is not None:
        q, k = ops.rotary(q, rotary), ops.rotary(k, rotary)
    return ops.attention(q, k, v, scale=attn.scale, dropout_p=attn.attn_drop).flatten(2)


def _attend_packed(qkv: Tensor, attn: Attention, rotary: Rotary | None) -> Tensor:
    """(B, N, 3 * H * d) -> (B, N, H * d)"""
    qkv = qkv.unflatten(-1, (3, attn.num_heads, -1))
    if rotary is not None:
        qkv = ops.rotary_qkvpacked(qkv, rotary)
    return ops.attention_qkvpacked(qkv, scale=attn.scale, dropout_p=attn.attn_drop).flatten(2)


def _gate_and_value(mlp: Mlp) -> tuple[Any, Any]:
    """Weights and biases of two layers without adapters, those of one layer as views."""
    if mlp.value is not None:
        weights, biases = zip(mlp.fc1, mlp.value, strict=True)
        return weights, biases
    layer: Any = mlp.fc1
    return layer.weight.chunk(2)[::-1], None if layer.bias is None else layer.bias.chunk(2)[::-1]


def _widen(x: Tensor, mlp: Mlp) -> Tensor:
    """An MLP up to fc2."""
    if mlp.activation in GATED:
        both = [_run(x, mlp.fc1), _run(x, mlp.value)] if mlp.value is not None else _run(x, mlp.fc1).chunk(2, dim=-1)
        gate, value = both[::-1] if mlp.gate_last else both
        hidden = ops.dropout(mlp.act(gate) * value, mlp.drop1)
        return hidden if mlp.inner_norm is None else ops.layer_norm(hidden, *mlp.inner_norm)
    if isinstance(mlp.fc1, Call):
        return ops.dropout(mlp.act(mlp.fc1.module(x)), mlp.drop1)
    return ops.dropout(ops.linear(x, *mlp.fc1, activation=mlp.activation), mlp.drop1)


def _run_last(hidden: Tensor, last: Layer, p: float, x: Tensor, half: Half[Any]) -> Tensor:
    """x + drop_path(layer_scale * dropout(last(hidden)))"""
    if p or isinstance(last, Call):
        return _add_branch(x, ops.dropout(_run(hidden, last), p), half)
    row_scale = draw_drop_path(x, half.drop_path, half.scale_by_keep) if half.drop_path else None
    return ops.linear(hidden, *last, layer_scale=half.layer_scale, row_scale=row_scale, residual=x)


def draw_drop_path(x: Tensor, p: float, scale_by_keep: bool) -> Tensor:
    """Stochastic depth's draw for a batch like x: (B,) of 0 and 1 / (1 - p), or 0 and 1, in x's dtype."""
    keep = 1.0 - p
    mask = x.new_empty(x.shape[0]).bernoulli_(keep)
    return mask.div_(keep) if scale_by_keep and keep > 0.0 else mask


def _add_branch(x: Tensor, branch: Tensor, half: Half[Any]) -> Tensor:
    """The end of a half behind a dropout that no op has in its epilogue."""
    if half.layer_scale is not None:
        branch = branch * half.layer_scale
    if half.drop_path:
        branch = branch * draw_drop_path(branch, half.drop_path, half.scale_by_keep).view(-1, 1, 1)
    return x + branch


# ---- reading them from modules of timm's shape ----

LINEAR: Classes = {nn.Linear, "peft.tuners.lora.layer.Linear"}
DROPOUT: Classes = {nn.Dropout}
LAYER_NORM: Classes = {nn.LayerNorm, "timm.layers.norm.LayerNorm"}
LAYER_SCALE: Classes = {nn.Identity, "timm.layers.layer_scale.LayerScale", "timm.models.vision_transformer.LayerScale"}
DROP_PATH: Classes = {nn.Identity, "timm.layers.drop.DropPath"}
ATTENTION: Classes = {"timm.layers.attention.Attention", "timm.models.vision_transformer.Attention"}
MLP: Classes = {"timm.layers.mlp.Mlp", "timm.layers.mlp.GluMlp", "timm.layers.mlp.SwiGLU"}
ACTIVATIONS: dict[type | str, str] = {
    nn.GELU: "gelu",
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
    "timm.layers.activations.QuickGELU": "quick_gelu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.QuickGELUActivation": "quick_gelu",
    "transformers.activations.SiLUActivation": "silu",
}
SILU = nn.SiLU()  # for modules that call the function
# What timm's attention may have beside its four layers, and no op has yet
_ATTENTION_OPTIONS = {"q_norm": "qk-norm", "k_norm": "qk-norm", "norm": "scale_norm", "gate": "a gate"}


def read_attention(attn: Any) -> Attention:
    qkv, attn_drop, proj, proj_drop = submodules(attn, qkv=LINEAR, attn_drop=DROPOUT, proj=LINEAR, proj_drop=DROPOUT)
    if qkv.out_features != 3 * proj.in_features:
        raise Unsupported(f"qkv has {qkv.out_features} outputs for {proj.in_features} inputs of proj")
    if len(attn._modules) > 4:
        refuse_options(attn)
    scale, training = attn.scale, attn_drop.training
    if attn.__dict__.get("fused_attn"):  # timm then leaves both to F.scaled_dot_product_attention
        scale, training = None, attn.training
    attn_drop_p = attn_drop.p if training else 0.0
    return describe_attention((read_layer(qkv),), proj, attn.num_heads, scale, attn_drop_p, proj_drop)


def refuse_options(attn: nn.Module) -> None:
    for name, option in _ATTENTION_OPTIONS.items():
        if not isinstance(attn._modules.get(name), nn.Identity | None):
            raise Unsupported(f"{option} in attention")


def read_mlp(mlp: Any) -> Mlp:
    if "gate_last" in mlp.__dict__ or "fc1_g" in mlp._modules:
        return _read_gated_mlp(mlp)
    if "norm" in mlp._modules:
        submodules(mlp, norm={nn.Identity})
    fc1, act, drop1, fc2, drop2 = submodules(mlp, fc1=LINEAR, act=ACTIVATIONS, drop1=DROPOUT, fc2=LINEAR, drop2=DROPOUT)
    return describe_mlp(fc1, act, fc2, drop1, drop2)


def _read_gated_mlp(mlp: Any) -> Mlp:
    """timm's SwiGLU, with a layer each for gate and value, and GluMlp, with one."""
    names = ("fc1_g", "fc1_x") if "fc1_g" in mlp._modules else ("fc1",)
    act, drop1, norm, fc2, drop2, *fc1 = submodules(
        mlp, act=ACTIVATIONS, drop1=DROPOUT, norm={nn.Identity, *LAYER_NORM}, fc2=LINEAR, drop2=DROPOUT,
        **dict.fromkeys(names, LINEAR),
    )  # fmt: skip
    inner_norm = None if type(norm) is nn.Identity else norm
    gate_last = len(names) == 1 and mlp.gate_last
    return describe_gated_mlp(fc1, act, fc2, drop1, drop2, gate_last=gate_last, inner_norm=inner_norm)


def _read_half(read_branch: Callable[[Any], Any], block: Any, /, **classes: Collection[type | str]) -> Half[Any]:
    branch, norm, scale, drop_path = submodules(block, **classes)
    layer_scale = None if type(scale) is nn.Identity else scale.gamma
    p, scale_by_keep = 0.0, True
    if drop_path.training and type(drop_path) is not nn.Identity:
        p, scale_by_keep = drop_path.drop_prob, drop_path.scale_by_keep
    return Half(read_branch(branch), read_norm(norm), layer_scale, p, scale_by_keep)


read_attention_half: Callable[[Any], Half[Attention]] = partial(
    _read_half, read_attention, attn=ATTENTION, norm1=LAYER_NORM, ls1=LAYER_SCALE, drop_path1=DROP_PATH
)
read_mlp_half: Callable[[Any], Half[Mlp]] = partial(
    _read_half, read_mlp, mlp=MLP, norm2=LAYER_NORM, ls2=LAYER_SCALE, drop_path2=DROP_PATH
)


def read_block(block: Any) -> Block:
    return read_attention_half(block), read_mlp_half(block)


# ---- what the readers of every library share ----


def read_linear(layer: nn.Module) -> Linear:
    """Weight and bias of a linear layer or a norm as they are now: FSDP puts others in their place from call to call,
    some versions of it as plain attributes."""
    parameters: dict[str, Any] = layer._parameters  # a third of the time of two attributes
    if "weight" in parameters and "bias" in parameters:
        return Linear(parameters["weight"], parameters["bias"])
    return Linear(layer.weight, layer.bias)  # type: ignore[arg-type]


def read_layer(layer: nn.Module) -> Layer:
    """A linear layer of a class in LINEAR."""
    parameters: dict[str, Any] = layer._parameters
    if "weight" in parameters and "bias" in parameters:
        return Linear(parameters["weight"], parameters["bias"])
    return _read_adapted(layer) if "base_layer" in layer._modules else read_linear(layer)


def _read_adapted(layer: Any) -> Layer:
    """Of peft: its base where that is all that runs, with adapters merged or else disabled (with both, its forward
    takes them out of the weight)."""
    if layer.merged != layer.disable_adapters:
        base = read_or_none(submodules, layer, base_layer={nn.Linear})
        if base is not None:
            return read_linear(base[0])
    return Call(layer, layer.get_base_layer().weight)


def read_norm(norm: nn.LayerNorm) -> Norm:
    weight, bias = read_linear(norm)
    if len(norm.normalized_shape) != 1:
        raise Unsupported("it normalises more than the last dimension")
    if weight is None or bias is None:
        raise Unsupported("a LayerNorm without weight or bias")
    if norm.__dict__.get("_fast_norm"):
        raise Unsupported("timm's fast norm is on, which rounds otherwise")
    return Norm(weight, bias, norm.eps)


Dropout = nn.Dropout | None  # the layer, or None where there is none


def describe_attention(
    qkv: tuple[Layer, ...], proj: nn.Linear, num_heads: int, scale: float | None, attn_drop: float, proj_drop: Dropout
) -> Attention:
    """Checks that the ops take this head dimension and these probabilities."""
    head_dim, rest = divmod(proj.in_features, num_heads)
    if rest or head_dim % 8 or not 16 <= head_dim <= 256:  # not `takes_head_dim`, without its call
        raise Unsupported(f"head_dim {proj.in_features / num_heads:g} is not a multiple of 8 from 16 to 256")
    p = proj_drop.p if proj_drop is not None and proj_drop.training else 0.0
    if attn_drop >= 1.0 or p >= 1.0:
        raise Unsupported("a dropout of everything")
    return Attention(qkv, read_layer(proj), num_heads, scale, attn_drop, p)


def describe_mlp(fc1: nn.Linear, act: nn.Module, fc2: nn.Linear, drop1: Dropout, drop2: Dropout) -> Mlp:
    """Checks that the ops take these probabilities. act: of a class in ACTIVATIONS."""
    p1 = drop1.p if drop1 is not None and drop1.training else 0.0
    p2 = drop2.p if drop2 is not None and drop2.training else 0.0
    if p1 >= 1.0 or p2 >= 1.0:
        raise Unsupported("a dropout of everything")
    if p1 not in (0.0, p2):
        raise Unsupported(f"its two dropouts differ: {p1} and {p2}")
    activation = ACTIVATIONS.get(type(act)) or ACTIVATIONS[qualified_name(act)]
    if act.__dict__.get("approximate") == "tanh":  # nn.GELU's
        activation = "gelu_tanh"
    return Mlp(read_layer(fc1), read_layer(fc2), activation, act, p1, p2)


def describe_gated_mlp(
    fc1: Sequence[nn.Linear], act: nn.Module, fc2: nn.Linear, drop1: Dropout = None, drop2: Dropout = None,
    *, gate_last: bool = False, inner_norm: nn.LayerNorm | None = None,
) -> Mlp:  # fmt: skip
    """fc1: the gate's and the value's, or one of both; act: of the gate, of a class in ACTIVATIONS."""
    mlp = describe_mlp(fc1[0], act, fc2, drop1, drop2)
    for gated, plain in GATED.items():
        if plain == mlp.activation:
            value = read_layer(fc1[1]) if len(fc1) == 2 else None
            norm = None if inner_norm is None else read_norm(inner_norm)
            return mlp._replace(activation=gated, value=value, gate_last=gate_last, inner_norm=norm)
    raise Unsupported(f"a gate with {mlp.activation}")
