"""Read pictures from files, as a model takes them. Needs Pillow, of the extra `study`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fastvit.modules.arguments import Pair, checked_pair

if TYPE_CHECKING:
    from PIL.Image import Image


_MOST = 8192  # pixels of a side: a picture is held in float32


@dataclass(frozen=True)
class Picture:
    """The part of a picture that a model sees.

    Attributes:
        shown: in RGB and the file's own resolution.
        pixels: as a model takes it: (3, H, W), float32, normalised, on the CPU.
    """

    shown: Image
    pixels: Tensor = field(repr=False)


def read_picture(path: str | Path, size: Pair, mean: Sequence[float], std: Sequence[float]) -> Picture:
    """Read a picture, crop its centre to the aspect ratio of `size`, resize it bicubically, and normalise it to
    (pixels / 255 - mean) / std. It is turned upright by its EXIF orientation; transparency becomes white.

    Args:
        path: a file in any format that Pillow reads. Of an animation, the first picture is read.
        size: int or (height, width).
        mean, std: three values each.

    Raises:
        ValueError: not a picture, or a damaged one; a size, mean or std that is out of range.
        OSError: the file is missing or cannot be read.
        ImportError: Pillow is not installed.
    """
    height, width = checked_pair("size", size)
    check_picture_size(height, width)
    if len(mean) != 3 or not all(abs(value) < 1e3 for value in mean):
        raise ValueError(f"mean must have three values above -1000 and below 1000, got {tuple(mean)}")
    if len(std) != 3 or not all(1e-3 < value < 1e3 for value in std):
        raise ValueError(f"std must have three values above 0.001 and below 1000, got {tuple(std)}")
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ImportError("pictures need pillow, which is not installed: pip install 'fastvit[study]'") from None
    rgb = read_rgb(path)
    scale = min(rgb.width / width, rgb.height / height)
    shown = ImageOps.fit(rgb, (max(1, round(scale * width)), max(1, round(scale * height))))
    pixels = np.asarray(shown.resize((width, height), Image.Resampling.BICUBIC), np.float32) / 255
    pixels = (pixels - np.array(mean, np.float32)) / np.array(std, np.float32)
    return Picture(shown, torch.from_numpy(pixels).permute(2, 0, 1).contiguous())


def check_picture_size(height: int, width: int) -> None:
    """Raise ValueError for a picture that is too large to be made."""
    if max(height, width) > _MOST:
        raise ValueError(f"a picture must have sides of at most {_MOST} pixels, got {height} x {width}")


def read_rgb(path: str | Path) -> Image:
    """Read a picture in RGB. It is turned upright by its EXIF orientation; transparency becomes white; of 16 bits the
    upper 8 are taken. Of an animation, the first picture is read.

    Raises:
        ValueError, OSError: as `read_picture`.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            if file.mode in ("I", "F"):
                raise ValueError(f"pixels of mode {file.mode}, whose range is unknown")
            file.load()
            try:
                picture = ImageOps.exif_transpose(file)
            except SyntaxError:  # Pillow's, if the EXIF data are damaged
                picture = file
            if picture.mode.startswith("I;16"):
                return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)).convert("RGB")
            if picture.has_transparency_data:
                picture = picture.convert("RGBA")
                picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
            return picture.convert("RGB")
    except Exception as error:  # a damaged file can raise anything in a decoder
        if isinstance(error, OSError) and error.errno is not None:  # the file system's error, which names the file
            raise
        raise ValueError(f"{path} is no picture that Pillow reads: {error}") from None
