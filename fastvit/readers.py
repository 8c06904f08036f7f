"""Modules of timm's shape, ours included, as the descriptions that `fastvit.fuse` runs, and what the readers of other
libraries' modules in `fastvit.integrations` share.

Modules are read anew for every call, since hooks, adapters, modes and parameters come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from fastvit import fuse
from fastvit._modules import Classes, Unsupported, qualified_name, read_or_none, submodules
from fastvit.fuse import Attention, Block, Branch, Call, Half, Layer, Linear, Mlp, Norm
from fastvit.ops._activations import GATED

LINEAR: Classes = {
    nn.Linear,
    "peft.tuners.lora.layer.Linear",
    "torch.ao.nn.quantized.dynamic.modules.linear.Linear",  # of torch.ao.quantization.quantize_dynamic
}
DROPOUT: Classes = {nn.Dropout}
LAYER_NORM: Classes = {nn.LayerNorm, "timm.layers.norm.LayerNorm"}
RMS_NORM: Classes = {nn.RMSNorm, "timm.layers.norm.RmsNorm", "timm.layers.norm.RmsNormFp32"}
NORM: Classes = LAYER_NORM | RMS_NORM  # and ours
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
_IDENTITY = {nn.Identity}
SILU = nn.SiLU()  # for modules that call the function


_OF_ATTENTION = {"qkv": LINEAR, "proj": LINEAR, "attn_drop": DROPOUT, "proj_drop": DROPOUT}
_OF_MLP = {"fc1": LINEAR, "fc2": LINEAR, "act": ACTIVATIONS, "drop1": DROPOUT, "drop2": DROPOUT}


def read_attention(attn: Any) -> Attention:
    qkv, proj, attn_drop, proj_drop = submodules(attn, _OF_ATTENTION)
    if qkv.out_features != 3 * proj.in_features:
        raise Unsupported(f"qkv has {qkv.out_features} outputs for {proj.in_features} inputs of proj")
    norms: tuple[Any, ...] = ()
    if len(attn._modules) > 4:
        norms = read_norms_of_attention(attn)
    scale, training = attn.scale, attn_drop.training
    if attn.__dict__.get("fused_attn"):  # timm then leaves both to F.scaled_dot_product_attention
        scale, training = None, attn.training
    attn_drop_p = attn_drop.p if training else 0.0
    return describe_attention((read_layer(qkv),), proj, attn.num_heads, scale, attn_drop_p, proj_drop, *norms)


def read_norms_of_attention(attn: nn.Module) -> tuple[Norm | None, tuple[Norm, Norm] | None]:
    """Of `norm`, and of `q_norm` and `k_norm`: what timm's attention may have beside its four layers, but for a gate,
    which no op has."""
    if not _left_out(attn, "gate"):
        raise Unsupported("a gate in attention")
    return read_inner_norm(attn), read_qk_norm(attn)


def read_qk_norm(
    attn: nn.Module, classes: Classes = NORM, read: Callable[[Any], Norm] | None = None
) -> tuple[Norm, Norm] | None:
    """Of `q_norm` and `k_norm`, where there are any. read: reads those of the classes, `read_norm` if None."""
    if _left_out(attn, "q_norm", "k_norm"):
        return None
    q_norm, k_norm = map(read or read_norm, submodules(attn, q_norm=classes, k_norm=classes))
    _check_has_weight("q_norm", q_norm)
    _check_has_weight("k_norm", k_norm)
    if (q_norm.kind, q_norm.eps, q_norm.bias is None) != (k_norm.kind, k_norm.eps, k_norm.bias is None):
        raise Unsupported("q_norm and k_norm are of two kinds")
    return q_norm, k_norm


def _left_out(module: nn.Module, *names: str) -> bool:
    """Whether each of these submodules is missing or an identity; Unsupported where that has hooks: somebody looks at
    what passes through."""
    children = module._modules
    present = {name: _IDENTITY for name in names if children.get(name) is not None}
    if any(type(children[name]) is not nn.Identity for name in present):
        return False
    submodules(module, present)
    return True


def read_mlp(mlp: Any) -> Mlp:
    if "gate_last" in mlp.__dict__ or "fc1_g" in mlp._modules:
        return _read_gated_mlp(mlp)
    fc1, fc2, act, drop1, drop2 = submodules(mlp, _OF_MLP)
    return describe_mlp(fc1, act, fc2, drop1, drop2, read_inner_norm(mlp) if "norm" in mlp._modules else None)


def _read_gated_mlp(mlp: Any) -> Mlp:
    """timm's SwiGLU, with a layer each for gate and value, and GluMlp, with one."""
    names = ("fc1_g", "fc1_x") if "fc1_g" in mlp._modules else ("fc1",)
    act, drop1, fc2, drop2, *fc1 = submodules(
        mlp, act=ACTIVATIONS, drop1=DROPOUT, fc2=LINEAR, drop2=DROPOUT, **dict.fromkeys(names, LINEAR)
    )
    gate_last = len(names) == 1 and mlp.gate_last
    return describe_gated_mlp(fc1, act, fc2, drop1, drop2, gate_last=gate_last, inner_norm=read_inner_norm(mlp))


def read_inner_norm(branch: nn.Module) -> Norm | None:
    """Of `norm`, in front of the last layer, where there is one."""
    if _left_out(branch, "norm"):
        return None
    norm = read_norm(*submodules(branch, norm=NORM))
    _check_has_weight("norm", norm)
    return norm


def _check_has_weight(name: str, norm: Any) -> None:
    if norm.weight is None:
        raise Unsupported(f"{name} has no weight")


def _read_half(read_branch: Callable[[Any], Any], parts: Mapping[str, Classes], block: Any) -> Half[Any]:
    branch, norm, scale, drop_path = submodules(block, parts)
    layer_scale = None if type(scale) is nn.Identity else scale.gamma
    p, scale_by_keep = 0.0, True
    if drop_path.training and type(drop_path) is not nn.Identity:
        p, scale_by_keep = drop_path.drop_prob, drop_path.scale_by_keep
    return Half(read_branch(branch), read_norm(norm), layer_scale, p, scale_by_keep)


read_attention_half: Callable[[Any], Half[Attention]] = partial(
    _read_half, read_attention, {"attn": ATTENTION, "norm1": NORM, "ls1": LAYER_SCALE, "drop_path1": DROP_PATH}
)
read_mlp_half: Callable[[Any], Half[Mlp]] = partial(
    _read_half, read_mlp, {"mlp": MLP, "norm2": NORM, "ls2": LAYER_SCALE, "drop_path2": DROP_PATH}
)


def read_block(block: Any) -> Block:
    return read_attention_half(block), read_mlp_half(block)


# ---- what the readers of every library share ----


def read_linear(layer: nn.Module) -> Linear:
    """Weight and bias of a linear layer or a LayerNorm as they are now: FSDP puts others in their place from call to
    call, some versions of it as plain attributes."""
    parameters: dict[str, Any] = layer._parameters  # a third of the time of two attributes
    if "weight" in parameters and "bias" in parameters:
        weight, bias = parameters["weight"], parameters["bias"]
    else:
        weight, bias = layer.weight, layer.bias
    if type(weight) is not Parameter and _is_quantised(weight):
        raise Unsupported(f"a weight of the type {type(weight).__name__}")
    return Linear(weight, bias)


def _is_quantised(weight: Any) -> bool:
    """Whether a weight is made of other tensors, as torchao's are: only PyTorch's own functions know such a weight. So
    are DTensors, but FSDP2 leaves these between calls and puts others in their place for a call."""
    kind = type(weight)
    return hasattr(kind, "__tensor_flatten__") and not kind.__module__.startswith("torch.distributed.")


def read_layer(layer: nn.Module) -> Layer:
    """A linear layer of a class in LINEAR."""
    parameters = layer._parameters
    weight = parameters.get("weight")
    if type(weight) is Parameter and "bias" in parameters:  # the usual case, without another call
        return Linear(weight, parameters["bias"])
    if "base_layer" in layer._modules:
        return _read_adapted(layer)
    if not isinstance(layer, nn.Linear) or _is_quantised(layer.weight):  # the quantised class's `weight` is a method
        return Call(layer)
    return read_linear(layer)


def _read_adapted(layer: Any) -> Layer:
    """Of peft: its base where that is all that runs, with adapters merged or else disabled (with both, its forward
    takes them out of the weight)."""
    if layer.merged != layer.disable_adapters:
        base = read_or_none(submodules, layer, base_layer=LINEAR)
        if base is not None:
            return read_layer(base[0])
    return Call(layer)


def read_norm(norm: Any) -> Norm:
    """Read a module of a class in NORM; the weight is None where the module has none."""
    if len(norm.normalized_shape) != 1:
        raise Unsupported("it normalises more than the last dimension")
    if norm.__dict__.get("_fast_norm"):
        raise Unsupported("timm's fast norm is on, which rounds otherwise")
    if isinstance(norm, nn.LayerNorm):
        return Norm(*read_linear(norm), norm.eps)
    return rms_norm(norm.weight, norm.eps)


def rms_norm(weight: Tensor | None, eps: float | None) -> Norm:
    """eps: None for PyTorch's, of the dtype that F.rms_norm computes in, which without a weight is known with x."""
    if eps is None and weight is not None:
        eps = fuse.default_eps(weight.dtype)
    norm: Any = weight, None, eps, "rms"
    return Norm(*norm)


def describe_half(branch: Branch, norm: Any, scale: Any) -> Half[Branch]:
    """Without stochastic depth. scale: a module with LayerScale's gamma, or nn.Identity."""
    return Half(branch, read_norm(norm), None if isinstance(scale, nn.Identity) else scale.gamma)


Dropout = nn.Dropout | None  # the layer, or None where there is none


def describe_attention(
    qkv: tuple[Layer, ...], proj: nn.Linear, num_heads: int, scale: float | None, attn_drop: float, proj_drop: Dropout,
    scale_norm: Norm | None = None, qk_norm: tuple[Norm, Norm] | None = None, kv_heads: int | None = None,
) -> Attention:  # fmt: skip
    """Checks that the ops take this head dimension, these norms and probabilities. kv_heads: of k and v, or None for as
    many as q has."""
    head_dim, rest = divmod(proj.in_features, num_heads)
    if rest or head_dim % 8 or not 16 <= head_dim <= 256:  # not `takes_head_dim`, without its call
        raise Unsupported(f"head_dim {proj.in_features / num_heads:g} is not a multiple of 8 from 16 to 256")
    p = proj_drop.p if proj_drop is not None and proj_drop.training else 0.0
    if attn_drop >= 1.0 or p >= 1.0:
        raise Unsupported("a dropout of everything")
    kv_heads = 0 if kv_heads is None or kv_heads == num_heads else kv_heads
    if kv_heads and num_heads % kv_heads:
        raise Unsupported(f"{kv_heads} heads of keys for {num_heads} of queries")
    in_steps = kv_heads > 0
    if qk_norm is not None:
        widths = {len(norm.weight) for norm in qk_norm}
        in_steps = in_steps or widths != {head_dim}
        if widths not in ({head_dim}, {num_heads * head_dim}) or (kv_heads and widths != {head_dim}):
            raise Unsupported(f"norms of q and k over {sorted(widths)} of {num_heads} heads of {head_dim}")
    return Attention(qkv, read_layer(proj), num_heads, scale, attn_drop, p, scale_norm, qk_norm, kv_heads, in_steps)


def describe_mlp(
    fc1: nn.Linear, act: nn.Module, fc2: nn.Linear, drop1: Dropout, drop2: Dropout, inner_norm: Norm | None = None
) -> Mlp:
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
    return Mlp(read_layer(fc1), read_layer(fc2), activation, act, p1, p2, inner_norm=inner_norm)


def describe_gated_mlp(
    fc1: Sequence[nn.Linear], act: nn.Module, fc2: nn.Linear, drop1: Dropout = None, drop2: Dropout = None,
    *, gate_last: bool = False, inner_norm: Norm | None = None,
) -> Mlp:  # fmt: skip
    """fc1: the gate's and the value's, or one of both; act: of the gate, of a class in ACTIVATIONS."""
    mlp = describe_mlp(fc1[0], act, fc2, drop1, drop2, inner_norm)
    for gated, plain in GATED.items():
        if plain == mlp.activation:
            value = read_layer(fc1[1]) if len(fc1) == 2 else None
            return mlp._replace(activation=gated, value=value, gate_last=gate_last)
    raise Unsupported(f"a gate with {mlp.activation}")
