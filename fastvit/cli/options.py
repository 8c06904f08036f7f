"""Options that several verbs take, and how their values are read."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from typing import Any

from fastvit._base import which_triton
from fastvit._base.units import MOST_IMAGES, MOST_PIXELS, read_bytes

MODEL = "name of `fastvit models` or of timm, config.json of transformers, or module:function"


def add_model(parser: argparse.ArgumentParser, text: str = MODEL, **options: Any) -> None:
    """Add the positional argument MODEL."""
    parser.add_argument("model", metavar="MODEL", help=text, **options)


def add_image_size(parser: argparse.ArgumentParser, *, several: bool = False, of: str = "the model's") -> None:
    """Add --image-size: one (height, width), or a list of several."""
    if several:
        parser.add_argument("--image-size", type=sizes, metavar="PX,...", help=f"224,384x512 (default: {of})")
    else:
        parser.add_argument("--image-size", type=size, metavar="PX", help=f"224 or 224x448 (default: {of})")


def add_batches(parser: argparse.ArgumentParser, default: str) -> None:
    """Add --batch, a list of integers."""
    parser.add_argument("--batch", type=several(batch), default=default, metavar="B,...", help="images")


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add --dtype and --optimizer of a planned step."""
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16", "amp"), default="bf16", help="amp: float32 under autocast to bf16"
    )
    parser.add_argument(
        "--optimizer", choices=("adamw", "sgd", "none"), default="adamw", help="whose states are counted"
    )


def add_planned_device(parser: argparse.ArgumentParser) -> None:
    """Add --device of a planned step."""
    parser.add_argument(
        "--device", type=_planned_device, choices=("cpu", "cuda"), help="what to plan for (default: this machine's)"
    )


def _planned_device(text: str) -> str:
    """Check, before torch is imported, that triton is there for a GPU."""
    if text == "cuda" and not which_triton.is_installed():
        raise argparse.ArgumentTypeError(f"cuda needs triton, which is not installed: {which_triton.how_to_install()}")
    return text


def add_budget(parser: argparse.ArgumentParser, text: str, *, required: bool = False) -> None:
    """Add --budget, in bytes."""
    parser.add_argument("--budget", type=memory, metavar="24GiB", help=text, required=required)


def add_weights(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add --weights, as `create_model` takes them."""
    text = f"file, folder, timm's tag or Hugging Face repository{more} (default: random)"
    parser.add_argument("--weights", help=text)


def add_json(parser: Any, text: str = "everything, as JSON") -> None:
    """Add --json to a parser or a group."""
    parser.add_argument("--json", action="store_true", help=text)


def add_theme(parser: Any) -> None:
    """Add --theme, of a picture, to a parser or a group."""
    parser.add_argument("--theme", choices=("light", "dark"), default="light", help="the picture's background")


def sizes(text: str) -> list[tuple[int, int]]:
    """Read "224,384x512" as [(224, 224), (384, 512)]: height x width."""
    return [size(word) for word in text.split(",")]


def size(text: str) -> tuple[int, int]:
    """Read "224" or "224x448" as (height, width)."""
    sides = [whole(part, MOST_PIXELS) for part in text.lower().split("x")]
    height, width = sides[0], sides[-1]
    if len(sides) > 2 or height is None or width is None:
        raise argparse.ArgumentTypeError(
            f"a size is 224 or 224x448 (height x width), with sides up to {MOST_PIXELS}, got {text!r}"
        )
    return height, width


def batch(text: str) -> int:
    """Read a number of images."""
    return count(text, MOST_IMAGES)


def several(read: Callable[[str], int]) -> Callable[[str], list[int]]:
    """Return a reader of "1,8,64" as [1, 8, 64]. read: reads one of these."""
    return lambda text: [read(word) for word in text.split(",")]


def count(text: str, most: int = 2**31 - 1, least: int = 1) -> int:
    """Read an integer from `least` to `most`."""
    value = whole(text, most, least)
    if value is None:
        raise argparse.ArgumentTypeError(f"must be an integer from {least} to {most}, got {text!r}")
    return value


def index(text: str) -> int:
    """Read a number that counts from 0."""
    return count(text, least=0)


def whole(text: str, most: int, least: int = 1) -> int | None:
    """Read an integer from `least` to `most`. Return None for anything else."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most))):
        return None
    return value if least <= (value := int(text)) <= most else None


def memory(text: str) -> int:
    """Read "24GiB" as bytes."""
    try:
        return read_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def words_of(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return a reader of words separated by commas, each one of `allowed`."""

    def read(text: str) -> list[str]:
        words = [word for word in text.split(",") if word]
        if unknown := [word for word in words or [text] if word not in allowed]:
            near = difflib.get_close_matches(unknown[0], allowed)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise argparse.ArgumentTypeError(f"must be of {', '.join(allowed)}, got {unknown[0]!r}{hint}")
        return words

    return read
