"""`fastvit models`: the cost of every known model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastvit._base import which_triton
from fastvit.cli import options, terminal

if TYPE_CHECKING:
    from fastvit.study import ModelCost

_SORTS = ("name", "parameters", "tokens", "flops", "saved")
_EPILOG = """columns:
  size        image / patch, in pixels
  tokens      patches and prefix (CLS, registers); empty for models that are no
              plain ViTs
  MACs        multiply-adds of matmuls and convolutions in a forward pass of a
              batch; papers often call these FLOPs, which are two for each
  saved       bytes that autograd keeps for backward, in bfloat16, with
              fastvit's ops if they replace blocks of the model

examples:
  fastvit models vit_base_patch16_384  with parameters by part
  fastvit models 'vit_base_*' --image-size 384
  fastvit models vit_base_patch16_224 resnet50
  fastvit models 'vit_*_224' --sort flops
  fastvit models vit_large_patch16_224 --batch 1,32
  fastvit models vit_base_patch16_224 --block block.svg
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument(
        "models",
        nargs="*",
        default=["*"],
        metavar="MODEL",
        help=f"pattern of names of `fastvit models`, or {options.MODEL} (default: the zoo)",
    )
    options.add_image_size(parser, several=True, of="each model's")
    parser.add_argument("--patch-size", type=options.sizes, metavar="PX,...", help="14,16 (default: each model's)")
    options.add_batches(parser, "1")
    parser.add_argument("--sort", choices=_SORTS, default="name", help="largest first, except by name")
    parser.add_argument("--block", type=Path, metavar="FILE", help="draw the ops of one model's block, .png or .svg")
    options.add_theme(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.block is not None:
        return _draw_block(args)
    from fastvit import study
    from fastvit.study.models.costs import matching

    refused: list[str] = []
    with terminal.progress(len(matching(args.models)), "models") as step:
        costs = study.models(
            args.models, image_size=args.image_size, patch_size=args.patch_size, batch=args.batch, sort=args.sort,
            step=step, refused=refused.append,
        )  # fmt: skip
    if args.json:
        print(json.dumps({"models": [fields(cost) for cost in costs], "left_out": refused}, indent=2))
    elif len(costs) == 1:
        _one(costs[0])
    else:
        _table(costs)
    if not args.json:
        for reason in refused:
            print(f"left out: {reason}", file=sys.stderr)
    return 0


def _draw_block(args: argparse.Namespace) -> int:
    """Draw the ops of a block and what they keep, for every provider."""
    if len(args.models) != 1:
        raise ValueError(f"--block draws one model, got {' '.join(args.models)}")
    if any(sizes and len(sizes) > 1 for sizes in (args.image_size, args.patch_size)):
        raise ValueError("--block draws one size of image and patch, got several")
    terminal.check_picture("--block", args.block)
    which_triton.check("--block")
    from fastvit.study.memory.block import draw_blocks

    size, patch = ((sizes or [None])[0] for sizes in (args.image_size, args.patch_size))
    with terminal.progress(None, f"the block of {args.models[0]}"):
        figure = draw_blocks(args.models[0], args.theme, size, patch)
    terminal.write_figure(args.block, figure, args.theme)
    return 0


def fields(cost: ModelCost) -> dict[str, Any]:
    """Return everything about a row, without nesting."""
    from dataclasses import asdict

    found: dict[str, Any] = {"model": cost.name}
    found |= {key: getattr(cost, key) for key in ("image_size", "patch_size", "grid", "batch")}
    found |= {key: getattr(cost, key) for key in ("patches", "prefix_tokens", "tokens", "patch_pairs", "token_pairs")}
    found["parameters"] = cost.parameters.total
    found |= {f"parameters_{part}": count for part, count in asdict(cost.parameters).items()}
    found |= {key: getattr(cost, key) for key in ("macs", "flops", "saved_bytes", "fused")}
    return found


_PARTS = {  # field of the parameters -> name of its row
    "patch_embedding": "patch embedding",
    "positions": "positions, prefix",
    "attention": "attention",
    "mlp": "MLP",
    "norms": "norms, scales",
    "head": "head",
    "other": "other",
}


def _table(costs: Sequence[ModelCost]) -> None:
    batches = list(dict.fromkeys(cost.batch for cost in costs))
    heads = ["model", "size", *["batch"] * (len(batches) > 1), "tokens", "params", "MACs", "saved"]
    rows = [
        [cost.name, _size(cost), *[str(cost.batch)] * (len(batches) > 1), _exact(cost.tokens),
         _short(cost.parameters.total), _short(cost.macs), _bytes(cost.saved_bytes)]
        for cost in costs
    ]  # fmt: skip
    batch = f"batch {batches[0]}" if len(batches) == 1 else "by batch"
    names = {cost.name for cost in costs}
    what = costs[0].name if len(names) == 1 else f"{len(names)} models"
    title = f"{what}, {batch}, bfloat16; saved: what training keeps for backward"
    terminal.print_table(heads, rows, title=title, words=(0,))
    terminal.console().print("\na multiply-add (MAC) is two FLOPs, which papers often call one", markup=False)
    if unfused := list(dict.fromkeys(cost.name for cost in costs if not cost.fused)):
        note = f"saved is with PyTorch's ops where fastvit fuses no block: {', '.join(unfused)}"
        terminal.console().print(note, markup=False)


def _one(cost: ModelCost) -> None:
    parameters, batch = cost.parameters, f" of {cost.batch} images" if cost.batch > 1 else " of an image"
    rows = []
    if cost.grid is None:
        rows.append(["image", _size(cost), "no plain ViT: no sequence of tokens"])
    else:
        down, across = cost.grid
        prefix = f"{cost.prefix_tokens} in front of {cost.patches:,} patches" if cost.prefix_tokens else "patches only"
        rows.append(["image / patch", _size(cost), f"{down} x {across} patches"])
        rows.append(["tokens", _exact(cost.tokens), prefix])
        rows.append(["attention matrix", _exact(cost.token_pairs), "elements per head, tokens^2"])
        if cost.prefix_tokens:
            rows.append(["", _exact(cost.patch_pairs), "without the prefix, patches^2"])
    rows.append(["parameters", f"{parameters.total:,}", ""])
    for part, name in _PARTS.items():
        if count := getattr(parameters, part):
            rows.append([f"  {name}", f"{count:,}", f"{count / parameters.total:.1%}"])
    rows.append(["MACs", f"{cost.macs:,}", f"multiply-adds of a forward{batch}, which many papers call FLOPs"])
    rows.append(["FLOPs", f"{cost.flops:,}", "two for a multiply-add"])
    ops = "fastvit's ops" if cost.fused else "PyTorch's ops: fastvit fuses no block of it"
    rows.append(["saved for backward", _bytes(cost.saved_bytes), f"activations{batch}, {ops}"])
    title = f"{cost.name}, batch {cost.batch}, bfloat16; saved: in training"
    terminal.print_table([], rows, title=title, words=(0, 2))


def _size(cost: ModelCost) -> str:
    from fastvit.study.sources.model_source import pixels

    return pixels(cost.image_size) + (f"/{pixels(cost.patch_size)}" if cost.patch_size else "")


def _exact(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


def _short(count: float) -> str:
    """Write 86859496 as "86.9M"."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit * 0.9995:
            return f"{count / limit:.{1 if count < 1000 * limit else 0}f}{unit}"
    return str(count)


def _bytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 999.95e6 else f"{count / 1e6:.1f} MB"
