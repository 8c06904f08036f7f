"""`fastvit attention --by-layer`: how far the heads of each layer look, and CLS after each block."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastvit.cli import options, terminal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastvit.study import AttentionDistance, ClsEvolution

_MAPS = {"layer": -1, "head": None, "query": None, "rollout": False, "out": None}  # options of maps, and their defaults


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("by layer")
    group.add_argument(
        "--by-layer", action="store_true", help="mean attention distance of heads, and CLS after each block, instead"
    )
    group.add_argument("--plot", type=Path, metavar="FILE", help="with --by-layer: a picture, .png or .svg")
    options.add_theme(group)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that do not go together, before anything takes time."""
    if not args.by_layer:
        if args.plot is not None:
            raise ValueError("--plot draws what --by-layer computes, which is not given")
        if len(args.images) > 1:
            raise ValueError(f"maps are of one IMAGE, got {len(args.images)}; --by-layer takes several")
        return
    for name, default in _MAPS.items():
        if getattr(args, name) != default:
            raise ValueError(f"--{name} is of maps, which --by-layer does not compute")
    if args.plot is not None:
        terminal.check_picture("--plot", args.plot)


def run(args: argparse.Namespace, model: nn.Module, images: list[Tensor]) -> None:
    """Compute, and print or draw. images: (3, H, W) each"""
    from fastvit import study

    distance, evolution = study.attention_distance(model, images), study.cls_evolution(model, images)
    height, width = images[0].shape[1:]
    what = f"{args.model}, {_count(images)} of {height} x {width} px, {distance.grid[0]} x {distance.grid[1]} patches"
    if args.plot is not None:
        from fastvit.study.attention.plot import draw

        terminal.write_figure(args.plot, draw(distance, evolution, what, args.theme), args.theme)
    if args.json:
        print(json.dumps(_values(args, (height, width), distance, evolution)))
    elif args.plot is None:
        _show(what, distance, evolution)


def _values(
    args: argparse.Namespace, size: tuple[int, int], distance: AttentionDistance, evolution: ClsEvolution
) -> dict[str, Any]:
    return {
        "model": args.model,
        "images": args.images,
        "weights": args.weights,
        "image_size": size,
        "grid": distance.grid,
        "patch_size": distance.patch_size,
        "distance": distance.distance.tolist(),
        "uniform": distance.uniform,
        "state": "patches" if evolution.pooled else "cls",
        "cosine": evolution.cosine.tolist(),
    }


def _show(what: str, distance: AttentionDistance, evolution: ClsEvolution) -> None:
    cosines = [f"{cosine:.3f}" for cosine in evolution.mean.tolist()]
    if len(cosines) != len(distance.layers):
        raise ValueError(
            f"the table needs as many blocks as layers of attention, got {len(cosines)} and {len(distance.layers)}; "
            "--json and --plot do not"
        )
    rows = []
    for layer, each, cosine in zip(distance.layers, distance.distance, cosines, strict=True):
        pixels = [f"{value:.1f}" for value in (each.mean(), each.min(), each.max())]
        rows.append([str(layer), *pixels, f"{100 * each.mean() / distance.uniform:.0f}%", cosine])
    heads = ["layer", "mean px", "least", "most", "of uniform", "cosine"]
    terminal.print_table(heads, rows, title=what, words=())
    notes = [
        f"mean, least, most: attention distance of the {len(distance.heads)} heads",
        f"uniform: equal weights, {distance.uniform:.1f} px",
        f"cosine: {evolution.state} after the block, to after the last, before the last norm",
    ]
    terminal.console().print("\n" + "\n".join(notes))


def _count(images: list[Tensor]) -> str:
    return "one image" if len(images) == 1 else f"{len(images)} images"
