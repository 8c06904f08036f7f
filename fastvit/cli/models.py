"""`fastvit models`: the cost of every known model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastvit import _triton
from fastvit.cli import options, terminal

if TYPE_CHECKING:
    from fastvit.study import ModelCost

_SORTS = ("name", "parameters", "tokens", "flops", "saved", "bound")
_EPILOG = """columns:
  size        image / patch, in pixels
  tokens      patches and prefix (CLS, registers); empty for models that are no
              plain ViTs
  MACs        multiply-adds of matmuls and convolutions in a forward pass of a
              batch; papers often call these FLOPs, which are two for each
  saved       bytes that autograd keeps for backward, in bfloat16, with
              fastvit's ops if they replace blocks of the model
  bound       the least time of a forward pass in 16 bits by the datasheet of
              the GPU: the larger of FLOPs / rate of dense matmuls and least
              bytes / bandwidth. A bound, not a prediction: no kernel reaches it

examples:
  fastvit models vit_base_patch16_384  with parameters by part
  fastvit models 'vit_base_*' --image-size 384
  fastvit models vit_base_patch16_224 resnet50
  fastvit models 'vit_*_224' --sort flops
  fastvit models 'vit_*_dinov3' --parts --sort parameters
  fastvit models vit_large_patch16_224 --batch 1,32 --gpu "H100 SXM"
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
    parser.add_argument("--gpu", help='add the bound of a GPU: "T4", "A100 80GB SXM", "H100 SXM", "RTX 4090", ...')
    parser.add_argument("--sort", choices=_SORTS, default="name", help="largest first, except by name")
    parser.add_argument("--parts", action="store_true", help="parameters by part")
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
            args.models, image_size=args.image_size, patch_size=args.patch_size, batch=args.batch, gpu=args.gpu,
            sort=args.sort, step=step, refused=refused.append,
        )  # fmt: skip
    if args.json:
        print(json.dumps({"models": [fields(cost) for cost in costs], "left_out": refused}, indent=2))
    elif len(costs) == 1:
        _one(costs[0])
    else:
        _table(costs, "parts" if args.parts else "cost")
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
    _triton.check("--block")
    from fastvit.study.memory.block import draw_blocks

    size, patch = ((sizes or [None])[0] for sizes in (args.image_size, args.patch_size))
    terminal.write_figure(args.block, draw_blocks(args.models[0], args.theme, size, patch), args.theme)
    return 0


def fields(cost: ModelCost) -> dict[str, Any]:
    """Return everything about a row, without nesting."""
    from dataclasses import asdict

    from fastvit.study.models.hardware import GPUS

    found: dict[str, Any] = {"model": cost.name}
    found |= {key: getattr(cost, key) for key in ("image_size", "patch_size", "grid", "batch")}
    found |= {key: getattr(cost, key) for key in ("patches", "prefix_tokens", "tokens", "patch_pairs", "token_pairs")}
    found["parameters"] = cost.parameters.total
    found |= {f"parameters_{part}": count for part, count in asdict(cost.parameters).items()}
    found |= {key: getattr(cost, key) for key in ("macs", "flops", "saved_bytes", "fused", "least_bytes")}
    if cost.bound is not None:
        found |= {"gpu": cost.bound.gpu, "bound_seconds": cost.bound.seconds, "bound_by": cost.bound.limit}
        found |= {"gpu_source": GPUS[cost.bound.gpu].source, "gpu_dtype": GPUS[cost.bound.gpu].dtype}
    return found


_COLUMNS = {  # of each table, after the model's name
    "cost": ["size", "tokens", "params", "MACs", "saved"],
    "parts": ["size", "total", "patches", "positions", "attention", "MLP", "norms", "head", "other"],
}


def _table(costs: Sequence[ModelCost], kind: str) -> None:
    heads = list(_COLUMNS[kind])
    batches = list(dict.fromkeys(cost.batch for cost in costs))
    if len(batches) > 1 and kind != "parts":
        heads.insert(1, "batch")
    if costs[0].bound is not None and kind == "cost":
        heads.append("bound")
    if kind == "parts" and not any(cost.parameters.other for cost in costs):
        heads.remove("other")
    rows = []
    for cost in costs:
        parameters = cost.parameters
        known = {
            "size": _size(cost), "batch": str(cost.batch), "tokens": _exact(cost.tokens),
            "params": _short(parameters.total), "MACs": _short(cost.macs),
            "saved": _bytes(cost.saved_bytes), "total": _short(parameters.total),
            "patches": _short(parameters.patch_embedding), "positions": _short(parameters.positions),
            "attention": _short(parameters.attention), "MLP": _short(parameters.mlp), "norms": _short(parameters.norms),
            "head": _short(parameters.head), "other": _short(parameters.other), "bound": _seconds(cost),
        }  # fmt: skip
        rows.append([cost.name, *(known[head] for head in heads)])
    names = list(dict.fromkeys(cost.name for cost in costs))
    what = names[0] if len(names) == 1 else f"{len(names)} models"
    batch = f"batch {batches[0]}" if len(batches) == 1 else "by batch"
    title = {
        "cost": f"{what}, {batch}, bfloat16; saved: what training keeps for backward",
        "parts": f"{what}: parameters by part",
    }[kind]
    terminal.print_table(["model", *heads], rows, title=title, words=(0,))
    notes = []
    if kind == "cost":
        notes.append("\na multiply-add (MAC) is two FLOPs, which papers often call one")
        if unfused := list(dict.fromkeys(cost.name for cost in costs if not cost.fused)):
            notes.append(f"saved is with PyTorch's ops where fastvit fuses no block: {', '.join(unfused)}")
        notes += _notes_on_gpu(costs[0])
    for note in notes:
        terminal.console().print(note, markup=False)


def _notes_on_gpu(cost: ModelCost) -> list[str]:
    from fastvit.study.models.hardware import GPUS

    if cost.bound is None:
        return []
    notes = [f"bound: the least time that the datasheet of {cost.bound.gpu} allows, no prediction"]
    if GPUS[cost.bound.gpu].dtype == "float16":
        notes.append(
            f"{cost.bound.gpu} has no bfloat16: its bound is of float16. fastvit's Triton kernels need sm_80, so "
            "PyTorch's functions run there"
        )
    return notes


def _one(cost: ModelCost) -> None:
    from fastvit.study.models.hardware import GPUS

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
    names = {
        "patch embedding": parameters.patch_embedding, "positions, prefix": parameters.positions,
        "attention": parameters.attention, "MLP": parameters.mlp, "norms, scales": parameters.norms,
        "head": parameters.head, "other": parameters.other,
    }  # fmt: skip
    rows += [[f"  {name}", f"{count:,}", f"{count / parameters.total:.1%}"] for name, count in names.items() if count]
    rows.append(["MACs", f"{cost.macs:,}", f"multiply-adds of a forward{batch}, which many papers call FLOPs"])
    rows.append(["FLOPs", f"{cost.flops:,}", "two for a multiply-add"])
    ops = "fastvit's ops" if cost.fused else "PyTorch's ops: fastvit fuses no block of it"
    rows.append(["saved for backward", _bytes(cost.saved_bytes), f"activations{batch}, {ops}"])
    if cost.bound is not None:
        why = "FLOPs / rate" if cost.bound.limit == "FLOPs" else "least bytes / bandwidth"
        rows.append([f"bound on {cost.bound.gpu}", _seconds(cost), f"{why}; {GPUS[cost.bound.gpu].source}"])
    title = f"{cost.name}, batch {cost.batch}, bfloat16; saved: in training"
    terminal.print_table([], rows, title=title, words=(0, 2))
    for note in _notes_on_gpu(cost):
        terminal.console().print(note, markup=False)


def _size(cost: ModelCost) -> str:
    from fastvit.study.sources.model_source import pixels

    return pixels(cost.image_size) + (f"/{pixels(cost.patch_size)}" if cost.patch_size else "")


def _exact(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


def _short(count: float | None) -> str:
    """Write 86859496 as "86.9M"."""
    if count is None:
        return ""
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
