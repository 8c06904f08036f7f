"""Draws attention maps over a picture. Needs Pillow and matplotlib, of the extra `study`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from fastvit.study.attention.weights import Query

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

_WIDTH, _LARGEST, _BAR, _GAP = 850, 420, 22, 6  # pixels: sheet, tile, height of captions, gap
_INK, _PAPER = "#f2f2f2", "#202020"  # captions have a background of their own, for pages of any colour


def draw_maps(shown: Image, caption: str, maps: Sequence[tuple[str, Tensor]], query: Query) -> Image:
    """Draw the picture, then every map over it, from 0 (black) to the map's own largest weight (yellow).

    Args:
        shown: the picture, as the model sees it.
        caption: below the picture.
        maps: a caption and weights (h, w) each.
        query: the patch to mark, or "cls" for none.
    """
    from PIL import Image, ImageDraw

    count = 1 + len(maps)
    columns = count if count <= 4 else max(4, math.ceil(math.sqrt(count)))
    width = min(_LARGEST, (_WIDTH + _GAP) // columns - _GAP)
    size = width, max(1, round(width * shown.height / shown.width))
    small = shown.resize(size, Image.Resampling.LANCZOS)
    tiles = [(caption, small), *((text, _over(small, weights)) for text, weights in maps)]
    step = size[0] + _GAP, size[1] + _BAR + _GAP
    sheet = Image.new("RGBA", (columns * step[0] - _GAP, math.ceil(count / columns) * step[1] - _GAP))
    draw = ImageDraw.Draw(sheet)
    for i, (text, tile) in enumerate(tiles):
        x, y = i % columns * step[0], i // columns * step[1]
        sheet.paste(tile.point(lambda value: value & 0xFC), (x, y))  # 64 levels a channel look the same in half a file
        if not isinstance(query, str):
            _mark(draw, (x, y), size, query, (maps[0][1].shape[0], maps[0][1].shape[1]))
        draw.rectangle((x, y + size[1], x + size[0] - 1, y + size[1] + _BAR - 1), fill=_PAPER)
        draw.text((x + size[0] / 2, y + size[1] + _BAR / 2), text, fill=_INK, anchor="mm")
    return sheet


def _over(picture: Image, weights: Tensor) -> Image:
    """Colour the picture by the map, and leave it dark grey where the weight is 0."""
    import matplotlib
    from PIL import Image

    share = (weights.float() / weights.max().clamp(min=1e-30)).cpu().numpy()
    share = np.asarray(Image.fromarray(share).resize(picture.size, Image.Resampling.BICUBIC)).clip(0.0, 1.0)
    colours = matplotlib.colormaps["inferno"](share)[..., :3]
    share = share[..., None]
    grey = np.asarray(picture.convert("L"), dtype=np.float64)[..., None] / 255
    mixed = colours * (0.35 + 0.65 * grey) + 0.3 * grey * (1.0 - share)
    return Image.fromarray((255 * mixed.clip(0.0, 1.0)).astype(np.uint8))


def _mark(
    draw: ImageDraw, corner: tuple[int, int], size: tuple[int, int], patch: tuple[int, int], grid: tuple[int, int]
) -> None:
    row, column = patch
    left, right = (corner[0] + round(size[0] * i / grid[1]) for i in (column, column + 1))
    top, bottom = (corner[1] + round(size[1] * i / grid[0]) for i in (row, row + 1))
    for away, colour in ((1, "white"), (2, "black")):  # around the patch, so that it stays visible
        draw.rectangle((left - away, top - away, right - 1 + away, bottom - 1 + away), outline=colour)
