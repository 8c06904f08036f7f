"""`fastvit memory`: planned and measured peaks, what fits into a budget, and how memory grows."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastvit.cli import options, terminal

if TYPE_CHECKING:
    from fastvit.study import MemoryPoint, MemoryStudy

PROVIDERS = ("eager", "sdpa", "fastvit")

EXAMPLES = """examples:
  fastvit memory vit_large_patch16_224 --image-size 224,512,1024,2048
  fastvit memory vit_base_patch14_dinov2 --image-size 518 --budget 24GiB
  fastvit memory vit_tiny_patch16_224 --image-size 224,384 --plot memory.svg
  fastvit memory vit_tiny_patch16_224 --mode infer --dtype fp32 --measured
  fastvit memory vit_small_patch14_dinov2 --image-size 518,224,224 --together
  fastvit memory vit_tiny_patch16_224 --batch 8 --device cuda --graphs
  fastvit memory ./config.json --device cuda --json

For planned figures the model itself runs on fake tensors: nothing is allocated,
and --device cuda needs no GPU. Every part is what it holds at the moment of the
peak, and planned is their sum. Gradients, for example, are small if the peak is
early in the backward pass.
  saved      tensors that the forward pass keeps for the backward pass
  attention  N x N scores
  graph      with --graphs: the memory that the captured passes keep, gradients
             and a copy of the images included; grads are copies in .grad
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    options.add_model(parser)
    options.add_image_size(parser, several=True)
    add = parser.add_argument
    add("--together", action="store_true", help="one step with a list of images of all sizes, --batch of each")
    add("--patch-size", type=options.size, metavar="PX", help="14 or 16x8 (default: the model's)")
    options.add_batches(parser, "8")
    add("--mode", choices=("train", "infer"), default="train", help="a training step, or a forward pass")
    options.add_training(parser)
    add("--checkpointing", action="store_true", help="recompute blocks in the backward pass")
    add("--graphs", action="store_true", help="the passes as one captured CUDA graph, as fastvit.graphs runs them")
    text = f"of {', '.join(PROVIDERS)} (default: all; with --together fastvit, which alone takes lists)"
    add("--providers", type=options.words_of(PROVIDERS), metavar="P,...", help=text)
    options.add_planned_device(parser)
    add("--measured", action="store_true", help="run the steps too, and read the allocator")
    options.add_budget(parser, "the largest batch and image that fit")
    output = parser.add_argument_group("output")
    options.add_json(output, "everything, in bytes, on standard output")
    output.add_argument("--plot", type=Path, metavar="FILE", help="a picture, .png or .svg")
    options.add_theme(output)


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silence the profiler that reads the CPU's allocator
    if args.plot is not None:
        _check_plot(args)
    from fastvit import study

    if args.together and args.budget:
        raise ValueError("--budget searches batches of one image size, and --together has several")
    if args.providers is None:
        args.providers = ["fastvit"] if args.together else list(PROVIDERS)
    names = ("patch_size", "device", "mode", "dtype", "optimizer", "checkpointing", "graphs")
    common = {name: getattr(args, name) for name in names}
    sizes = args.image_size or [study.image_size(args.model)]
    points = (1 if args.together else len(sizes)) * len(args.batch) * len(args.providers)
    with terminal.progress(points, "planning") as progress:
        found = study.memory(
            args.model, image_sizes=sizes, batches=args.batch, providers=args.providers, measured=args.measured,
            together=args.together, progress=progress, **common,
        )  # fmt: skip
    fits = _fits(args, sizes, common) if args.budget else []
    if args.plot is not None:
        _plot(found, args)
    if args.json:
        print(json.dumps(as_json(found) | ({"budget": args.budget, "fits": fits} if fits else {}), indent=2))
    else:
        _print(found, args, fits)
    return 0


def _fits(args: argparse.Namespace, sizes: list[tuple[int, int]], common: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for every provider the largest batch at every image size, and the largest image at every batch."""
    from fastvit import study
    from fastvit.study.sources.model_source import pixels

    rows: list[dict[str, Any]] = []
    with terminal.progress(len(args.providers) * (len(sizes) + len(args.batch)), "what fits") as progress:
        for provider in args.providers:
            batch_of, image_of = dict[str, int](), dict[str, int | None]()
            for size in sizes:
                progress(f"{provider}, batch at {pixels(size)}")
                batch_of[pixels(size)] = study.largest_batch(
                    args.model, args.budget, image_size=size, provider=provider, **common
                )
            for batch in args.batch:
                progress(f"{provider}, image at batch {batch}")
                try:
                    image_of[str(batch)] = study.largest_image(
                        args.model, args.budget, batch=batch, provider=provider, **common
                    )
                except ValueError as error:  # a model of one size, or patches that are not square
                    image_of[str(batch)] = None
                    print(f"fastvit: no largest image: {terminal.described(error)}", file=sys.stderr)
            rows.append({"provider": provider, "batch": batch_of, "image_size": image_of})
    return rows


def as_json(found: MemoryStudy) -> dict[str, Any]:
    """Return the study as plain values, with the peaks next to their parts."""
    values = dataclasses.asdict(found)
    for point, plain in zip(found.points, values["points"], strict=True):
        plain["planned"]["peak"] = point.planned.peak
    providers = dict.fromkeys(p.provider for p in found.points)
    return values | {"exponents": {provider: found.exponents(provider) for provider in providers}}


def _print(found: MemoryStudy, args: argparse.Namespace, fits: list[dict[str, Any]]) -> None:
    from fastvit.study.memory.plot import NAMES
    from fastvit.study.sources.model_source import pixels

    s = found.setting
    step = f"training with {s.optimizer}" if s.mode == "train" else "inference"
    checkpointed = ", checkpointed" if s.checkpointing else ""
    batches = list(dict.fromkeys(p.batch for p in found.points))
    batch = f"batch {batches[0]}" if len(batches) == 1 else "by batch"
    title = f"{found.model}, {batch}, {step}{checkpointed}, {s.dtype}, {_device(found)}: MiB at the peak"
    heads = ["image", "N", "batch"][: 2 + (len(batches) > 1)]
    keys = len(heads) + 1
    heads += ["", "weights", "grads", "optim", "saved", "attention", "other", *["graph"] * s.graphs, "planned"]
    heads += ["measured"] if args.measured else []
    rows: list[list[str]] = []
    last = None
    for p in found.points:
        first = last != (p.image_size, p.batch)
        if first and rows:
            rows.append([])
        last = p.image_size, p.batch
        image = f"{pixels(p.image_size)} + {len(found.together) - 1}" if found.together else pixels(p.image_size)
        row = [image, str(p.tokens), str(p.batch)][: keys - 1] if first else [""] * (keys - 1)
        rows.append([*row, NAMES[p.provider], *_cells(p), *([_mib(p.measured)] if args.measured else [])])
    terminal.print_table(heads, rows, title=title, words=(keys - 1,))
    console = terminal.console()
    console.print("\neach part is what it holds at the moment of the peak; planned is their sum")
    for provider in dict.fromkeys(p.provider for p in found.points):
        if slopes := found.exponents(provider):
            growth = ", ".join(f"{name} as N^{p:.2f}" for name, p in slopes.items())
            console.print(f"{NAMES[provider]}: {growth}")
    for fit in fits:
        batches_that_fit = ", ".join(f"{b} at {size}" for size, b in fit["batch"].items())
        images = ", ".join(f"{'-' if px is None else px or 'none'} at batch {b}" for b, px in fit["image_size"].items())
        console.print(f"{NAMES[fit['provider']]}, within the budget: batch {batches_that_fit}; image size {images}")


def _cells(p: MemoryPoint) -> list[str]:
    parts = p.planned
    other = parts.inputs + parts.temporaries
    graph = [parts.graph] if parts.graph else []
    figures = parts.weights, parts.gradients, parts.optimizer, parts.saved, parts.attention, other, *graph, parts.peak
    return [*map(_mib, figures)]


def _device(found: MemoryStudy) -> str:
    return ("GPU" if found.device == "cuda" else "CPU") + " with CUDA graphs" * found.setting.graphs


def _mib(value: int | None) -> str:
    """Write bytes in MiB, with one decimal below 99."""
    if value is None:
        return ""
    mib = value / 2**20
    return f"{mib:.1f}" if 0 < mib < 99 else f"{mib:,.0f}"


def _check_plot(args: argparse.Namespace) -> None:
    """Raise for options that --plot cannot draw, before anything takes time."""
    if len(args.image_size or []) < 2:
        raise ValueError("--plot draws memory against tokens: it needs two image sizes or more")
    if args.together:
        raise ValueError("--plot draws memory against tokens, and --together has one number of them")
    terminal.check_picture("--plot", args.plot)


def _plot(found: MemoryStudy, args: argparse.Namespace) -> None:
    from fastvit.study.memory.plot import draw

    panels: dict[str, dict[str, tuple[list[int], list[int]]]] = {"activations": {}, "whole step": {}}
    for provider in dict.fromkeys(p.provider for p in found.points):
        points = [p for p in found.of(provider) if p.batch == args.batch[0]]
        tokens = [p.tokens for p in points]
        panels["activations"][provider] = tokens, [p.activations for p in points]
        panels["whole step"][provider] = tokens, [p.planned.peak for p in points]
    s = found.setting
    caption = f"{found.model}, batch {args.batch[0]}, {s.dtype}, {s.optimizer}, planned for a {_device(found)}"
    what = f"peak memory, {'training' if s.mode == 'train' else 'inference'}"
    terminal.write_figure(args.plot, draw(panels, caption, args.theme, what), args.theme)
