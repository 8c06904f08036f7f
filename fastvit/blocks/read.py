"""Shared by the readers of all libraries: the classes of layers that fused ops take, and functions that describe such
layers as in `spec.py`.

A module is read when its hooks, adapters, modes, parameters or attributes have changed (`unchanged.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fastvit.blocks import run
from fastvit.blocks.spec import (
    AdaptedLinear,
    AttentionSpec,
    HalfSpec,
    LinearSpec,
    PlainLinear,
)
from fastvit.blocks.submodules import CannotFuse, Classes, read_or_none, submodules
from fastvit.ops import Norm

LINEAR: Classes = {
    nn.Linear,
    "peft.tuners.lora.layer.Linear",
    "torch.ao.nn.quantized.dynamic.modules.linear.Linear",  # of torch.ao.quantization.quantize_dynamic
}
DROPOUT: Classes = {nn.Dropout}
LAYER_NORM: Classes = {
    nn.LayerNorm, "fastvit.layers.LayerNorm", "timm.layers.norm.LayerNorm", "open_clip.transformer.LayerNorm",
}  # fmt: skip
RMS_NORM: Classes = {nn.RMSNorm, "fastvit.layers.RMSNorm", "timm.layers.norm.RmsNorm", "timm.layers.norm.RmsNormFp32"}
NORM: Classes = LAYER_NORM | RMS_NORM
LAYER_SCALE: Classes = {
    nn.Identity,
    "fastvit.layers.LayerScale",
    "timm.layers.layer_scale.LayerScale",
    "timm.models.vision_transformer.LayerScale",
}
DROP_PATH: Classes = {nn.Identity, "fastvit.layers.DropPath", "timm.layers.drop.DropPath"}
ATTENTION: Classes = {
    "fastvit.layers.Attention",
    "timm.layers.attention.Attention",
    "timm.models.vision_transformer.Attention",
}
MLP: Classes = {
    f"{home}.{name}" for home in ("fastvit.layers", "timm.layers.mlp") for name in ("Mlp", "GluMlp", "SwiGLU")
}
ACTIVATIONS: dict[type | str, str] = {
    nn.GELU: "gelu",
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    "fastvit.layers.QuickGELU": "quick_gelu",
    "open_clip.transformer.QuickGELU": "quick_gelu",
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
    "timm.layers.activations.QuickGELU": "quick_gelu",
    "transformers.activations.FastGELUActivation": "gelu_tanh",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.QuickGELUActivation": "quick_gelu",
    "transformers.activations.SiLUActivation": "silu",
}
_IDENTITY = {nn.Identity}


def read_qk_norm(
    attn: nn.Module, classes: Classes = NORM, read: Callable[[Any], Norm] | None = None
) -> tuple[Norm, Norm] | None:
    """Read `q_norm` and `k_norm`; None if the module has none. read: the reader of `classes`, `read_norm` if None."""
    if is_left_out(attn, "q_norm", "k_norm"):
        return None
    q_norm, k_norm = map(read or read_norm, submodules(attn, q_norm=classes, k_norm=classes))
    _check_has_weight("q_norm", q_norm)
    _check_has_weight("k_norm", k_norm)
    if (q_norm.kind, q_norm.eps, q_norm.bias is None) != (k_norm.kind, k_norm.eps, k_norm.bias is None):
        raise CannotFuse("q_norm and k_norm are of two kinds")
    return q_norm, k_norm


def is_left_out(module: nn.Module, *names: str) -> bool:
    """Return whether each of these submodules is missing or an identity. Raises CannotFuse if an identity has hooks,
    because they have to see what passes through it."""
    children = module._modules
    present = {name: _IDENTITY for name in names if children.get(name) is not None}
    if any(type(children[name]) is not nn.Identity for name in present):
        return False
    submodules(module, present)
    return True


def read_inner_norm(branch: nn.Module) -> Norm | None:
    """Read `norm`, which stands before the last layer of a branch; None if there is none."""
    if is_left_out(branch, "norm"):
        return None
    norm = read_norm(*submodules(branch, norm=NORM))
    _check_has_weight("norm", norm)
    return norm


def _check_has_weight(name: str, norm: Any) -> None:
    if norm.weight is None:
        raise CannotFuse(f"{name} has no weight")


def read_linear(layer: nn.Module) -> PlainLinear:
    """Read weight and bias of a linear layer or a LayerNorm as they are now: FSDP replaces them from call to call, some
    versions of it by plain attributes."""
    parameters: dict[str, Any] = layer._parameters  # a third of the time of two attributes
    if "weight" in parameters and "bias" in parameters:
        weight, bias = parameters["weight"], parameters["bias"]
    else:
        weight, bias = layer.weight, layer.bias
    if type(weight) is not Parameter and _is_for_pytorch(weight):
        raise CannotFuse(f"a weight of the type {type(weight).__name__}")
    return PlainLinear(weight, bias)


def _is_for_pytorch(weight: Any) -> bool:
    """Return whether only PyTorch's own functions accept a weight: a sparse one, or one that is composed of other
    tensors, as torchao's are. DTensors are composed too, but FSDP2 replaces them by plain tensors during a call."""
    kind = type(weight)
    if hasattr(kind, "__tensor_flatten__"):
        return not kind.__module__.startswith("torch.distributed.")
    return isinstance(weight, Tensor) and weight.layout is not torch.strided


def read_layer(layer: nn.Module) -> LinearSpec:
    """Read a linear layer of a class in LINEAR."""
    parameters = layer._parameters
    weight = parameters.get("weight")
    if type(weight) is Parameter and weight.layout is torch.strided and "bias" in parameters:  # the usual case
        return PlainLinear(weight, parameters["bias"])
    if "base_layer" in layer._modules:
        return _read_adapted(layer)
    if not isinstance(layer, nn.Linear) or _is_for_pytorch(layer.weight):  # the quantised class's `weight` is a method
        return AdaptedLinear(layer)
    return read_linear(layer)


def _read_adapted(layer: Any) -> LinearSpec:
    """Read a linear layer of peft: its base layer if nothing else runs, that is if its adapters are either merged or
    disabled. If both, its forward unmerges them first."""
    if layer.merged != layer.disable_adapters:
        base = read_or_none(submodules, layer, base_layer=LINEAR)
        if base is not None:
            return read_layer(base[0])
    return AdaptedLinear(layer)


def read_norm(norm: Any) -> Norm:
    """Read a module of a class in NORM; the weight is None if the module has none."""
    if len(norm.normalized_shape) != 1:
        raise CannotFuse("it normalises more than the last dimension")
    if norm.__dict__.get("_fast_norm"):
        raise CannotFuse("timm's fast norm is on, which rounds otherwise")
    if isinstance(norm, nn.LayerNorm):
        return Norm(*read_linear(norm), norm.eps)
    return rms_norm(norm.weight, norm.eps)


def rms_norm(weight: Tensor | None, eps: float | None) -> Norm:
    """Describe an RMSNorm. eps: None for PyTorch's default, which depends on the dtype that F.rms_norm computes in; for
    a norm without weight it stays None until x is known."""
    if eps is None and weight is not None:
        eps = run.default_eps(weight.dtype)
    norm: Any = weight, None, eps, "rms"
    return Norm(*norm)


def read_drop_path(module: Any) -> tuple[float, bool]:
    """Read stochastic depth: the probability, 0 outside of training, and whether kept samples are scaled."""
    if isinstance(module, nn.Identity) or not module.training:
        return 0.0, True
    return module.drop_prob, getattr(module, "scale_by_keep", True)


def read_half(
    read_branch: Callable[[Any], Any], parts: Mapping[str, Classes], block: Any, gamma: str = ""
) -> HalfSpec[Any]:
    """Read half a pre-norm block. parts: names and classes of the branch and its norm, and of LayerScale and stochastic
    depth, as far as the block has them. gamma: the name of LayerScale if it is a parameter of the block, or None."""
    branch, norm, *others = submodules(block, parts)
    layer_scale, drop_path = getattr(block, gamma, None) if gamma else None, (0.0, True)
    for module in others:
        if "drop_prob" in module.__dict__:
            drop_path = read_drop_path(module)
        elif type(module) is not nn.Identity:
            layer_scale = module.gamma
    return HalfSpec(read_branch(branch), read_norm(norm), layer_scale, *drop_path)


def read_packed(qkv: nn.Linear, proj: nn.Linear) -> tuple[LinearSpec]:
    """Read the layer of q, k and v, after checking that it has as many channels of each as `proj` takes."""
    if qkv.out_features != 3 * proj.in_features:
        raise CannotFuse(f"qkv has {qkv.out_features} outputs for {proj.in_features} inputs of proj")
    return (read_layer(qkv),)


Dropout = nn.Dropout | None  # the layer, or None where there is none


def describe_attention(
    qkv: tuple[LinearSpec, ...], proj: nn.Linear, num_heads: int, scale: float | None, attn_drop: float,
    proj_drop: Dropout, scale_norm: Norm | None = None, qk_norm: tuple[Norm, Norm] | None = None,
    kv_heads: int | None = None,
) -> AttentionSpec:  # fmt: skip
    """Describe attention, after checking that the ops take its head dimension, norms and probabilities. kv_heads: the
    heads of k and v, or None for as many as q has."""
    head_dim, rest = divmod(proj.in_features, num_heads)
    if rest or head_dim % 8 or not 16 <= head_dim <= 256:  # not `takes_head_dim`, whose call takes 60 ns
        raise CannotFuse(f"head_dim {proj.in_features / num_heads:g} is not a multiple of 8 from 16 to 256")
    p = proj_drop.p if proj_drop is not None and proj_drop.training else 0.0
    if attn_drop >= 1.0 or p >= 1.0:
        raise CannotFuse("a dropout of everything")
    kv_heads = 0 if kv_heads is None or kv_heads == num_heads else kv_heads
    if kv_heads and num_heads % kv_heads:
        raise CannotFuse(f"{kv_heads} heads of keys for {num_heads} of queries")
    in_steps = kv_heads > 0
    if qk_norm is not None:
        widths = {len(norm.weight) for norm in qk_norm}
        in_steps = in_steps or widths != {head_dim}
        if widths not in ({head_dim}, {num_heads * head_dim}) or (kv_heads and widths != {head_dim}):
            raise CannotFuse(f"norms of q and k over {sorted(widths)} of {num_heads} heads of {head_dim}")
    last = read_layer(proj)
    adapted = AdaptedLinear in (*map(type, qkv), type(last))  # a tuple: torch.compile of 2.9 traces no `in map(...)`
    norms = scale_norm, qk_norm
    return AttentionSpec(qkv, last, num_heads, scale, attn_drop, p, *norms, kv_heads, in_steps, adapted)
