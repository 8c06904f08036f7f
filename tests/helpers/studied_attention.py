"""Models whose attention is studied, ours and of libraries, and their weights as eager attention computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import library_models
import torch
import torch.nn.functional as F
from library_imports import import_timm
from models import randomised
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import fastvit
from fastvit import reference
from fastvit.eva import Eva
from fastvit.study.sources.baselines import use_eager

SIZE: dict[str, Any] = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
GRID = (4, 6)
ROPE: dict[str, Any] = {"use_rot_pos_emb": True, "use_abs_pos_emb": False}


def eva_of_timm(**arguments: Any) -> nn.Module:
    model: nn.Module = import_timm().models.eva.Eva(**arguments)
    return use_eager(model)


PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "vit": (fastvit.VisionTransformer, reference.VisionTransformer, {"reg_tokens": 2}),
    "eva": (Eva, eva_of_timm, ROPE | {"num_reg_tokens": 1}),
    "dinov3": (Eva, eva_of_timm, ROPE | {"rope_type": "dinov3", "rope_rotate_half": True, "qkv_bias": False}),
}
VISIBLE: Any = {"rtol": 0.0, "atol": 1e-5}


# By name, for images of 32 px: two prefix tokens, rotary positions and registers, a head that pools,
# nn.MultiheadAttention
LIBRARIES: dict[str, Callable[[], nn.Module]] = {
    "timm": lambda: library_models.vit("deit_small_distilled_patch16_224"),
    "DINOv3": lambda: library_models.hugging_face("DINOv3ViTModel", num_register_tokens=4),
    "SigLIP": lambda: library_models.hugging_face("SiglipVisionModel"),
    "torchvision": library_models.torchvision_vit,
}


def pair(kind: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return our model and the plain one with the same weights, whose attention is far from uniform."""
    *classes, more = PAIRS[kind]
    torch.manual_seed(0)
    ours, theirs = (make(**SIZE | more | options).eval() for make in classes)
    theirs.load_state_dict(randomised(ours, 0.3).state_dict())
    return ours, theirs


def vit(**options: Any) -> nn.Module:
    return pair("vit", **options)[0]


def image(height: int = 32, width: int = 48) -> Tensor:
    return torch.randn(3, height, width, generator=torch.Generator().manual_seed(3))


class Softmaxes(TorchDispatchMode):
    """The square results of softmax, of self-attention and not of pooling heads, for the first image."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "softmax" in func.__name__ and result.shape[-1] == result.shape[-2]:
            self.weights.append(result[0])
        return result


def materialised(model: nn.Module, x: Tensor) -> Tensor:
    """Return all attention weights of a model, (layers, H, N, N). x: (3, H, W)"""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), Softmaxes() as seen:
        model(x[None])
    return torch.stack(seen.weights)


class Odd(nn.Module):
    """Patches, then the given attention."""

    def __init__(self, attend: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.patches, self.attend = nn.Conv2d(3, 32, 8, 8), attend

    def heads(self, x: Tensor) -> Tensor:
        return self.patches(x).flatten(2).unflatten(1, (2, 16)).transpose(2, 3).contiguous()

    def forward(self, x: Tensor) -> Any:
        return self.attend(self.heads(x))


def sdpa(q: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, **options)
