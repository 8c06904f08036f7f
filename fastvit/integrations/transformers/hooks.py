"""Shared by the readers of transformers' layers: what their attention computes, its hooks, activation checkpointing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastvit.blocks.submodules import CannotFuse, Classes, has_own_forward, qualified_name, submodules

# Implementations of the same attention. Custom registered ones are left alone.
SAME_ATTENTION = (None, "eager", "sdpa", "flex_attention", "fastvit")
# Those that return weights or their sums next to the output, for callers and hooks of the attention
_WITH_WEIGHTS = ("eager", "flex_attention")
# Arguments about a model's results or its loss
_HARMLESS = ("output_hidden_states", "return_dict", "use_cache", "num_items_in_batch")


def captures_attentions() -> bool:
    """Return whether transformers' hooks collect attention weights in this call. Once a model has been asked for hidden
    states or attentions the hooks stay, and do nothing in other calls."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    collector = capturing and capturing._active_collector.get()
    return bool(collector) and "attentions" in collector


def _own_hooks_only(attn: nn.Module) -> bool:
    """Return whether an attention module has hooks of transformers and no others."""
    hooks = list(attn._forward_hooks.values())  # a list, because torch.compile of 2.11 has no truth value for the dict
    others = attn._forward_pre_hooks or attn._backward_hooks or attn._backward_pre_hooks or "forward" in attn.__dict__
    return bool(hooks) and not others and all(h.__module__ == "transformers.utils.output_capturing" for h in hooks)


def attention_of(layer: Any, name: str, kinds: Classes) -> Any:
    """Return the attention of that name, of one of these classes, in a layer; hooks of transformers itself are allowed
    on it."""
    attn = layer._modules[name]
    kind = qualified_name(attn)
    if kind not in kinds or not _own_hooks_only(attn):
        (attn,) = submodules(layer, {name: kinds})
    elif captures_attentions():
        raise CannotFuse("attention weights are collected")
    elif not has_own_forward(type(attn), type(attn).forward):
        raise CannotFuse(f"{name} is {kind}, whose forward was replaced")
    return attn


def check_others(arguments: dict[str, Any]) -> None:
    """Check the arguments of a call that no op has: they are None or False, or change nothing inside a layer."""
    for name, value in arguments.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise CannotFuse(f"the argument {name}")


def check_version() -> None:
    """Check that transformers is version 5 or later: layers and attention had other arguments and results before."""
    version = getattr(sys.modules.get("transformers"), "__version__", "5")
    if version.startswith(("3.", "4.")):
        raise CannotFuse(f"transformers {version}: its layers are known from version 5 on")


def check_attention(attn: Any) -> None:
    """Check that a module computes softmax attention that is not causal."""
    config = type(attn.config).__name__
    if config.endswith("TextConfig") and "Siglip" not in config:  # whose text tower is not causal
        raise CannotFuse("the text tower's attention is causal")
    if getattr(attn, "is_causal", True):  # transformers' default is True as well
        raise CannotFuse("its attention is causal")
    check_implementation(attn)


def check_implementation(attn: Any) -> None:
    implementation = attn.config._attn_implementation
    if implementation not in SAME_ATTENTION and not implementation.startswith("flash_attention"):
        raise CannotFuse(f"its attention implementation is {implementation!r}")


def check_no_weights(attn: Any) -> None:
    """Check that attention returns no weights next to its output."""
    implementation = attn.config._attn_implementation or "eager"
    if implementation in _WITH_WEIGHTS:
        raise CannotFuse(f"{implementation} attention returns its weights as well")


def checkpoint_of(layer: Any) -> Callable[..., Tensor] | None:
    """Return the function that a layer's forward runs with activation checkpointing, or None if that is off. Earlier
    versions checkpoint in __call__, around the fused forward."""
    in_forward = type(layer).__call__ is nn.Module.__call__
    checkpointed = in_forward and getattr(layer, "gradient_checkpointing", False) and layer.training
    return layer._gradient_checkpointing_func if checkpointed else None
