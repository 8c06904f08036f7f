"""`fastvit attention --by-layer`: how far the heads of each layer look, and CLS after each block."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from fastvit.cli import terminal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastvit.study import AttentionDistance, ClsEvolution

_MAPS = {"layer": -1, "head": None, "query": None, "rollout": False, "out": None}  # options of maps, and their defaults


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--by-layer", action="store_true", help="mean attention distance of heads, and CLS after each block, instead"
    )


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that do not go together, before anything takes time."""
    if not args.by_layer and len(args.images) > 1:
        raise ValueError(f"maps are of one IMAGE, got {len(args.images)}; --by-layer takes several")
    for name, default in _MAPS.items():
        if args.by_layer and getattr(args, name) != default:
            raise ValueError(f"--{name} is of maps, which --by-layer does not compute")


def run(args: argparse.Namespace, model: nn.Module, images: list[Tensor]) -> None:
    """Compute and print. images: (3, H, W) each"""
    from fastvit import study

    distance, evolution = study.attention_distance(model, images), study.cls_evolution(model, images)
    if args.json:
        print(json.dumps(_values(args, distance, evolution)))
    else:
        _show(args.model, images, distance, evolution)


def _values(args: argparse.Namespace, distance: AttentionDistance, evolution: ClsEvolution) -> dict[str, Any]:
    (h, w), (height, width) = distance.grid, distance.patch_size
    return {
        "model": args.model,
        "images": args.images,
        "weights": args.weights,
        "image_size": (h * height, w * width),
        "grid": distance.grid,
        "patch_size": distance.patch_size,
        "distance": distance.distance.tolist(),
        "uniform": distance.uniform,
        "state": "patches" if evolution.pooled else "cls",
        "cosine": evolution.cosine.tolist(),
    }


def _show(name: str, images: list[Tensor], distance: AttentionDistance, evolution: ClsEvolution) -> None:
    cosines = [f"{cosine:.3f}" for cosine in evolution.mean.tolist()]
    if len(cosines) != len(distance.layers):
        raise ValueError(
            f"the table needs as many blocks as layers of attention, got {len(cosines)} and {len(distance.layers)}; "
            "--json does not"
        )
    rows = []
    for layer, each, cosine in zip(distance.layers, distance.distance, cosines, strict=True):
        pixels = [f"{value:.1f}" for value in (each.mean(), each.min(), each.max())]
        rows.append([str(layer), *pixels, f"{100 * each.mean() / distance.uniform:.0f}%", cosine])
    heads = ["layer", "mean px", "least", "most", "of uniform", "cosine"]
    height, width = images[0].shape[1:]
    count = "one image" if len(images) == 1 else f"{len(images)} images"
    what = f"{name}, {count} of {height} x {width} px, {distance.grid[0]} x {distance.grid[1]} patches"
    terminal.print_table(heads, rows, title=what, words=())
    notes = [
        f"mean, least, most: attention distance of the {len(distance.heads)} heads",
        f"uniform: equal weights, {distance.uniform:.1f} px",
        f"cosine: {evolution.state} after the block, to after the last, before the last norm",
    ]
    terminal.console().print("\n" + "\n".join(notes))
