"""Models that tests give to studies as module:function."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from library_imports import import_library
from library_models import hugging_face
from torch import Tensor, nn

from fastvit import ops, reference, zoo

SMALL = "vit_of_two_blocks"
CONFIG = {  # of SMALL, which is in the zoo while a test runs
    "img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5,
}  # fmt: skip
TIMM = "study_models:timm_vit"


@contextmanager
def known() -> Iterator[None]:
    """Within the context SMALL is in the zoo. On a CPU, ops run on ATen, not in the interpreter."""
    with pytest.MonkeyPatch.context() as patch, ops.use_backend("auto" if torch.cuda.is_available() else "aten"):
        patch.setitem(zoo.CONFIGS, SMALL, CONFIG)
        yield


def timm_vit(image_size: int = 32, **options: Any) -> nn.Module:
    """Make a ViT of timm: 8 x 8 patches, CLS, two blocks."""
    options = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5} | options
    model: nn.Module = import_library("timm").models.VisionTransformer(img_size=image_size, **options)
    return model


def one_size() -> nn.Module:
    return timm_vit()


def no_list(image_size: int = 32) -> nn.Module:
    model = timm_vit(image_size, depth=1)
    model.blocks = model.blocks[0]
    return model


def nothing() -> None:
    return None


def reference_vit(image_size: int = 32) -> nn.Module:
    return reference.VisionTransformer(image_size, 8, embed_dim=48, depth=1, num_heads=3, num_classes=5)


def with_registers(image_size: int = 32) -> nn.Module:
    """Make a model of transformers with positions for CLS and patches, but not for registers."""
    return hugging_face("Dinov2WithRegistersModel", image_size=image_size, num_register_tokens=2)


def relative_positions(image_size: int = 32) -> nn.Module:
    options: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5, "use_rel_pos_bias": True}
    model: nn.Module = import_library("timm").models.beit.Beit(image_size, 8, **options)
    return model


def learnt_bias(image_size: int = 32) -> nn.Module:
    """Make a ViT of timm whose blocks add a learnt bias to the scores of each head."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit: Any = timm_vit(image_size)
            n = 1 + (image_size // 8) ** 2
            self.bias = nn.Parameter(torch.zeros(1, 3, n, n))

        def forward(self, images: Tensor) -> Any:
            x = self.vit._pos_embed(self.vit.patch_embed(images))
            for block in self.vit.blocks:
                x = block(x, attn_mask=self.bias)
            return self.vit.forward_head(self.vit.norm(x))

    return Biased()


def no_library(image_size: int = 32) -> nn.Module:
    """Make a patch embedding and an encoder of PyTorch's."""
    layer = nn.TransformerEncoderLayer(48, 3, 96, batch_first=True)
    patches = nn.Conv2d(3, 48, 8, 8)
    return nn.Sequential(patches, nn.Flatten(2), nn.Linear((image_size // 8) ** 2, 48), nn.TransformerEncoder(layer, 1))


def with_dropout(image_size: int = 64) -> nn.Module:
    return timm_vit(image_size, attn_drop_rate=0.1)


def reads_values(image_size: int = 32) -> nn.Module:
    """Read numbers out of tensors, as many constructors do for stochastic depth."""
    rates = [x.item() for x in torch.linspace(0, 0, 2)]
    return timm_vit(image_size, depth=len(rates), drop_path_rate=rates[-1])


def image_and_text(image_size: int = 32) -> nn.Module:
    def forward(images: Tensor, text: Tensor) -> Tensor:
        return images + text

    model: Any = timm_vit(image_size)
    model.forward = forward
    return model


def with_neck(image_size: int = 32) -> nn.Module:
    """Make a ViT with convolutions after its blocks, the second of which reads channels_last, as SAM's do."""

    class Neck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = timm_vit(image_size, class_token=False, global_pool="avg")
            self.first = nn.Conv2d(48, 128, 3, padding=1, bias=False)
            self.second = nn.Conv2d(128, 128, 3, padding=1)

        def forward(self, images: Tensor) -> Any:
            x = self.image.forward_features(images).mT.unflatten(2, (image_size // 8, -1)).contiguous()
            return self.second(self.first(x).contiguous(memory_format=torch.channels_last))

    return Neck()


def mistakes() -> nn.Module:
    raise RuntimeError("what went wrong\nand more")


def convolution(image_size: int = 32) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(1), nn.Linear(8 * (image_size // 8) ** 2, 5))
