"""`fastvit attention`: attention maps and rollout over a picture, or figures by layer."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fastvit._base.units import MOST_PIXELS
from fastvit.cli import options, terminal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastvit.study import AttentionDistance, AttentionMaps, ClsEvolution, Picture

_EXAMPLES = """examples:
  fastvit attention vit_small_patch14_dinov2 cat.jpg \\
      --weights facebook/dinov2-small --out map.png
  fastvit attention vit_base_patch16_224 cat.jpg --weights vit.safetensors \\
      --layer 6 --head 3 --query 7,9 --out map.png
  fastvit attention vit_base_patch16_dinov3 cat.jpg \\
      --weights dinov3.safetensors --rollout --image-size 448x672
  fastvit attention my_models:trained cat.jpg --layer 0 --json > rows.json
  fastvit attention vit_base_patch16_224 cat.jpg dog.jpg \\
      --weights vit.safetensors --by-layer

Layers and heads count from 0, or with negative numbers from the last. Colours
are relative to a map's own largest weight. The picture is cropped and resized
to --image-size. It is normalised with timm's values for the model of that name,
or with ImageNet's for a configuration or function.
"""
_TOP = 4  # patches in a row of the table
_MAPS = {"layer": -1, "head": None, "query": None, "rollout": False, "out": None}  # options of maps, and their defaults


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    options.add_model(parser)
    add("images", metavar="IMAGE", nargs="+", help="a picture; with --by-layer also several")
    options.add_weights(parser, ", for a fastvit name")
    add("--layer", type=int, default=-1, metavar="N", help="which layer (default: the last)")
    add("--head", type=int, metavar="N", help="which head (default: all)")
    add("--query", type=_query, metavar="cls|ROW,COL", help="CLS or a patch (default: CLS, or the centre without CLS)")
    add("--rollout", action="store_true", help="also the rollout of attention through all layers")
    options.add_image_size(parser)
    add("--mean", type=_three, metavar="R,G,B", help="mean of pixels from 0 to 1 (default: the model's)")
    add("--std", type=_three, metavar="R,G,B", help="their standard deviation (default: the model's)")
    add("--out", type=_png, metavar="FILE.png", help="write a picture of the maps, instead of a table")
    options.add_json(parser, "every value, as JSON")
    text = "mean attention distance of heads, and CLS after each block, instead"
    add("--by-layer", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    from fastvit import study
    from fastvit.study.sources.find import find

    if not args.by_layer and len(args.images) > 1:
        raise ValueError(f"maps are of one IMAGE, got {len(args.images)}; --by-layer takes several")
    for name, default in _MAPS.items():
        if args.by_layer and getattr(args, name) != default:
            raise ValueError(f"--{name} is of maps, which --by-layer does not compute")
    if args.out is not None:
        terminal.wanted("matplotlib", "matplotlib")
        terminal.check_folder("--out", args.out)
    source = find(args.model)
    size, _ = source.sizes(args.image_size)
    mean, std = source.normalization
    pictures = [study.read_picture(image, size, args.mean or mean, args.std or std) for image in args.images]
    with terminal.progress(None, f"weights of {args.model}"):
        model = source.with_weights(args.weights, args.image_size)
    random = args.weights is None and source.origin != "function"
    if args.by_layer:
        _run_by_layer(args, model, size, [picture.pixels for picture in pictures])
    else:
        _run_maps(args, model, size, pictures[0], ", random weights" if random else "")
    if random:
        print(f"fastvit: {args.model} has random weights, without --weights", file=sys.stderr)
    return 0


def _run_maps(
    args: argparse.Namespace, model: nn.Module, size: tuple[int, int], picture: Picture, note: str
) -> None:  # fmt: skip
    """Compute, and print or draw, the maps of one picture. note: on the weights, ends the picture's caption."""
    from fastvit import study

    queries = None if args.query is None else [args.query]
    with terminal.progress(None, "attention maps"):
        maps = study.attention_maps(model, picture.pixels, args.layer, args.head, queries)
        rows = {f"head {head}": row[0] for head, row in zip(maps.heads, maps.rows[0], strict=True)}
        if args.rollout:
            rows["rollout"] = study.attention_rollout(model, picture.pixels, queries).rows[0]
    if args.out is not None:
        terminal.write(args.out, _drawn(picture, maps, rows, note))
    if args.json:
        values = {
            "model": args.model,
            "image": args.images[0],
            "weights": args.weights,
            "image_size": size,
            "grid": maps.grid,
            "num_prefix_tokens": maps.num_prefix_tokens,
            "layer": maps.layers[0],
            "depth": maps.depth,
            "query": maps.queries[0],
            "rows": {name: row.tolist() for name, row in rows.items()},
        }
        print(json.dumps(values))
    elif args.out is None:
        _show(args.model, maps, rows)


def _drawn(picture: Picture, maps: AttentionMaps, rows: dict[str, Tensor], note: str) -> bytes:
    from fastvit.study.attention.drawing import draw_maps

    tiles = []
    for name, row in rows.items():
        patches = row[maps.num_prefix_tokens :]
        tiles.append((f"{name}, up to {_percent(patches.max())}", patches.unflatten(0, maps.grid)))
    sheet = draw_maps(picture.shown, f"layer {maps.layers[0]}, {_query_name(maps)}{note}", tiles, maps.queries[0])
    file = io.BytesIO()
    sheet.save(file, "PNG", optimize=True)
    return file.getvalue()


def _show(model: str, maps: AttentionMaps, rows: dict[str, Tensor]) -> None:
    (h, w), prefix = maps.grid, maps.num_prefix_tokens
    top = min(_TOP, h * w)
    cells = []
    for name, row in rows.items():
        values, places = row[prefix:].topk(top)
        best = [f"({i // w},{i % w}) {_percent(v)}" for v, i in zip(values, places.tolist(), strict=True)]
        cells.append([name, _percent(row[:prefix].sum()) if prefix else "none", *best])
    title = f"{model}, float32: {_query_name(maps)} in layer {maps.layers[0]} of {maps.depth}, {h} x {w} patches"
    terminal.print_table(["", "prefix", *(f"top {n + 1}" for n in range(top))], cells, title=title)
    terminal.console().print(
        "\nprefix: weight of the tokens before the patches; top: (row,column) of the patches with most weight"
    )


def _run_by_layer(args: argparse.Namespace, model: nn.Module, size: tuple[int, int], images: list[Tensor]) -> None:
    """Compute and print figures by layer. images: (3, H, W) each"""
    from fastvit import study

    with terminal.progress(None, f"{len(images)} images by layer"):
        distance, evolution = study.attention_distance(model, images), study.cls_evolution(model, images)
    if not args.json:
        _show_by_layer(args.model, images, distance, evolution)
        return
    values = {
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
    print(json.dumps(values))


def _show_by_layer(name: str, images: list[Tensor], distance: AttentionDistance, evolution: ClsEvolution) -> None:
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


def _query_name(maps: AttentionMaps) -> str:
    query = maps.queries[0]
    return "query CLS" if isinstance(query, str) else f"query ({query[0]}, {query[1]})"


def _percent(share: Tensor) -> str:
    return f"{100 * float(share):.1f}%"


# ---- arguments ----


def _query(text: str) -> str | tuple[int, int]:
    if text == "cls":
        return text
    row, _, column = (options.whole(part.strip(), MOST_PIXELS, least=0) for part in text.partition(","))
    if row is None or column is None:
        raise argparse.ArgumentTypeError(f"must be cls, or row,column of a patch such as 7,9, got {text!r}")
    return row, column


def _three(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) != 3:
        raise argparse.ArgumentTypeError(f"must be three numbers such as 0.5,0.5,0.5, got {text!r}")
    return values


def _png(text: str) -> Path:
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"must be a .png file, got {text!r}")
    return Path(text)
