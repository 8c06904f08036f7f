"""Modules of timm's shape, ours included, as the descriptions that `fastvit.fuse` runs, and what the readers of other
libraries' modules in `fastvit.integrations` share.

Modules are read anew for every call, since hooks, adapters, modes and parameters come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import nn

from fastvit._modules import Classes, Unsupported, qualified_name, read_or_none, submodules
from fastvit.fuse import Attention, Block, Branch, Call, Half, Layer, Linear, Mlp, Norm
from fastvit.ops._activations import GATED

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


def describe_half(branch: Branch, norm: nn.LayerNorm, scale: Any) -> Half[Branch]:
    """Without stochastic depth. scale: a module with LayerScale's gamma, or nn.Identity."""
    return Half(branch, read_norm(norm), None if isinstance(scale, nn.Identity) else scale.gamma)


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
