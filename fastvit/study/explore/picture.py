"""Makes the picture of the page, from a file or as a computed landscape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastvit.study.pictures import check_picture_size, read_picture

if TYPE_CHECKING:
    from PIL.Image import Image

_SHOWN = 896  # pixels of the longer side, at most: twice the 448 of the page, for high-resolution screens


def picture(
    image: str | Path | None, size: tuple[int, int], mean: Sequence[float], std: Sequence[float]
) -> tuple[Tensor, Image]:
    """Return the model's input, (3, H, W) float32, and the same part of the picture to show.

    Raises:
        ValueError, OSError, ImportError: as `read_picture`.
    """
    check_picture_size(*size)
    if image is not None:
        read = read_picture(image, size, mean, std)
        shown = read.shown.copy()
        shown.thumbnail((_SHOWN, _SHOWN))
        return read.pixels, shown
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("the page needs pillow, which is not installed: pip install 'fastvit[study]'") from None
    scale = 2 * max(1, _SHOWN // max(size))  # twice as fine, for smooth edges
    drawn = landscape((scale * size[0], scale * size[1])).permute(1, 2, 0).contiguous()
    shown = Image.fromarray(drawn.numpy()).reduce(2)
    by_channel = (torch.tensor(v, dtype=torch.float32, device="cpu").view(3, 1, 1) for v in (mean, std))
    return (landscape(size).float() / 255 - next(by_channel)) / next(by_channel), shown


def landscape(size: tuple[int, int]) -> Tensor:
    """Draw a sun over hills and a tree, (3, height, width) uint8."""
    y = torch.linspace(0, 1, size[0], device="cpu").view(-1, 1)
    x = torch.linspace(0, 1, size[1], device="cpu").view(1, -1)
    sky = (y / 0.6).clamp(max=1).expand(size)
    image = torch.stack([top + (below - top) * sky for top, below in ((96, 236), (146, 214), (196, 188))])

    def paint(where: Tensor, *colour: int) -> None:
        image[:, where] = torch.tensor(colour, dtype=image.dtype, device="cpu").view(3, 1)

    paint((x - 0.69).square() + (y - 0.3).square() < 0.0125, 252, 238, 184)
    for i, colour in enumerate(((128, 152, 166), (84, 122, 116), (46, 82, 70))):
        ridge = 0.5 + 0.13 * i + 0.06 * torch.sin(5.1 * x + 2.3 * i) + 0.02 * torch.sin(14 * x + i)
        paint(y > ridge, *colour)
    paint(((x - 0.24).abs() < 0.012) & (y > 0.5) & (y < 0.84), 62, 46, 38)
    paint((x - 0.24).square() + 0.55 * (y - 0.47).square() < 0.011, 30, 60, 46)
    return image.round().to(torch.uint8)
