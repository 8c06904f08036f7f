"""Puts styles, scripts and data into one HTML file that needs no network."""

from __future__ import annotations

import base64
import html
import io
import json
import re
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

Progress = Callable[[int, str], AbstractContextManager[Callable[[str], None]]]  # of `explore`

SCRIPTS = ("base", "header", "patches", "memory", "attention", "layers", "positions", "models")


def rendered(title: str, data: dict[str, Any]) -> str:
    """Return the page.

    Args:
        title: any text.
        data: values that JSON has, without NaN and infinities.
    """
    folder = resources.files("fastvit.study.explore") / "page"
    # a "<" in a script element could end it
    content = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    content = content.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")
    parts = {
        "TITLE": html.escape(title),
        "STYLE": (folder / "page.css").read_text("utf-8"),
        "SCRIPT": "\n".join((folder / f"{name}.js").read_text("utf-8") for name in SCRIPTS),
        "DATA": content,
    }
    template = (folder / "page.html").read_text("utf-8")
    return re.sub("@@([A-Z]+)@@", lambda match: parts[match[1]], template)


def encoded(values: Tensor) -> str:
    """Return the values in C order, little-endian, deflated, as base64."""
    array = values.contiguous().cpu().numpy()
    return base64.b64encode(zlib.compress(array.astype(array.dtype.newbyteorder("<")).tobytes(), 9)).decode()


def quantized(rows: Tensor) -> dict[str, str]:
    """Round rows (queries, N) of weights to {"values": uint8, "most": float32 a row}: weight = value / 255 * most."""
    most = rows.amax(-1, keepdim=True)
    values = (rows / most.clamp_min(torch.finfo(torch.float32).tiny) * 255).round().to(torch.uint8)
    return {"values": encoded(values), "most": encoded(most.squeeze(-1).float())}


def most_characters(nbytes: int) -> int:
    """Return how many characters `encoded` takes at most: zlib adds up to 5 bytes to each block of 16 KiB."""
    return (nbytes + nbytes // 1000 + 32) * 4 // 3


def as_uri(picture: Image) -> str:
    """Return a picture as a data URI, in JPEG."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=88)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
