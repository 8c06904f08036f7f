"""Guess what a module of an unknown class is for, from its class name and layers, and why it is left alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from torch import nn

from fastvit.blocks.read import LINEAR
from fastvit.blocks.submodules import CannotFuse, Classes, class_name, qualified_name
from fastvit.integrations.libraries.pytorch import read_patches

_ATTENTION = re.compile(r"att(entio)?n", re.IGNORECASE)
_MLP = re.compile(r"(mlp|ffn|feed_?forward|swiglu)(?!.*head)", re.IGNORECASE)
_BLOCK = re.compile(r"block", re.IGNORECASE)
_NORM = re.compile(r"(layer|rms)_?norm(?!.*2d)", re.IGNORECASE)  # 2d: norms of images, not of tokens
_PATCHES = re.compile(r"patch_?embed", re.IGNORECASE)
# Names of attributes of attention, or of a module around it, that show what it does
_ROTARY = re.compile(r"(^|_)rope(_|$)|rotary")
_RELATIVE = re.compile(r"(^|_)(rel(ative)?_(pos|coords)|position_bias)")


def linear_layers(module: nn.Module) -> list[nn.Module]:
    """Return the linear layers among a module's children, adapted and quantised ones included."""
    return [child for child in module.children() if _is_linear(getattr(child, "base_layer", child))]


def _convolutions(module: nn.Module) -> list[nn.Module]:
    """Return the convolutions among a module's children, adapted ones included."""
    return [child for child in module.children() if isinstance(getattr(child, "base_layer", child), nn.Conv2d)]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or qualified_name(module) in LINEAR


def part(module: nn.Module) -> Literal["attention", "MLP"] | None:
    """Return "attention" or "MLP" for a transformer's module that contains no other of its kind, otherwise None. It has
    linear layers: attention and MLPs made of convolutions do not count."""
    inside = list(module.modules())[1:]
    if _is_attention(module):
        return None if any(map(_is_attention, inside)) else "attention"
    return "MLP" if _is_mlp(module) and not any(map(_is_mlp, inside)) else None


def _is_attention(module: nn.Module) -> bool:
    if not _ATTENTION.search(type(module).__name__):
        return False
    return _linear_count(module) > 1 or any(p is not None and p.dim() > 1 for p in module._parameters.values())


def _is_mlp(module: nn.Module) -> bool:
    return bool(_MLP.search(type(module).__name__)) and _linear_count(module) > 1


def _linear_count(module: nn.Module) -> int:
    return sum(map(_is_linear, module.modules()))


def is_of_images(module: nn.Module) -> bool:
    """Return whether a module has convolutions and no linear layers: timm's MLP class may have either."""
    return bool(_convolutions(module)) and not linear_layers(module)


def could_be_fused(module: nn.Module, left: set[int]) -> bool:
    """Return whether a module of an unknown class does work that the ops are for. left: ids of the modules in it that
    stay as they were."""
    name = type(module).__name__
    plain = [layer for layer in linear_layers(module) if id(layer) in left]
    if _NORM.search(name):
        if getattr(module, "data_format", None) == "channels_first":  # transformers' norms of images (B, C, H, W)
            return False
        return any(parameter is not None for parameter in module._parameters.values())
    if _PATCHES.search(name):
        return any(id(layer) in left for layer in _convolutions(module))
    return part(module) == "attention" or (len(plain) > 1 and bool(_MLP.search(name) or _BLOCK.search(name)))


def reason(module: nn.Module, ancestors: Sequence[nn.Module], known: Classes) -> str:
    """Return why a module of an unknown class is skipped. ancestors: the modules it is in, from the outermost."""
    name = class_name(type(module), known)
    reasons = _obstacles(module, ancestors) if part(module) == "attention" else []
    if _PATCHES.search(type(module).__name__):
        reasons += [why for conv in _convolutions(module) if (why := _why_no_patches(conv))]
    if reasons:
        return f"{' and '.join(reasons)}, in {name}"
    return f"{name}{',' * (',' in name)} is not a class that fastvit knows"


def _why_no_patches(conv: nn.Module) -> str | None:
    if type(conv) is not nn.Conv2d:
        return f"its convolution is {class_name(type(conv))}"
    try:
        read_patches(conv)
    except CannotFuse as error:
        return str(error)
    return None


def _obstacles(attn: nn.Module, ancestors: Sequence[nn.Module]) -> list[str]:
    names = {name for module in (attn, *ancestors) for name in _attributes(module)}
    obstacles = []
    if any(map(_ROTARY.search, names)):
        obstacles.append("rotary positions")
    if "window" in type(attn).__name__.lower() or (ancestors and getattr(ancestors[-1], "window_size", None)):
        obstacles.append("window attention")
    if any(map(_RELATIVE.search, names)):
        obstacles.append("relative position bias")
    if any(not isinstance(attn._modules.get(name), nn.Identity | None) for name in ("q_norm", "k_norm")):
        obstacles.append("qk-norm")
    return obstacles


def has_relative_positions(attn: nn.Module, ancestors: Sequence[nn.Module]) -> bool:
    return "relative position bias" in _obstacles(attn, ancestors)


def _attributes(module: nn.Module) -> list[str]:
    """Return the names of its modules, parameters and buffers that are not None."""
    held = {**module._modules, **module._parameters, **module._buffers}
    return [name for name, value in held.items() if value is not None]
