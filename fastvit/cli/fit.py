"""`fastvit fit`: what each block recomputes, so that a training step fits into a memory budget."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastvit.cli import options, terminal

if TYPE_CHECKING:
    from fastvit.study import Fit

_EPILOG = """examples:
  fastvit fit vit_base_patch14_dinov2 --budget 24GiB --batch 64 --image-size 518
  fastvit fit vit_large_patch16_224 --budget 16GiB --batch 128 --device cuda
  fastvit fit vit_base_patch16_224 --budget 8GiB --batch 256 --plot fit.svg
  fastvit fit ./config.json --budget 80GB --batch 32 --dtype amp --json

Planned on fake tensors: nothing is allocated, and --device cuda needs no GPU.
Computed again is the share of the step's FLOPs that recomputation adds. The
chosen way is the cheapest that fits, and its peak is that of a trace of this
step; peaks of the others are sums over the blocks. If the batch does not fit,
figures are of the batches that gradient accumulation takes. In Python,
fastvit.fit(model, ...) puts it on a model.

status: 0 if the whole batch fits into the budget, 1 if not
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    options.add_model(parser)
    options.add_budget(parser, "that a step has to fit into", required=True)
    parser.add_argument("--batch", type=options.batch, required=True, metavar="B", help="images of one step")
    options.add_image_size(parser)
    options.add_training(parser)
    options.add_planned_device(parser)
    output = parser.add_argument_group("output")
    options.add_json(output)
    output.add_argument("--plot", type=Path, metavar="FILE", help="peaks against recomputation, .png or .svg")
    options.add_theme(output)


def run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        terminal.check_picture("--plot", args.plot)
    from fastvit import study

    with terminal.progress(None, "fit") as step:
        found = study.fit(
            args.model, budget=args.budget, batch=args.batch, image_size=args.image_size, dtype=args.dtype,
            optimizer=args.optimizer, device=args.device, progress=step,
        )  # fmt: skip
    if args.plot is not None:
        from fastvit.study.fitting.report import draw

        terminal.write_figure(args.plot, draw(found, args.theme), args.theme)
    if args.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        _print(found)
    return int(not found.fits)


def as_json(found: Fit) -> dict[str, Any]:
    """Return the fit as plain values, with the choices in words too."""
    choices = [choice._asdict() | {"words": str(choice)} for choice in found.choices]
    return {"fits": found.fits} | asdict(found) | {"choices": choices}


def _print(found: Fit) -> None:
    from fastvit.study.fitting.report import bound, count_of_images, policy, rows, size_in_words, step_in_words

    console = terminal.console()
    for line in [step_in_words(found), *policy(found), ""]:
        console.print(line, markup=False)
    terminal.print_table(
        ["recomputed", "peak", "computed again", "fits"],
        [
            [name, size_in_words(peak), f"{100 * again:.1f} %", "yes" if peak <= found.budget else "[bold red]no[/]"]
            for name, peak, again in rows(found)
        ],
        title=f"planned for a training step of {count_of_images(found.micro_batch or 1)}",
    )
    for line in bound(found):
        console.print(line, markup=False)
