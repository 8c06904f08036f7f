"""A picture from a file, as a model takes it. Wants Pillow, of the extra `study`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fastvit.modules.arguments import Pair, checked_pair

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Picture:
    """What of a picture a model sees.

    Attributes:
        shown: that part of it, RGB, in the file's own resolution.
        pixels: the same as a model takes it: (3, H, W), float32, on the CPU.
    """

    shown: Image
    pixels: Tensor


def read_picture(path: str | Path, size: Pair, mean: Sequence[float], std: Sequence[float]) -> Picture:
    """A picture upright (by its EXIF orientation), in RGB (transparency over white, 16 bits as 8), its centre cropped
    to the shape of size and resized bicubically, as (pixels / 255 - mean) / std.

    Args:
        path: of a file in any format that Pillow reads; of an animation the first picture.
        size: int or (height, width).
        mean, std: three values each.

    Raises:
        ValueError: no picture, or a damaged one; mean or std that are not three, or a std of 0.
        OSError: no such file, or it cannot be read.
        ImportError: without Pillow.
    """
    height, width = checked_pair("size", size)
    if len(mean) != 3 or len(std) != 3 or not all(value > 0 for value in std):
        raise ValueError(f"mean and std must have three values, std positive ones, got {tuple(mean)} and {tuple(std)}")
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ImportError("pictures want pillow, which is not installed: pip install 'fastvit[study]'") from None
    rgb = _rgb(path)
    scale = min(rgb.width / width, rgb.height / height)
    shown = ImageOps.fit(rgb, (max(1, round(scale * width)), max(1, round(scale * height))))
    pixels = np.asarray(shown.resize((width, height), Image.Resampling.BICUBIC), np.float32) / 255
    pixels = (pixels - np.array(mean, np.float32)) / np.array(std, np.float32)
    return Picture(shown, torch.from_numpy(pixels).permute(2, 0, 1).contiguous())


def _rgb(path: str | Path) -> Image:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            picture = ImageOps.exif_transpose(file)
            if picture.mode.startswith("I;16"):
                return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)).convert("RGB")
            if picture.mode in ("I", "F"):
                raise ValueError(f"pixels of mode {picture.mode}, whose range nobody knows")
            if picture.has_transparency_data:
                picture = picture.convert("RGBA")
                picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
            return picture.convert("RGB")
    except OSError as error:
        if error.errno is not None:  # the file system's, which names the file
            raise
        raise ValueError(f"{path} is no picture that Pillow reads: {error}") from None
    except Exception as error:  # whatever a damaged file does to a decoder
        raise ValueError(f"{path} is no picture that Pillow reads: {error}") from None
