"""Turns a model into the form that a provider runs: attention with N x N scores, PyTorch's SDPA, or fastvit's ops."""

from __future__ import annotations

import importlib
from functools import partial
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fastvit import integrations, reference, zoo
from fastvit.layers import LayerNorm, RMSNorm
from fastvit.vit import VisionTransformer

# The reference's classes for those that the zoo names
_NORMS = {LayerNorm: nn.LayerNorm, RMSNorm: reference.RMSNorm}
_MLPS = {"swiglu": reference.SwiGLU, "swiglupacked": reference.SwiGLUPacked}


class NoFusedForm(ValueError):
    """fastvit's ops replace no block of the model."""


def as_provider(provider: str, model: nn.Module) -> nn.Module:
    """Change a plain model, in place, into what "eager", "sdpa" or "fastvit" runs.

    Raises:
        ValueError: the model has no such form; NoFusedForm where `accelerate` finds no block.
    """
    if isinstance(model, reference.VisionTransformer):
        if provider == "fastvit":
            raise ValueError("the reference has no fused form; the models of fastvit.list_models() have all three")
        return use_sdpa(model) if provider == "sdpa" else model
    if provider == "fastvit":
        entries = integrations.accelerate(model).entries
        # a ParallelScalingBlock is attention and MLP at once, and has no `part`
        if not any(entry.fused and (entry.part or entry.kind == "ParallelScalingBlock") for entry in entries):
            raise NoFusedForm(f"fastvit.accelerate knows no block of {type(model).__name__}: it has no fused form")
    elif provider == "eager":
        use_eager(model)
    return model


def use_sdpa(model: nn.Module) -> nn.Module:
    """Replace the attention of a `fastvit.reference` model by PyTorch's, in place."""
    for module in model.modules():
        if isinstance(module, reference.Attention):
            module.attend = MethodType(_sdpa, module)  # type: ignore[method-assign]
    return model


def _sdpa(self: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    p = self.attn_drop.p if self.training else 0.0
    return F.scaled_dot_product_attention(q, k, v, attn_mask, p, is_causal)


def use_eager(model: nn.Module) -> nn.Module:
    """Switch a model of timm or transformers, in place, to its library's attention with N x N scores.

    Raises:
        ValueError: the model has no such switch.
    """
    choose = getattr(model, "set_attn_implementation", None)  # transformers
    if callable(choose):
        choose("eager")
    fused = [module for module in model.modules() if isinstance(getattr(module, "fused_attn", None), bool)]  # timm
    for module in fused:
        module.fused_attn = False  # type: ignore[assignment]
    if not (callable(choose) or fused):
        raise ValueError(f"{type(model).__name__} has no switch for eager attention (fused_attn, attn_implementation)")
    return model


def plain_model(name: str, provider: str = "eager", **overrides: Any) -> nn.Module:
    """Make the plain PyTorch model for a name of the zoo, with "eager" attention or "sdpa": the reference. EVA's
    blocks and the distillation token are not in it; there it is timm's model of the same name and keys.

    Raises:
        ValueError: a model whose plain form is timm's, without timm.
    """
    if zoo.model_class(name) is not VisionTransformer:
        try:
            timm = importlib.import_module("timm")
        except Exception as error:  # for example with a torchvision that was built for another torch
            raise ValueError(
                f"the plain PyTorch form of {name} is timm's, and timm cannot be imported: {error}"
            ) from None
        return as_provider(provider, timm.create_model(name, **overrides))
    config = zoo.config(name)
    for key in ("norm_layer", "embed_norm_layer"):
        if key in config and not isinstance(config[key], str):
            config[key] = partial(_NORMS[config[key].func], **config[key].keywords)
    if "mlp_layer" in config:
        config["mlp_layer"] = _MLPS[config["mlp_layer"]]
    return as_provider(provider, reference.VisionTransformer(**{**config, **overrides}))
