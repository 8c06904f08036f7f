"""Collects the data of a page to explore a model: patches, memory, attention, layers, positions, other models."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastvit._base.version import __version__
from fastvit.modules.arguments import Pair, checked_pair
from fastvit.study.explore import attention, document, memory
from fastvit.study.explore.document import Progress
from fastvit.study.models.costs import ModelCost, models
from fastvit.study.pictures import check_picture_size, read_picture
from fastvit.study.sources.find import find
from fastvit.study.sources.model_source import ModelSource

if TYPE_CHECKING:
    from PIL.Image import Image

_SHOWN = 896  # pixels of the longer side, at most: twice the 448 of the page, for high-resolution screens
ROOM = 3_400_000  # characters of attention and positions together; a page has at most 4 MB
_POSITIONS = 1400  # positions at most: the N x N similarities of more would leave no room for attention


@dataclass(frozen=True)
class PatchEmbedding:
    """The cost of cutting one image into patches and projecting them.

    Attributes:
        patches: h * w.
        tokens: patches and prefix tokens.
        parameters: of the projection, without positions and prefix tokens.
        flops: two for each multiply-add of the projection.
    """

    patches: int
    tokens: int
    parameters: int
    flops: int


def patch_embedding(
    image_size: Pair, patch_size: Pair, width: int, *, prefix_tokens: int = 1, channels: int = 3, bias: bool = True
) -> PatchEmbedding:
    """Count equation 1 of Dosovitskiy et al. 2021 (arXiv:2010.11929): (C P^2) x D weights, and D biases.

    Args:
        image_size, patch_size: int or (height, width) in pixels.
        width: D.
        prefix_tokens: how many come before the patches.
        channels: C of the image.
        bias: True if the projection has one.

    Raises:
        ValueError: a patch size that does not divide the image size.
    """
    (H, W), (p, q) = checked_pair("image_size", image_size), checked_pair("patch_size", patch_size)
    if H % p or W % q:
        raise ValueError(f"patch_size must divide image_size {(H, W)}, got {(p, q)}")
    patches, numbers = (H // p) * (W // q), channels * p * q
    parameters = (numbers + bias) * width
    return PatchEmbedding(patches, patches + prefix_tokens, parameters, 2 * patches * numbers * width)


@dataclass(frozen=True)
class Exploration:
    """The data of the page.

    Attributes:
        model: its name.
        data: what the page's scripts read, in JSON's types.
    """

    model: str
    data: dict[str, Any] = field(repr=False)

    def html(self) -> str:
        """Return the page: one file that needs no other."""
        return document.rendered(f"{self.model} · fastvit explore", self.data)


@contextlib.contextmanager
def _silent(total: int, what: str) -> Iterator[Callable[[str], None]]:
    yield lambda now: None


def explore(
    model: str = "vit_base_patch16_224", image: str | Path | None = None, *, weights: str | Path | None = None,
    image_size: Pair | None = None, layers: Sequence[int] | None = None, progress: Progress = _silent,
) -> Exploration:  # fmt: skip
    """Plan, count, and compute on the CPU in float32, what the page shows of a model.

    Args:
        model: any name that a study takes.
        image: a picture's file; None for a computed one.
        weights: as `create_model` takes them, for a model of the zoo; None for random weights, the same in every run.
        image_size: int or (height, width); None for the model's default.
        layers: numbers from 0 of the layers whose heads come first, if not all heads fit into the page.
        progress: (count, of what) -> context that yields a function to call with what begins next.

    Raises:
        ValueError: an unknown model, sizes that do not fit, no picture, weights that do not fit, layers out of range.
        FileNotFoundError: no such file.
        ImportError: a library that is not installed.
    """
    source = find(model)
    size, patch = source.sizes(image_size)
    pixels, shown = _picture(image, size, *source.normalization)
    with progress(1, f"building {source.name}"):
        built = _built(source, size, weights)
        facts = _facts(built, models(model, image_size=size)[0])
        positions = _positions(built, facts["grid"])
    data: dict[str, Any] = {
        "model": facts,
        "version": __version__,
        "provenance": _provenance(source, image, weights, positions["fixed"]),
        "picture": {
            "uri": document.as_uri(shown),
            "height": size[0],
            "width": size[1],
            "patch_stops": patch_stops(size, patch),
        },
        "attention": attention.collect(built, pixels, layers, progress, ROOM - len(positions["cosine"] or "")),
        "layers": attention.collect_by_layer(built, pixels, progress),
        "positions": positions,
        "memory": memory.collect(source, size, patch, facts["prefix"], progress),
        "models": _model_rows(progress),
    }
    if weights is None and source.origin != "function":
        for part, values in (("attention", "maps"), ("layers", "cosine"), ("positions", "cosine")):
            if data[part][values] is not None and not data[part].get("fixed"):
                data[part]["note"] = f"Of random weights. {data[part]['note']}"
    return Exploration(model, data)


def _picture(
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
    drawn = _landscape((scale * size[0], scale * size[1])).permute(1, 2, 0).contiguous()
    shown = Image.fromarray(drawn.numpy()).reduce(2)
    means, stds = (torch.tensor(v, dtype=torch.float32, device="cpu").view(3, 1, 1) for v in (mean, std))
    return (_landscape(size).float() / 255 - means) / stds, shown


def _landscape(size: tuple[int, int]) -> Tensor:
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


def patch_stops(size: tuple[int, int], patch: tuple[int, int]) -> list[int]:
    """Return the patch sizes of the page's slider: the model's, and all from 4 to 64 pixels that divide the image."""
    common = math.gcd(*size)
    return sorted({p for p in range(4, 65) if common % p == 0 and p < common} | {patch[0]})


def _built(source: ModelSource, size: tuple[int, int], weights: str | Path | None) -> nn.Module:
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return source.with_weights(weights, size).float().eval()


def _facts(model: nn.Module, cost: ModelCost) -> dict[str, Any]:
    projection = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    return {
        **_row(cost), "grid": cost.grid, "prefix": cost.prefix_tokens, "width": projection.out_channels,
        "channels": projection.in_channels, "bias": projection.bias is not None, "quoted": shlex.quote(cost.name),
    }  # fmt: skip


def _provenance(source: ModelSource, image: str | Path | None, weights: str | Path | None, fixed: bool) -> str:
    if weights is not None:
        text = f"Weights: {Path(weights).name}."
    elif source.origin == "function":
        text = f"Weights: as {source.name} returns them."
    else:
        shown = "Attention is that" if fixed else "Attention and positions are those"
        text = f"Weights: random, since no file was given. {shown} of an untrained model."
    return f"{text} Picture: {Path(image).name if image else 'a computed landscape, since no file was given'}."


def _positions(model: nn.Module, grid: tuple[int, int]) -> dict[str, Any]:
    found, fixed = position_embeddings(model, grid[0] * grid[1])
    if found is None:
        rotary = any(re.search("rotary|rope", type(m).__name__, re.IGNORECASE) for m in model.modules())
        instead = "It rotates queries and keys by the place of their patch instead." if rotary else ""
        return {"cosine": None, "fixed": False, "note": f"This model has no embeddings of positions. {instead}".strip()}
    if not 1 < len(found) <= _POSITIONS:
        note = f"No similarities of {len(found)} positions: this page has room for those of 2 to {_POSITIONS}."
        return {"cosine": None, "fixed": fixed, "note": note}
    unit = F.normalize(found.float(), dim=-1)
    cosine = (unit @ unit.T * 127).round().clamp(-127, 127).to(torch.int8)
    rows, columns = torch.tril_indices(len(found), len(found))  # row i has its columns up to i
    values = document.encoded(cosine[rows, columns])
    return {"grid": grid, "cosine": values, "fixed": fixed, "note": "Cosines are rounded to 127ths."}


def position_embeddings(model: nn.Module, patches: int) -> tuple[Tensor | None, bool]:
    """Find the position embeddings that a model adds to its patches, (patches, D), by the libraries' names, or None.
    Return also whether they are fixed: a buffer of the model, or a parameter that does not learn while others do."""
    trains = any(p.requires_grad for p in model.parameters())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if ("pos_embed" in name or "position_embedding" in name) and "rope" not in name:
            rows = tensor.detach().flatten(0, -2)
            if 0 <= len(rows) - patches < 32:  # prefix tokens come first
                fixed = not isinstance(tensor, nn.Parameter) or (trains and not tensor.requires_grad)
                return rows[-patches:], fixed
    return None, False


_NAMES = (
    "vit_tiny_patch16_224", "vit_small_patch16_224", "vit_small_patch32_224", "vit_base_patch8_224",
    "vit_base_patch16_224", "vit_base_patch16_384", "vit_base_patch32_224", "vit_large_patch16_224",
    "vit_large_patch16_384", "vit_huge_patch14_224", "vit_giant_patch14_224", "deit3_small_patch16_224",
    "deit3_base_patch16_384", "vit_small_patch14_dinov2", "vit_base_patch14_dinov2", "vit_large_patch14_dinov2",
    "vit_giant_patch14_reg4_dinov2", "vit_small_patch16_dinov3", "vit_base_patch16_dinov3", "vit_large_patch16_dinov3",
    "vit_7b_patch16_dinov3", "vit_base_patch32_clip_224", "vit_large_patch14_clip_336",
    "vit_base_patch16_siglip_gap_512", "vit_so400m_patch14_siglip_gap_378", "eva02_base_patch14_448",
    "vit_pe_spatial_large_patch14_448", "vit_cifar_small",
)  # fmt: skip


def _model_rows(progress: Progress) -> list[dict[str, Any]]:
    with progress(len(_NAMES), "models") as step:
        return [_row(cost) for cost in models(_NAMES, step=step)]


def _row(cost: ModelCost) -> dict[str, Any]:
    return {
        "name": cost.name, "image_size": cost.image_size, "patch_size": cost.patch_size, "tokens": cost.tokens,
        "parameters": cost.parameters.total, "flops": cost.flops,
    }  # fmt: skip
