"""What is to be known of every attention module of transformers: whose hooks are on it, and what it computes."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from fastvit.blocks.submodules import CannotFuse, has_own_forward, qualified_name, submodules

# Implementations of the same attention; another one, registered by somebody, is somebody's choice
SAME_ATTENTION = (None, "eager", "sdpa", "flex_attention", "fastvit")


def _captures_attentions() -> bool:
    """Whether transformers collects attention weights in this call, which its hooks on attention modules are for. They
    stay there once a model has been asked for hidden states or attentions, and do nothing otherwise."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    collector = capturing and capturing._active_collector.get()
    return bool(collector) and "attentions" in collector


def _own_hooks_only(attn: nn.Module) -> bool:
    """Whether transformers' hooks are all that is put on an attention module."""
    hooks = list(attn._forward_hooks.values())  # what torch.compile of 2.11 has a truth value for
    others = attn._forward_pre_hooks or attn._backward_hooks or attn._backward_pre_hooks or "forward" in attn.__dict__
    return bool(hooks) and not others and all(h.__module__ == "transformers.utils.output_capturing" for h in hooks)


def attention_of(layer: Any, name: str, kind: str) -> Any:
    """The attention of that name and class in a layer, on which transformers may have put hooks of its own."""
    attn = layer._modules[name]
    if qualified_name(attn) != kind or not _own_hooks_only(attn):
        (attn,) = submodules(layer, **{name: {kind}})
    elif _captures_attentions():
        raise CannotFuse("attention weights are collected")
    elif not has_own_forward(type(attn), type(attn).forward):
        raise CannotFuse(f"{name} is {kind}, whose forward was replaced")
    return attn


def check_version() -> None:
    """Of layers and of attention, which took and returned other things before version 5."""
    version = getattr(sys.modules.get("transformers"), "__version__", "5")
    if version.startswith(("3.", "4.")):
        raise CannotFuse(f"transformers {version}: its layers are known from version 5 on")


def check_attention(attn: Any) -> None:
    """That it computes softmax attention, and no causal one."""
    if type(attn.config).__name__ in ("CLIPTextConfig", "Aimv2TextConfig"):
        raise CannotFuse("the text tower's attention is causal")
    if getattr(attn, "is_causal", True):  # as transformers' own functions read it
        raise CannotFuse("its attention is causal")
    implementation = attn.config._attn_implementation
    if implementation not in SAME_ATTENTION and not implementation.startswith("flash_attention"):
        raise CannotFuse(f"its attention implementation is {implementation!r}")
