"""fastvit memory: planned and measured peaks, what fits into a budget, and how memory grows."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastvit.cli import terminal

if TYPE_CHECKING:
    from fastvit.study import MemoryPoint, MemoryStudy

PROVIDERS = ("eager", "sdpa", "compile", "fused")
UNITS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}

EXAMPLES = """examples:
  fastvit memory vit_large_patch16_224 --image-size 224,512,1024,2048
  fastvit memory vit_base_patch14_dinov2 --image-size 518 --budget 24GiB
  fastvit memory vit_tiny_patch16_224 --image-size 224,384 --plot memory.svg
  fastvit memory vit_tiny_patch16_224 --mode infer --dtype fp32 --measured
  fastvit memory ./config.json --device cuda --json

Planned figures come from the model itself, run on fake tensors: nothing is
allocated, and no GPU is needed for --device cuda. Every part is what it holds
at the moment of the peak, and planned is their sum: gradients, for example, are
small where the peak is early in the backward pass.
  saved      what the forward pass keeps for the backward pass
  attention  N x N scores
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("model", help="a model's name, a config.json of transformers, or module:function")
    parser.add_argument(
        "--image-size", type=terminal.sizes, metavar="PX,...", help="224 or 224x448 (default: the model's)"
    )
    parser.add_argument("--patch-size", type=terminal.size, metavar="PX", help="14 or 16x8 (default: the model's)")
    parser.add_argument("--batch", type=terminal.integers, default="8", metavar="B,...", help="images")
    parser.add_argument(
        "--mode", choices=("train", "infer"), default="train", help="a training step, or a forward pass"
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16", "amp"), default="bf16", help="amp: float32 under autocast to bf16"
    )
    parser.add_argument(
        "--optimizer", choices=("adamw", "sgd", "none"), default="adamw", help="whose states are counted"
    )
    parser.add_argument("--checkpointing", action="store_true", help="compute blocks again in the backward pass")
    parser.add_argument(
        "--providers", type=_providers, default="eager,sdpa,fused", metavar="P,...", help=f"of {', '.join(PROVIDERS)}"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="what to plan for (default: this machine's)")
    parser.add_argument("--measured", action="store_true", help="run the steps too, and read the allocator")
    parser.add_argument("--budget", type=memory_size, metavar="24GiB", help="the largest batch and image that fit")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="everything, in bytes, on standard output")
    output.add_argument("--csv", action="store_true", help="one line per point, in bytes, on standard output")
    output.add_argument("--plot", type=Path, metavar="FILE", help="a picture, .png or .svg")
    output.add_argument("--theme", choices=("light", "dark"), default="light", help="the picture's background")


def memory_size(text: str) -> int:
    """ "24GiB", "80GB", "500 MiB" -> bytes. A number alone is an error: it could be any unit."""
    words = text.strip().lower()
    number = words.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = words[len(number) :].strip()
    if number and not unit:
        raise argparse.ArgumentTypeError(f"must have a unit, such as {number}GiB or {number}GB, got {text!r}")
    try:
        value = float(number) * UNITS[unit]
    except (ValueError, KeyError):
        value = 0.0
    if not 0 < value < 1e18:
        raise argparse.ArgumentTypeError(f"must be an amount of memory such as 24GiB or 80GB, got {text!r}")
    return int(value)


def _providers(text: str) -> list[str]:
    words = [word for word in text.split(",") if word]
    if unknown := [word for word in words if word not in PROVIDERS]:
        raise argparse.ArgumentTypeError(f"providers are {', '.join(PROVIDERS)}, got {unknown[0]!r}")
    if not words:
        raise argparse.ArgumentTypeError(f"providers are {', '.join(PROVIDERS)}, got none")
    return words


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that reads the CPU's allocator tells when it starts
    if args.plot is not None:
        _check_plot(args)
    from fastvit import study

    setting: dict[str, Any] = {
        "mode": args.mode, "dtype": args.dtype, "optimizer": args.optimizer, "checkpointing": args.checkpointing,
    }  # fmt: skip
    common: dict[str, Any] = {"patch_size": args.patch_size, "device": args.device, **setting}
    sizes = args.image_size or [study.image_size(args.model)]
    points = len(sizes) * len(args.batch) * len(args.providers)
    with terminal.progress(points, "planning") as progress:
        found = study.memory(
            args.model, image_sizes=sizes, batches=args.batch, providers=args.providers, measured=args.measured,
            progress=progress, **common,
        )  # fmt: skip
    fits = _fits(args, sizes, common) if args.budget else []
    if args.plot is not None:
        _plot(found, args)
    if args.json:
        print(json.dumps(as_json(found) | ({"budget": args.budget, "fits": fits} if fits else {}), indent=2))
    elif args.csv:
        print(_csv(found), end="")
    else:
        _print(found, args, fits)
    return 0


def _fits(args: argparse.Namespace, sizes: list[tuple[int, int]], common: dict[str, Any]) -> list[dict[str, Any]]:
    """For every provider: the largest batch at every image size, and the largest image at every batch."""
    from fastvit.study.memory.growth import Search
    from fastvit.study.sources.model_source import pixels

    planned = [p for p in args.providers if p != "compile"]
    rows: list[dict[str, Any]] = []
    with terminal.progress(len(planned) * (len(sizes) + len(args.batch)), "what fits") as progress:
        for provider in planned:
            search = Search(args.model, provider=provider, **common)
            batch_of, image_of = dict[str, int](), dict[str, int | None]()
            for size in sizes:
                progress(f"{provider}, batch at {pixels(size)}")
                batch_of[pixels(size)] = search.largest_batch(args.budget, size)
            for batch in args.batch:
                progress(f"{provider}, image at batch {batch}")
                try:
                    image_of[str(batch)] = search.largest_image(args.budget, batch)
                except ValueError as error:  # of a model of one size, or patches that are not square
                    image_of[str(batch)] = None
                    print(f"fastvit: no largest image: {terminal.described(error)}", file=sys.stderr)
            rows.append({"provider": provider, "batch": batch_of, "image_size": image_of})
    return rows


def as_json(found: MemoryStudy) -> dict[str, Any]:
    """The study as plain values; peaks beside the parts that they are the sum of."""
    values = dataclasses.asdict(found)
    for point, plain in zip(found.points, values["points"], strict=True):
        if point.planned is not None:
            plain["planned"]["peak"] = point.planned.peak
    providers = dict.fromkeys(p.provider for p in found.points if p.planned is not None)
    return values | {"exponents": {provider: found.exponents(provider) for provider in providers}}


def _csv(found: MemoryStudy) -> str:
    from fastvit.study import Parts

    names = [part.name for part in dataclasses.fields(Parts)]
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["model", "device", "provider", "height", "width", "tokens", "batch", *names, "planned", "measured"])
    for p in found.points:
        parts = [""] * len(names) if p.planned is None else [getattr(p.planned, name) for name in names]
        peak = "" if p.planned is None else p.planned.peak
        measured = "" if p.measured is None else p.measured
        table.writerow(
            [found.model, found.device, p.provider, *p.image_size, p.tokens, p.batch, *parts, peak, measured]
        )
    return out.getvalue()


def _print(found: MemoryStudy, args: argparse.Namespace, fits: list[dict[str, Any]]) -> None:
    from fastvit.study.memory.plot import NAMES
    from fastvit.study.sources.model_source import pixels

    s = found.setting
    step = f"training with optimizer {s.optimizer}" if s.mode == "train" else "inference"
    more = ", checkpointed" if s.checkpointing else ""
    batches = list(dict.fromkeys(p.batch for p in found.points))
    batch = f"batch {batches[0]}" if len(batches) == 1 else "by batch"
    title = f"{found.model}, {batch}, {step}{more}, {s.dtype}, on a {_device(found.device)}: MiB at the peak"
    heads = ["image", "N", "batch"][: 2 + (len(batches) > 1)]
    keys = len(heads) + 1
    heads += ["", "weights", "grads", "optim", "saved", "attention", "other", "planned"]
    heads += ["measured"] if args.measured else []
    rows: list[list[str]] = []
    last = None
    for p in found.points:
        first = last != (p.image_size, p.batch)
        if first and rows:
            rows.append([])
        last = p.image_size, p.batch
        row = [pixels(p.image_size), str(p.tokens or ""), str(p.batch)][: keys - 1] if first else [""] * (keys - 1)
        rows.append([*row, NAMES[p.provider], *_cells(p), *([_mib(p.measured)] if args.measured else [])])
    terminal.print_table(heads, rows, title=title, keys=keys, words=(keys - 1,))
    console = terminal.console()
    console.print("\neach part is what it holds at the moment of the peak; planned is their sum")
    for provider in dict.fromkeys(p.provider for p in found.points):
        slopes = found.exponents(provider) if found.of(provider) else {}
        if slopes:
            told = ", ".join(f"{name} as N^{p:.2f}" for name, p in slopes.items())
            console.print(f"{NAMES[provider]}: {told}")
    for fit in fits:
        batches_that_fit = ", ".join(f"{b} at {size}" for size, b in fit["batch"].items())
        images = ", ".join(f"{'-' if px is None else px or 'none'} at batch {b}" for b, px in fit["image_size"].items())
        console.print(f"{NAMES[fit['provider']]}, within the budget: batch {batches_that_fit}; image size {images}")


def _cells(p: MemoryPoint) -> list[str]:
    if p.planned is None:
        return [""] * 7
    of = p.planned
    other = of.inputs + of.temporaries
    return [_mib(n) for n in (of.weights, of.gradients, of.optimizer, of.saved, of.attention, other, of.peak)]


def _device(kind: str) -> str:
    return "GPU" if kind == "cuda" else "CPU"


def _mib(value: int | None) -> str:
    """With a fraction below three digits."""
    if value is None:
        return ""
    mib = value / 2**20
    return f"{mib:.1f}" if 0 < mib < 99 else f"{mib:,.0f}"


def _check_plot(args: argparse.Namespace) -> None:
    """Before anything takes time."""
    if len(args.image_size or []) < 2:
        raise ValueError("--plot draws memory against tokens: it wants two image sizes or more")
    if set(args.providers) == {"compile"}:
        raise ValueError("--plot draws planned figures, and the provider compile has none")
    terminal.check_picture("--plot", args.plot)


def _plot(found: MemoryStudy, args: argparse.Namespace) -> None:
    from fastvit.study.memory.plot import draw

    panels: dict[str, dict[str, tuple[list[int], list[int]]]] = {"activations": {}, "whole step": {}}
    for provider in dict.fromkeys(p.provider for p in found.points):
        points = [p for p in found.of(provider) if p.batch == args.batch[0]]
        if points:
            tokens = [p.tokens for p in points]
            planned = [p.planned for p in points if p.planned is not None]
            panels["activations"][provider] = tokens, [p.activations for p in points]
            panels["whole step"][provider] = tokens, [p.peak for p in planned]
    s = found.setting
    caption = f"{found.model}, batch {args.batch[0]}, {s.dtype}, {s.optimizer}, planned for a {_device(found.device)}"
    what = f"peak memory, {'training' if s.mode == 'train' else 'inference'}"
    terminal.write_figure(args.plot, draw(panels, caption, args.theme, what), args.theme)
