"""fastvit explore: one page to explore a model, in one file."""

from __future__ import annotations

import argparse
from pathlib import Path

from fastvit.cli import options, terminal

_EXAMPLES = """examples:
  fastvit explore
  fastvit explore vit_small_patch14_dinov2 cat.jpg --image-size 224 \\
      --weights dinov2_vits14_pretrain.pth
  fastvit explore vit_large_patch16_224 cat.jpg --layers 0,11,23

The page needs no network: it opens from disk, and can be sent as one file. It
has at most 4 MB.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    options.add_model(parser, nargs="?", default="vit_base_patch16_224")
    parser.add_argument("image", nargs="?", metavar="IMAGE", help="a picture (default: a computed landscape)")
    options.add_weights(parser)
    options.add_image_size(parser)
    text = "layers, from 0, whose heads come first if the page has no room for all"
    parser.add_argument("--layers", type=options.several(options.index), metavar="N,...", help=text)
    parser.add_argument("--out", default="explore.html", metavar="FILE", help="the page")


def run(args: argparse.Namespace) -> int:
    if not args.out.lower().endswith((".html", ".htm")):
        raise ValueError(f"--out writes .html, got {args.out}")
    terminal.check_folder("--out", Path(args.out))
    from fastvit import study

    found = study.explore(
        args.model, args.image, weights=args.weights, image_size=args.image_size, layers=args.layers,
        progress=terminal.progress,
    )  # fmt: skip
    terminal.write(args.out, found.html())
    return 0
