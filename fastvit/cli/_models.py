"""fastvit models"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastvit.cli import _terminal

if TYPE_CHECKING:
    from fastvit.study import ModelCost

_SORTS = ("name", "parameters", "tokens", "flops", "saved", "bound")
_EPILOG = """columns:
  size    image / patch, in pixels
  tokens  patches and prefix (CLS, registers)
  N x N   elements of one head's attention matrix: tokens^2
  FLOPs   of the forward pass of a batch: matmuls and convolutions only, two for
          a multiply-add
  saved   what autograd keeps of the batch for the backward pass, in bfloat16,
          with fastvit's ops
  bound   the least time of a forward pass in bfloat16 that the GPU's datasheet
          allows: the larger of FLOPs / rate of dense matmuls and least bytes /
          bandwidth. It is a bound, no prediction: no kernel reaches it

examples:
  fastvit models vit_base_patch16_384  with parameters by part
  fastvit models 'vit_base_*' --image-size 384
  fastvit models 'vit_*_dinov3' --parts --sort parameters
  fastvit models vit_large_patch16_224 --batch 1,32 --gpu "H100 SXM"
  fastvit models --csv > models.csv
  fastvit models vit_base_patch16_224 --block block.svg
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument(
        "models", nargs="*", default=["*"], metavar="MODEL",
        help="a pattern of names of the zoo, a name of timm, a config.json, module:function (default: the zoo)",
    )  # fmt: skip
    parser.add_argument(
        "--image-size", type=_terminal.sizes, metavar="S,...", help="224,384x512 (default: each model's)"
    )
    parser.add_argument("--patch-size", type=_terminal.sizes, metavar="S,...", help="14,16 (default: each model's)")
    parser.add_argument("--batch", type=_terminal.integers, default="1", metavar="B,...", help="images")
    parser.add_argument("--gpu", help='add the bound of a GPU: "A100 80GB SXM", "H100 SXM", "RTX 4090", ...')
    parser.add_argument("--sort", choices=_SORTS, default="name", help="largest first, unless by name")
    parser.add_argument("--parts", action="store_true", help="parameters by part")
    parser.add_argument("--block", type=Path, metavar="FILE", help="draw the ops of one model's block, .png or .svg")
    parser.add_argument("--theme", choices=("light", "dark"), default="light", help="the drawing's background")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="everything, as JSON")
    form.add_argument("--csv", action="store_true", help="everything, as CSV")


def run(args: argparse.Namespace) -> int:
    from fastvit import study
    from fastvit.study._models import matching

    if args.block is not None:
        return _draw_block(args)
    refused: list[str] = []
    with _terminal.progress(len(matching(args.models)), "models") as step:
        costs = study.models(
            args.models, image_size=args.image_size, patch_size=args.patch_size, batch=args.batch, gpu=args.gpu,
            sort=args.sort, step=step, refused=refused.append,
        )  # fmt: skip
    if args.json:
        print(json.dumps({"models": [fields(cost) for cost in costs], "left_out": refused}, indent=2))
    elif args.csv:
        rows = [{key: _cell(value) for key, value in fields(cost).items()} for cost in costs]
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif len(costs) == 1:
        _one(costs[0])
    else:
        _table(costs, args.parts)
    if not args.json:
        for reason in refused:
            print(f"left out: {reason}", file=sys.stderr)
    return 0


def _draw_block(args: argparse.Namespace) -> int:
    """What a block runs and keeps, by provider."""
    if len(args.models) != 1:
        raise ValueError(f"--block draws one model, got {' '.join(args.models)}")
    if any(sizes and len(sizes) > 1 for sizes in (args.image_size, args.patch_size)):
        raise ValueError("--block draws one size of image and patch, got several")
    _terminal.check_picture("--block", args.block)
    from fastvit.study._block import draw_blocks

    size, patch = ((sizes or [None])[0] for sizes in (args.image_size, args.patch_size))
    _terminal.write_figure(args.block, draw_blocks(args.models[0], args.theme, size, patch), args.theme)
    return 0


def fields(cost: ModelCost) -> dict[str, Any]:
    """Everything about a row, flat."""
    from dataclasses import asdict

    from fastvit.study._hardware import GPUS

    found: dict[str, Any] = {"model": cost.name}
    found |= {key: getattr(cost, key) for key in ("image_size", "patch_size", "grid", "batch")}
    found |= {key: getattr(cost, key) for key in ("patches", "prefix_tokens", "tokens", "patch_pairs", "token_pairs")}
    found["parameters"] = cost.parameters.total
    found |= {f"parameters_{part}": count for part, count in asdict(cost.parameters).items()}
    found |= {key: getattr(cost, key) for key in ("flops", "saved_bytes", "least_bytes")}
    if cost.bound is not None:
        found |= {"gpu": cost.bound.gpu, "bound_seconds": cost.bound.seconds, "bound_by": cost.bound.limit}
        found["gpu_source"] = GPUS[cost.bound.gpu].source
    return found


def _cell(value: Any) -> Any:
    return "x".join(map(str, value)) if isinstance(value, tuple) else value


def _table(costs: Sequence[ModelCost], parts: bool) -> None:
    from fastvit.study._subject import pixels

    table = _terminal.wanted("rich.table", "rich").Table(
        box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    table.add_column("model", overflow="fold")
    heads = ["size"] if parts else ["size"] + ["batch"] * any(cost.batch > 1 for cost in costs)
    if parts:
        heads += ["total", "patches", "positions", "attention", "MLP", "norms", "head", "other"]
    else:
        heads += ["tokens", "N x N", "params", "FLOPs", "saved"] + ["bound"] * (costs[0].bound is not None)
    if not any(cost.parameters.other for cost in costs) and parts:
        heads.remove("other")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for cost in costs:
        of = cost.parameters
        known = {
            "size": f"{pixels(cost.image_size)}/{pixels(cost.patch_size)}", "batch": str(cost.batch),
            "tokens": f"{cost.tokens:,}", "N x N": _short(cost.token_pairs), "params": _short(of.total),
            "FLOPs": _short(cost.flops), "saved": _bytes(cost.saved_bytes), "total": _short(of.total),
            "patches": _short(of.patch_embedding), "positions": _short(of.positions),
            "attention": _short(of.attention), "MLP": _short(of.mlp), "norms": _short(of.norms),
            "head": _short(of.head), "other": _short(of.other), "bound": _seconds(cost),
        }  # fmt: skip
        table.add_row(cost.name, *(known[head] for head in heads))
    console = _terminal.console()
    console.print(table)
    if not parts and costs[0].bound is not None:
        console.print(f"bound: the least time that the datasheet of {costs[0].bound.gpu} allows, no prediction")


def _one(cost: ModelCost) -> None:
    from fastvit.study._hardware import GPUS
    from fastvit.study._subject import pixels

    of, batch = cost.parameters, f" of {cost.batch} images" if cost.batch > 1 else " of an image"
    make = _terminal.wanted("rich.table", "rich").Table
    table = make(box=None, pad_edge=False, show_header=False, title=cost.name, title_justify="left")
    table.title_style = "bold"
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify)
    down, across = cost.grid
    prefix = f"{cost.prefix_tokens} in front of {cost.patches:,} patches" if cost.prefix_tokens else "patches only"
    table.add_row("image, patch", f"{pixels(cost.image_size)}, {pixels(cost.patch_size)}", f"{down} x {across} patches")
    table.add_row("tokens", f"{cost.tokens:,}", prefix)
    table.add_row("attention matrix", f"{cost.token_pairs:,}", "elements per head, tokens^2")
    if cost.prefix_tokens:
        table.add_row("", f"{cost.patch_pairs:,}", "without the prefix, patches^2")
    table.add_row("parameters", f"{of.total:,}", "")
    names = {
        "patch embedding": of.patch_embedding, "positions, prefix tokens": of.positions, "attention": of.attention,
        "MLP": of.mlp, "norms, scales": of.norms, "head": of.head, "other": of.other,
    }  # fmt: skip
    for name, count in names.items():
        if count:
            table.add_row(f"  {name}", f"{count:,}", f"{count / of.total:.1%}")
    table.add_row("FLOPs", f"{cost.flops:,}", f"of a forward{batch}; two for a multiply-add")
    table.add_row("saved for backward", _bytes(cost.saved_bytes), f"activations{batch}, bfloat16, fastvit's ops")
    if cost.bound is not None:
        why = "FLOPs / rate" if cost.bound.limit == "FLOPs" else "least bytes / bandwidth"
        table.add_row(f"bound on {cost.bound.gpu}", _seconds(cost), f"of a forward{batch}: {why}; no prediction")
        table.add_row("", "", GPUS[cost.bound.gpu].source)
    _terminal.console().print(table)


def _short(count: float) -> str:
    """86859496 -> "86.9M"."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit * 0.9995:
            return f"{count / limit:.{1 if count < 1000 * limit else 0}f}{unit}"
    return str(count)


def _bytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 999.95e6 else f"{count / 1e6:.1f} MB"


def _seconds(cost: ModelCost) -> str:
    if cost.bound is None:
        return ""
    seconds = cost.bound.seconds
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
