"""Models whose attention is studied, ours and of libraries, and their weights as eager attention computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from library_imports import import_library, import_timm
from models import randomised
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import fastvit
from benchmarks.harness.libraries import randomize
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


class Architecture(NamedTuple):
    """A model of another library, of two blocks for square images of `side` pixels. options: arguments that make it."""

    library: str
    name: str
    side: int
    options: dict[str, Any]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        library = import_library(self.library)
        if self.library == "timm":
            model = library.create_model(self.name, **self.options)
        elif self.library == "torchvision":
            model = library.models.VisionTransformer(**self.options)
        else:
            kind = getattr(library, self.name)
            model = kind(kind.config_class(**self.options))
        randomize(model)
        return model.eval()

    def image(self) -> Tensor:
        return image(self.side, self.side)


_SMALL = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
_SMALL |= {"intermediate_size": 160}
_OF_TORCHVISION = {"image_size": 128, "patch_size": 32, "num_layers": 2, "num_heads": 2, "hidden_dim": 128}
# Two prefix tokens, rotary positions and registers, a head that pools, nn.MultiheadAttention
LIBRARIES = [
    Architecture("timm", "deit_small_distilled_patch16_224", 64, {"img_size": 64, "depth": 2}),
    Architecture("transformers", "DINOv3ViTModel", 32, _SMALL | {"num_register_tokens": 4}),
    Architecture("transformers", "SiglipVisionModel", 32, _SMALL),
    Architecture("torchvision", "vit_b_32", 128, _OF_TORCHVISION | {"mlp_dim": 256}),
]


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
